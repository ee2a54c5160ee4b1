"""The error of a matmul against float64."""

from __future__ import annotations

import numpy as np


def error(got, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(got) - exact) / np.linalg.norm(exact))
