"""Shardings of arrays on a mesh of workers, and each worker's own keys of jax.random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.dtypes import at_least_float32


@dataclass(frozen=True)
class WorkerPlacement:
    """Shardings: the mesh, the workers' axis, and whether outer state is sharded over it.

    Scattered is a leaf along its first dim that the workers divide and no other axis takes; a leaf
    without such a dim is replicated.
    """

    mesh: Mesh
    axis: str
    scatter: bool

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self.mesh.shape[self.axis]

    def spec_of(self, leaf: Any) -> P:
        """Return the spec of a worker's own leaf, which may not name the workers' axis.

        Raises:
            ValueError: if it does, or the leaf is on another mesh.
        """
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return P()
        if sharding.mesh.shape != self.mesh.shape:
            raise ValueError(
                f"a leaf of the train state lies on a mesh of {dict(sharding.mesh.shape)}, and "
                f"the step was given one of {dict(self.mesh.shape)}; make the state on that"
            )
        if self.axis in jax.tree.leaves(tuple(sharding.spec)):
            raise ValueError(
                f"a leaf of the train state is sharded over {self.axis!r} ({sharding.spec}), which "
                "is the workers' axis: give the state of one worker, whole along it"
            )
        return sharding.spec

    def at(self, *spec: Any) -> NamedSharding:
        """Return the sharding of a spec."""
        return NamedSharding(self.mesh, P(*spec))

    def on_mesh(self, tree: Any) -> Any:
        """Replicate leaves that are committed elsewhere, as to one device, over the mesh."""

        def one(leaf: Any) -> Any:
            at = getattr(leaf, "sharding", None)
            if at is None or (isinstance(at, NamedSharding) and at.mesh == self.mesh):
                return leaf
            return jax.device_put(leaf, self.at())

        return jax.tree.map(one, tree)

    def with_specs_of(self, tree: Any) -> Any:
        """Move leaves from another mesh to this one, with the specs that they have there."""

        def one(leaf: Any) -> Any:
            at = getattr(leaf, "sharding", None)
            spec = at.spec if isinstance(at, NamedSharding) else P()
            return jnp.copy(jax.device_put(leaf, self.at(*spec)))  # which may share memory

        return jax.tree.map(one, tree)

    def of_workers(self, workers: int) -> Callable[[Any], jax.ShapeDtypeStruct]:
        """Return a function that changes shapes of this mesh's workers to those of so many workers.

        The dim of workers is not sharded, other dims are sharded as they are.
        """

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            at = self.at(None, *leaf.sharding.spec[1:])
            return jax.ShapeDtypeStruct((workers, *leaf.shape[1:]), leaf.dtype, sharding=at)

        return one

    def stacked(self, specs: Any) -> Any:
        """Return the shardings of leaves with a leading dim of workers."""
        return jax.tree.map(lambda spec: self.at(self.axis, *spec), specs)

    def outer(self, shapes: Any, specs: Any) -> Any:
        """Return the shardings of outer state that is like parameters."""
        return jax.tree.map(
            lambda shape, spec: self.at(*self.outer_spec(shape.shape, spec)), shapes, specs
        )

    def outer_spec(self, shape: Sequence[int], spec: P) -> P:
        """Return the spec of a leaf of outer state."""
        dim = self.scattered_dim(shape, spec)
        full = [*spec, *(None,) * (len(shape) - len(spec))]
        if dim >= 0:
            full[dim] = self.axis
        return P(*full)

    def of_optimizer(
        self, optimizer: optax.GradientTransformation, shapes: Any, at: Any, *, others: Any
    ) -> Any:
        """Return the shardings of an optimizer's state: moments are sharded as the parameters.

        Args:
            optimizer: any optax one.
            shapes: of the parameters.
            at: the parameters' shardings.
            others: the sharding of what is not like a parameter, as counts.

        Raises:
            ValueError: if optax cannot tell which leaves of its state are like parameters.
        """

        def where(leaf: Any, sharding: Any) -> Any:
            return leaf if _masked(leaf) else sharding

        state = jax.eval_shape(optimizer.init, shapes)
        try:
            return optax.tree.map_params(
                optimizer,
                where,
                state,
                at,
                transform_non_params=lambda _: others,
                is_leaf=_masked,
            )
        except (AttributeError, IndexError) as error:  # of an init() that looks at the leaves
            raise ValueError(
                "optax.tree.map_params cannot tell which parts of the optimizer's state are like "
                f"the parameters ({error}), as of a line search: take another optimizer"
            ) from error

    def scattered_dim(self, shape: Sequence[int], spec: P) -> int:
        """Return the dim along which a leaf of outer state is scattered; -1 if it is not."""
        full = [*spec, *(None,) * (len(shape) - len(spec))]
        for dim, size in enumerate(shape if self.scatter else ()):
            if full[dim] is None and size and size % self.workers == 0:
                return dim
        return -1


def over_workers(fn: Callable, mesh: Mesh, axis: str, in_specs: Any, out_specs: Any) -> Callable:
    """Map a function over the workers of a mesh, each with its part; other axes are automatic."""
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={axis},
        check_vma=False,
    )


def copies(leaf: Any, workers: int) -> jax.Array:
    """Return a leaf with a leading dim of workers, each of which has the same."""
    return jnp.broadcast_to(leaf, (workers, *leaf.shape))


def is_key(leaf: Any) -> bool:
    """Return whether an array is of keys of jax.random."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def folded(keys: jax.Array, number: Any) -> jax.Array:
    """Return keys of any shape, a number folded into each."""
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def mean_of_workers(leaf: jax.Array) -> jax.Array:
    """Average floats and complex numbers over a dim of workers; of others take worker 0's.

    In float32 at least: a mean of 16 bits would lose what workers differ by.
    """
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf.astype(at_least_float32(leaf.dtype)).mean(0).astype(leaf.dtype)
    return leaf[0]


def _masked(leaf: Any) -> bool:
    """Return whether an optimizer leaves a parameter out, as optax.masked and partition do."""
    return isinstance(leaf, optax.MaskedNode)
