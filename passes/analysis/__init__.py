"""What a step is: jaxprs, meshes, shardings; nothing is decided or changed here."""
