"""Draw a program's dims, mesh, layouts and choices, all by label.

A choice is a function of the seed and its label alone, so a step may draw while it is traced: it
draws the same when it is traced again, and when it is built again for the reference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import is_pod

MESHES = (
    ((8,), 1), ((4,), 4), ((2,), 2), ((2, 4), 2), ((4, 2), 2), ((4, 1), 1), ((1, 4), 1),
    ((2, 2), 10), ((2, 2, 2), 4), ((2, 2, 1), 1), ((1, 2, 4), 1), ((2, 1, 2), 1), ((1, 8), 1),
)  # fmt: skip
NAMES = {
    1: (("data",), ("model",), ("x",), ("fsdp",)),
    2: (("data", "model"), ("dp", "tp"), ("fsdp", "tp"), ("x", "y")),
    3: (("replica", "fsdp", "tp"), ("dp", "fsdp", "tp"), ("data", "model", "expert"), tuple("xyz")),
}
SIZES = {
    "B": (8, 16), "S": (4, 8, 16), "D": (16, 32), "F": (32, 64), "H": (2, 4, 8), "K": (4, 8),
    "V": (32, 64), "L": (2,), "E": (2, 4), "C": (8, 16), "R": (4, 8),
}  # fmt: skip
ODD = {"B": (12, 8), "S": (6, 7), "D": (20, 24), "F": (36, 40), "H": (3, 6), "V": (37, 42)}
LAYOUTS = ("both", "both", "fsdp", "tp", "replicated", "random")
PINNING = ("none", "few", "some", "many", "wild")
PIN_CHANCE = {"none": 0.0, "few": 0.15, "some": 0.4, "many": 0.8, "wild": 0.5}


@dataclass(frozen=True)
class Leaf:
    """An argument's value on the host and its spec; without a spec nothing commits it."""

    value: Any
    spec: P | None = None

    def placed(self, mesh: Mesh) -> Any:
        if isinstance(self.value, bool | int | float):
            return self.value
        if is_pod(mesh):
            at = None if self.spec is None else NamedSharding(mesh, self.spec)
            value = np.asarray(self.value)
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=at)
        if self.spec is None:
            return jnp.array(self.value)
        return jax.device_put(np.array(self.value), NamedSharding(mesh, self.spec))


@dataclass
class World:
    """The choices of one seed.

    Attributes:
        seed: the seed.
        alone: whether the program is built on one device, for the reference.
        said: the choices, by label.
        explicit: whether the mesh's axes are explicit.
        automatic: the axes that are automatic all the same.
        pod: whether the mesh is of GPUs that are not there.
    """

    seed: int
    alone: bool = False
    said: dict[str, str] = field(default_factory=dict)
    explicit: bool = False
    automatic: frozenset[str] = frozenset()
    pod: bool = False

    def __post_init__(self) -> None:
        shapes, weights = zip(*MESHES, strict=True)
        at = self.rng("mesh").choice(len(shapes), p=np.array(weights) / sum(weights))
        shape = shapes[int(at)]
        names = self.pick("axis names", NAMES[len(shape)], quiet=True)
        self.sizes = dict(zip(names, shape, strict=True))
        self.said["mesh"] = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        self.layout = self.pick("layout", LAYOUTS)
        self.pinning = self.pick("pinning", PINNING)
        self.ambient = self.chance("set_mesh", 0.2)
        self.odd = self.chance("odd sizes", 0.12)
        self.compute, self.kept = self._dtypes()
        self.batch_axes, self.model_axes = self._roles()

    # -- choices --------------------------------------------------------------------------------

    def rng(self, label: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(label.encode())])

    def pick(self, label: str, options: Sequence[Any], *, quiet: bool = False) -> Any:
        picked = options[self.rng(label).integers(len(options))]
        if not quiet:
            self.said[label] = str(getattr(picked, "__name__", picked))
        return picked

    def chance(self, label: str, probability: float) -> bool:
        happens = bool(self.rng(label).random() < probability)
        if happens:
            self.said[label] = "yes"
        return happens

    def size(self, letter: str) -> int:
        odd = self.odd and letter in ODD and self.rng(f"odd {letter}").random() < 0.4
        return self.pick(f"size {letter}", (ODD if odd else SIZES)[letter])

    def _dtypes(self) -> tuple[Any, Any]:
        """Draw the dtype to compute in, and the dtype to keep parameters in."""
        at = self.rng("dtype").random()
        if at < 0.84:
            return jnp.float32, np.float32
        self.said["dtype"] = "bfloat16" if at > 0.94 else "bfloat16, kept in float32"
        return jnp.bfloat16, (ml_dtypes.bfloat16 if at > 0.94 else np.float32)

    # -- shardings ------------------------------------------------------------------------------

    def mesh(self) -> Mesh:
        shape = [1] * len(self.sizes) if self.alone else list(self.sizes.values())
        explicit = [self.explicit and axis not in self.automatic for axis in self.sizes]
        kinds = tuple(AxisType.Explicit if one else AxisType.Auto for one in explicit)
        if self.pod:
            pod = jaxoverlap.pod_mesh(f"h100-sxm:1x{math.prod(shape)}", self.sizes)
            return Mesh(pod.devices, pod.axis_names, axis_types=kinds)
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        return Mesh(devices, tuple(self.sizes), axis_types=kinds)

    def _roles(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Draw the axes that share out the batch, and those that share out a model."""
        axes = tuple(self.sizes)
        if len(axes) == 1:
            return self.pick("roles", [(axes, ()), (axes, axes), ((), axes)])
        cuts = [(axes[:-1], axes[-1:])] * 3 + [(axes[:1], axes[1:]), (axes[-1:], axes[:-1])]
        return self.pick("roles", [*cuts, (axes, axes[-1:])])

    def fits(self, n: int, axes: tuple[str, ...]) -> bool:
        return n % math.prod(self.sizes[axis] for axis in axes) == 0

    def entry(self, axes: tuple[str, ...]) -> Any:
        return None if not axes else axes[0] if len(axes) == 1 else axes

    def wild(self, label: str, shape: Sequence[int], *, even: bool) -> P:
        """Draw any spec: each axis on some dim, or on none."""
        rng = self.rng(f"wild {label}")
        held: list[tuple[str, ...]] = [()] * len(shape)
        for axis in rng.permutation(list(self.sizes)):
            dim = int(rng.integers(-1, len(shape)))
            if dim >= 0 and (self.fits(shape[dim], (*held[dim], axis)) or not even):
                held[dim] = (*held[dim], str(axis))
        return self._ended(label, held)

    def _ended(self, label: str, held: Sequence[tuple[str, ...]]) -> P:
        """Return a spec as people write it: with its last Nones, or without."""
        entries = [self.entry(axes) for axes in held]
        while entries and entries[-1] is None and self.rng(f"end {label}").random() < 0.5:
            entries.pop()
        return P(*entries)

    def param_spec(self, label: str, dims: str) -> P:
        """Return a parameter's spec; `dims` are its letters, of which D is the stream's."""
        shape = [self.size(c) for c in dims]
        if not dims:
            return P()
        if self.layout == "random":
            if dims[0] == "L" and self.explicit:  # explicit axes cannot split what is scanned
                return P(None, *self.wild(label, shape[1:], even=True))
            return self.wild(label, shape, even=True)
        held: list[tuple[str, ...]] = [()] * len(dims)
        wide = next((i for i, c in enumerate(dims) if c in "FHVEC"), None)
        if self.layout in ("tp", "both") and wide is not None:
            held[wide] = self.model_axes if self.fits(shape[wide], self.model_axes) else ()
        if self.layout in ("fsdp", "both"):
            free = tuple(a for a in self.batch_axes if all(a not in axes for axes in held))
            at = dims.rfind("D") if "D" in dims else len(dims) - 1
            if not held[at] and self.fits(shape[at], free):
                held[at] = free
        return self._ended(label, held)

    def batch_spec(self, label: str, shape: Sequence[int], dim: int = 0) -> P:
        """Return the spec of data: its rows over the batch's axes, where they divide."""
        held: list[tuple[str, ...]] = [()] * len(shape)
        if self.fits(shape[dim], self.batch_axes):
            held[dim] = self.batch_axes
        return self._ended(f"batch {label}", held)

    # -- arguments ------------------------------------------------------------------------------

    def param(self, label: str, dims: str, *, scale: float | None = None) -> Leaf:
        shape = [self.size(c) for c in dims]
        inner = (
            shape[1] if dims[:1] == "L" and len(shape) > 2 else max(shape[:1], default=1)
        )  # a scalar has none
        values = self.rng(label).standard_normal(shape) * (scale or 1 / math.sqrt(inner))
        return Leaf(values.astype(self.kept), self.param_spec(label, dims))

    def ones(self, label: str, dims: str) -> Leaf:
        return Leaf(np.ones([self.size(c) for c in dims], self.kept), self.param_spec(label, dims))

    def normal(self, label: str, shape: Sequence[int], dim: int = 0) -> Leaf:
        values = self.rng(label).standard_normal(shape).astype(np.float32)
        return Leaf(values, self.batch_spec(label, shape, dim))

    def integers(self, label: str, shape: Sequence[int], below: int, dim: int = 0) -> Leaf:
        values = self.rng(label).integers(0, below, shape).astype(np.int32)
        return Leaf(values, self.batch_spec(label, shape, dim))

    # -- inside a step --------------------------------------------------------------------------

    def pin(self, label: str, x: jax.Array, *, wide: bool = False) -> jax.Array:
        """Pin a value by a drawn constraint, or not at all. `wide`: its last dim is the model's."""
        if self.rng(f"pin? {label}").random() >= PIN_CHANCE[self.pinning]:
            return x
        uneven = self.rng(f"uneven {label}").random() < 0.1 and not self.explicit
        if self.pinning == "wild":
            spec = self.wild(f"pin {label}", x.shape, even=not uneven)
        else:
            held: list[tuple[str, ...]] = [()] * x.ndim
            if x.ndim and (self.fits(x.shape[0], self.batch_axes) or uneven):
                held[0] = self.batch_axes
            free = tuple(a for a in self.model_axes if a not in held[0]) if x.ndim else ()
            if wide and x.ndim > 1 and self.fits(x.shape[-1], free):
                held[-1] = free
            spec = self._ended(f"pin {label}", held)
            if self.rng(f"open {label}").random() < 0.1 and len(spec) and not self.explicit:
                spec = P(P.UNCONSTRAINED, *tuple(spec)[1:])
        self.said[f"pin {label}"] = str(spec)
        if self.explicit:
            typed, rest = self.by_kind(spec)
            x = jax.sharding.reshard(x, NamedSharding(self.mesh(), typed))
            if not self.automatic:
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh(), rest))
        at = spec if self.ambient else NamedSharding(self.mesh(), spec)
        return jax.lax.with_sharding_constraint(x, at)

    def by_kind(self, spec: P) -> tuple[P, P]:
        """Split a spec into its explicit and its automatic axes."""
        dims = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
        typed = [tuple(a for a in axes if a not in self.automatic) for axes in dims]
        rest = [tuple(a for a in axes if a in self.automatic) for axes in dims]
        return P(*map(self.entry, typed)), P(*map(self.entry, rest))

    def einsum(self, label: str, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Multiply, in one of the ways to write a matmul."""
        if self.explicit:
            at = NamedSharding(self.mesh(), self.stated(equation, x, y))
            return jnp.einsum(equation, x, y, out_sharding=at)
        way = self.rng(f"written {label}").random()
        if not _is_matmul(equation) or way < 0.45:
            return jnp.einsum(equation, x, y)
        if way < 0.85:
            return x @ y
        return jnp.dot(x, y) if way < 0.95 else jax.vmap(lambda row: row @ y)(x)

    def stated(self, equation: str, x: jax.Array, y: jax.Array) -> P:
        """Return the result's sharding that operands of stated shardings suggest."""
        operands, out = equation.split("->")
        where: dict[str, Any] = {}
        for letters, value in zip(operands.split(","), (x, y), strict=True):
            where |= {c: e for c, e in zip(letters, jax.typeof(value).sharding.spec) if e}  # noqa: B905
        taken: set[str] = set()
        entries = []
        for letter in out:
            entry = where.get(letter)
            axes = {entry} if isinstance(entry, str) else set(entry or ())
            entries.append(entry if not axes & taken else None)
            taken |= axes
        return P(*entries)

    def manual(self, body: Callable, in_specs: Any, out_specs: Any, **more: Any) -> Callable:
        """Return a shard_map over the whole mesh, or over the axes that are named."""
        at = {} if self.ambient else {"mesh": self.mesh()}
        return jax.shard_map(body, **at, in_specs=in_specs, out_specs=out_specs, **more)

    def cast(self, tree: Any) -> Any:
        """Cast floating values to the dtype that is computed in."""

        def one(x: Any) -> Any:
            return x.astype(self.compute) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, tree)


def _is_matmul(equation: str) -> bool:
    lhs, rhs = equation.split("->")[0].split(",")
    out = equation.split("->")[1]
    return len(rhs) == 2 and lhs[-1] == rhs[0] and out == lhs[:-1] + rhs[1] and lhs[-1] not in out
