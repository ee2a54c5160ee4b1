"""What a step keeps of its forward pass, and what it computes again in the backward pass."""
