"""Compare drawn train steps under overlap() with the same steps under jax.jit, as users run them.

`python -m tests.differential --seeds 0:200` runs some; `--seed 17` describes one and runs it.
"""
