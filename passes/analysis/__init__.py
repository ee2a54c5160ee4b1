"""Analyze a step's jaxprs, meshes and shardings; nothing is decided or changed here."""
