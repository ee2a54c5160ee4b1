"""Targets that `jaxoverlap new-target` writes as files to start from."""
