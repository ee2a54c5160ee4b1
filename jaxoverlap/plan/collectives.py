"""The one table of collectives: each under JAX's name, HLO's and this package's.

Plans and passes call a collective by its kind ("all_gather"); modules, simulations and tables of
seconds by its opcode in HLO ("all-gather"); a jaxpr has its primitive.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
"""The collectives that a matmul waits for, and that a ring can carry out."""


class CollectiveNames(NamedTuple):
    """One collective under all its names.

    Attributes:
        kind: this package's name.
        opcode: HLO's name.
        primitives: JAX's names; two where shard_map with `check_vma` has one of its own.
        ring: the pass that makes a ring of it and its matmul; "" if none does.
    """

    kind: str
    opcode: str
    primitives: tuple[str, ...]
    ring: str = ""


PERMUTE = "collective-permute"
TABLE = (
    CollectiveNames("all_gather", "all-gather", ("all_gather",), "all_gather_matmul"),
    CollectiveNames("all_to_all", "all-to-all", ("all_to_all",), "all_to_all_matmul"),
    CollectiveNames(
        "reduce_scatter", "reduce-scatter", ("reduce_scatter",), "matmul_reduce_scatter"
    ),
    CollectiveNames("all_reduce", "all-reduce", ("psum", "psum_invariant"), "matmul_all_reduce"),
    CollectiveNames("ragged_all_to_all", "ragged-all-to-all", ("ragged_all_to_all",)),
    CollectiveNames("collective_permute", PERMUTE, ("ppermute",)),
    CollectiveNames("collective_broadcast", "collective-broadcast", ("pbroadcast",)),
)
_BY_KIND = {c.kind: c for c in TABLE}
OPCODES = tuple(c.opcode for c in TABLE)
OPCODE_OF = {c.kind: c.opcode for c in TABLE}
KIND_OF = {c.opcode: c.kind for c in TABLE}
RING_PASSES = {c.kind: c.ring for c in TABLE if c.ring}
# The primitives whose collective a ring can carry out.
RINGED: dict[str, Kind] = {p: kind for kind in get_args(Kind) for p in _BY_KIND[kind].primitives}
