"""Choose how the values of a step lie on its mesh, where the user leaves that to XLA."""
