"""A differential test in the shape of a user's life: drawn train steps, overlapped beside plain.

`python -m tests.differential --seeds 0:200` runs some; `--seed 17` says what one is and does.
"""
