"""A function that computes each sequence of a batch alone, as one call in a jaxpr.

    y = per_sequence[call=...] x router gate up down       # and its gradient, another such call

Its author says that it does (`jaxoverlap.per_sequence`): no rule could find it out for tokens that
are sorted by expert and sent away. The call keeps the function itself, so that a batch split can
trace it again for a part of the batch; the rest of this package reads its jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

SEQUENCE_CALL = "per_sequence"  # the primitive's name


@dataclass(frozen=True)
class SequenceCall:
    """A function of flat arguments that computes each sequence alone.

    Attributes:
        fn: the function, of flat arguments to a flat list of results.
        operands: the batch dim of each argument; None for one that all sequences read.
        results: the same of each result; None for one that is a sum over the sequences.
    """

    fn: Callable[..., list[Any]] = field(repr=False)
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]

    def jaxpr(self, structs: Sequence[Any]) -> Any:
        """Trace the function.

        Args:
            structs: arrays, or their types.

        Raises:
            ValueError: if it reads arrays that are no arguments of it, or has effects.
        """
        jaxpr = jax.make_jaxpr(self.fn)(*structs)
        if jaxpr.consts:
            shapes = ", ".join(str(jax.typeof(c).str_short()) for c in jaxpr.consts)
            raise ValueError(
                f"a function of jaxoverlap.per_sequence reads arrays from outside: {shapes}; pass "
                "them as arguments, as others than those in argnums"
            )
        if jaxpr.effects:
            raise ValueError(
                f"a function of jaxoverlap.per_sequence has effects: {jaxpr.effects}; take out "
                "callbacks and prints, or call it without per_sequence"
            )
        return jaxpr
