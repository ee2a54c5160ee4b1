"""Define `BatchLayout`: which device does which forward pass, on which part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.arguments import check_automatic, check_shared


@dataclass(frozen=True)
class BatchLayout:
    """The two signs and the shards of the batch, spread over axes of a mesh.

    The forward pass is mapped over both by `jax.vmap(spmd_axis_name=...)`, so its own constraints,
    which may name other axes, stay right.

    Attributes:
        mesh: the devices; None for whatever the arrays are on.
        perturb: the axis of a pair, of which one device moves parameters by +eps and the other by
            -eps (DistZO2's PertP); None: each does both, one after the other.
        data: the axis over which the batch is spread; None for one that the loss function knows.
    """

    mesh: Mesh | None = None
    perturb: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        for name in ("perturb", "data"):
            axis = getattr(self, name)
            if axis is not None and (self.mesh is None or axis not in self.mesh.shape):
                has = "there is no mesh" if self.mesh is None else f"it has {self.mesh.axis_names}"
                raise ValueError(f"{name}={axis!r}: expected an axis of the mesh, and {has}")
        if self.mesh is not None:
            check_automatic(self.mesh)
        if self.perturb is not None and self.mesh is not None and self.pairs != 2:
            raise ValueError(
                f"perturb={self.perturb!r} is an axis of {self.mesh.shape[self.perturb]} devices: "
                "a pair has 2; give the others to the axis of the batch (data=), or leave perturb= "
                "out on a single device"
            )
        if self.perturb is not None and self.perturb == self.data:
            raise ValueError(f"perturb= and data= are both {self.data!r}: give each its own axis")

    @property
    def pairs(self) -> int:
        """Return the size of the pair's axis; 1 without one."""
        return self.mesh.shape[self.perturb] if self.mesh and self.perturb else 1

    @property
    def shards(self) -> int:
        """Return the number of shards of the batch."""
        return self.mesh.shape[self.data] if self.mesh and self.data else 1

    @property
    def own_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which parameters are replicated, the pair's first."""
        return tuple(axis for axis in (self.perturb, self.data) if axis is not None)

    def at(self, *spec: Any) -> NamedSharding | None:
        """Return the sharding of a spec; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def pinned(self, tree: Any, *spec: Any) -> Any:
        """Constrain each array of a tree to a spec of its first dims."""
        at = self.at(*spec)
        return tree if at is None else jax.lax.with_sharding_constraint(tree, at)

    def each_sign(self, do: Callable[..., Any], values: Any = None) -> Any:
        """Call a function for +eps and for -eps; return the results, [2, ...].

        Args:
            do: (sign, value) -> result.
            values: arrays of [2, ...], or None.
        """
        signs = self.pinned(jnp.array([1.0, -1.0], jnp.float32), self.perturb)
        if self.perturb is None:
            return jax.lax.map(lambda one: do(*one), (signs, values))
        return jax.vmap(do, spmd_axis_name=self.perturb)(signs, values)

    def each_shard(self, do: Callable[..., Any], *values: Any) -> Any:
        """Call a function for each shard of the batch; values and results are [shards, ...]."""
        if self.data is None:
            return jax.tree.map(lambda x: x[None], do(*jax.tree.map(lambda x: x[0], values)))
        return jax.vmap(do, spmd_axis_name=self.data, axis_size=self.shards)(*values)

    def check(self, batch: Any) -> None:
        """Check that the shards divide a batch evenly.

        Raises:
            ValueError: if they cannot share them evenly.
        """
        for leaf in jax.tree.leaves(batch) if self.data is not None else ():
            check_shared(leaf.shape, 0, self.shards, f"devices along {self.data!r}")

    def split(self, batch: Any) -> Any:
        """Reshape a batch [n, ...] into [shards, n / shards, ...]; of a scalar each has all.

        Raises:
            ValueError: as `check`.
        """
        self.check(batch)

        def one(leaf: Any) -> Any:
            if self.data is None:
                return leaf[None]
            if not leaf.ndim:
                return self.pinned(jnp.broadcast_to(leaf, self.shards), self.data)
            cut = leaf.reshape(self.shards, leaf.shape[0] // self.shards, *leaf.shape[1:])
            return self.pinned(cut, self.data)

        return jax.tree.map(one, batch)
