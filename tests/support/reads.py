"""Matmuls of a traced function, with shardings that a test gives."""

from __future__ import annotations

NO, D, M = (), ("data",), ("model",)


def matmul(x, w):
    return x @ w
