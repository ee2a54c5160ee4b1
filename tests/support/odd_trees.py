"""Trees as users of other libraries bring them: nodes of many types, and leaves of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


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
