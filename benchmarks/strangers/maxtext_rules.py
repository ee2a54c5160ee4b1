"""Give MaxText's layers this project's matmul, as the argument that its layers take for another.

Its dense layers and its transformer take a `quant`, whose `dot_general_cls` makes the matmul that
they call. It is meant for quantized ones; this one computes what `jax.lax.dot_general` does.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jaxoverlap


@contextlib.contextmanager
def by_rules() -> Iterator[None]:
    """Make models, in this context, whose dense layers call `jaxoverlap.dot_general`.

    Their models are made deep inside of what makes a train step, which takes a `quant` by name of a
    published one; so the function that looks the name up is replaced while they are made.
    """
    from maxtext.layers import quantizations

    with mock.patch.object(quantizations, "configure_quantization", lambda *_, **__: _quant()):
        yield


def _quant() -> Any:
    from flax import linen
    from maxtext.layers import quantizations

    class DotGeneral(linen.Module):
        def __call__(self, lhs: Any, rhs: Any, numbers: Any, precision: Any = None) -> Any:
            return jaxoverlap.dot_general(lhs, rhs, numbers, precision)

    class ByRules(quantizations.Quantization):
        quant_mode = "train"
        needs_apply_rngs = False

        def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Any:
            return DotGeneral

    return ByRules()
