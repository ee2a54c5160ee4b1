"""Clusters, and meshes of GPUs that are not there."""
