"""Choose and change what a step keeps of its forward pass for the backward pass."""
