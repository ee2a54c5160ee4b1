"""Trees as users of other libraries bring them: nodes of many types, and leaves of many kinds."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st


@jax.tree_util.register_pytree_node_class
class Node:
    """A class that is registered without keys, so that paths do not name its parts."""

    def __init__(self, params: Any, count: Any):
        self.params, self.count = params, count

    def tree_flatten(self) -> Any:
        return (self.params, self.count), None

    @classmethod
    def tree_unflatten(cls, _: Any, parts: Any) -> Any:
        return cls(*parts)


@jax.tree_util.register_dataclass
@dataclass
class Record:
    """A dataclass that is registered as a pytree."""

    params: Any
    count: Any


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, init=False)
class Equinox:
    """A module as equinox makes it: a frozen dataclass whose __init__ takes something else."""

    params: Any
    count: Any
    name: str

    def __init__(self, *, params: Any, count: Any):
        for name, value in dict(params=params, count=count, name="a module").items():
            object.__setattr__(self, name, value)

    def tree_flatten_with_keys(self) -> Any:
        names = ("params", "count")
        parts = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return parts, (names, self.name)

    @classmethod
    def tree_unflatten(cls, aux: Any, parts: Any) -> Any:
        made = object.__new__(cls)
        names, name = aux
        for key, value in zip((*names, "name"), (*parts, name), strict=True):
            object.__setattr__(made, key, value)
        return made


# -- trees that are drawn --------------------------------------------------------------------------


class Pair(NamedTuple):
    params: Any
    count: Any


VALUES = np.array([[1.1, -0.7, 0.3], [0.5, 1.9, -1.3]])
TRAINED: dict[str, Callable[[], Any]] = {  # leaves that every way of training takes
    "float32": lambda: jnp.asarray(VALUES, jnp.float32),
    "numpy": lambda: VALUES[0].astype(np.float32),
    "scalar": lambda: jnp.asarray(VALUES[0, 0], jnp.float32),
    "python float": lambda: 1.5,
    "float64": lambda: VALUES[1] * 1.0,
    "bfloat16": lambda: jnp.asarray(VALUES[0], jnp.bfloat16),
    "float16": lambda: jnp.asarray(VALUES[1], jnp.float16),
    "empty": lambda: jnp.zeros((0, 3)),
    "none": lambda: None,
    "masked": optax.MaskedNode,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "complex": lambda: jnp.asarray(VALUES[0] + 1j * VALUES[1], jnp.complex64),
    "float8": lambda: jnp.asarray(VALUES[0], jnp.float8_e4m3fn),
    "python int": lambda: 3,
    "int32": lambda: jnp.arange(3),
    "bool": lambda: jnp.asarray([True, False]),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(1), 2),
}


def _named(parts: list[Any]) -> dict[str, Any]:
    return dict(zip("abc", parts, strict=False))


NODES: tuple[Callable[[list[Any]], Any], ...] = (
    _named,
    list,
    tuple,
    lambda parts: OrderedDict(_named(parts)),
    lambda parts: defaultdict(list, _named(parts)),
    lambda parts: Pair(parts[:1], tuple(parts[1:])),
    lambda parts: Record(parts[:1], tuple(parts[1:])),
    lambda parts: Node(parts[:1], tuple(parts[1:])),
    lambda parts: Equinox(params=parts[:1], count=tuple(parts[1:])),
    lambda parts: nnx.State(_named(parts)),
    lambda parts: nnx.State({k: nnx.Param(x) if _is_array(x) else x for k, x in _named(parts).items()}),
    lambda parts: [*parts[:1], *parts],  # a leaf, or a subtree, that is shared
)  # fmt: skip

STATES: tuple[tuple[Callable[..., Any], str | int], ...] = (
    (dict, "params"), (lambda **parts: defaultdict(list, parts), "params"), (Pair, "params"),
    (Record, "params"), (Node, "params"), (Equinox, "params"), (Pair, 0),
    (lambda params, count: nnx.State({0: params, 1: count}), 0),
)  # fmt: skip


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def odd_trees(*kinds: str) -> st.SearchStrategy[Any]:
    """Draw trees of up to five leaves of these kinds, in nodes of all kinds."""
    leaves = st.sampled_from(kinds).map(lambda kind: (TRAINED | OTHERS)[kind]())

    def nodes(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        both = st.tuples(st.sampled_from(NODES), st.lists(parts, min_size=1, max_size=3))
        return both.map(lambda drawn: drawn[0](drawn[1]))

    return nodes(st.recursive(leaves, nodes, max_leaves=4))


@st.composite
def odd_parameters(draw: st.DrawFn) -> Any:
    """Draw parameters: of leaves that can be trained in two draws of three, else of any."""
    any_kind = draw(st.sampled_from((False, False, True)))
    return draw(odd_trees(*TRAINED, *(OTHERS if any_kind else ())))
