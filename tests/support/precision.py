"""The error of a matmul against float64."""

from __future__ import annotations

import numpy as np


def error(got, exact: np.ndarray) -> float:
    """Return the error of all elements together, relative to their size."""
    difference = np.asarray(got).astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))
