"""Choose how a model is split over a cluster: which mesh, before which overlap."""
