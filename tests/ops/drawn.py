"""Einsums drawn at random, each under a transformation, on a mesh of eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Dims = tuple[tuple[str, ...], ...]
AXES = ("data", "model", "stage")
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
TRANSFORMS = ("jit", "grad", "vmap", "vmap both", "scan", "remat")
DTYPES = ("float32", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Drawn:
    """One einsum.

    Attributes:
        spec: its letters.
        sizes: by letter.
        lhs, rhs, out: the mesh axes on each dim; those of out are a constraint, or None.
        transform: one of TRANSFORMS.
        dtype: of both operands.
        several: how many right sides it has.
    """

    spec: str
    sizes: tuple[tuple[str, int], ...]
    lhs: Dims
    rhs: Dims
    out: Dims | None
    transform: str
    dtype: str
    several: int

    def shape(self, letters: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[c] for c in letters)

    @property
    def conflicts(self) -> bool:
        """Return whether sides are sharded so that one has to give way: Shardy may choose either."""
        sides = [self.letters[0], self.letters[1], *([self.letters[2]] if self.out else [])]
        specs = [self.lhs, self.rhs, *([self.out] if self.out else [])]
        on: dict[str, set[Any]] = {}
        held: dict[str, set[str]] = {}
        for letters, dims in zip(sides, specs, strict=True):
            for letter, axes in zip(letters, dims, strict=True):
                on.setdefault(letter, set()).add(axes)
                for axis in axes:
                    held.setdefault(axis, set()).add(letter)
        several = any(len(axes - {()}) > 1 for axes in on.values())
        return several or any(len(letters) > 1 for letters in held.values())

    @property
    def letters(self) -> tuple[str, str, str]:
        operands, _, out = self.spec.partition("->")
        lhs, _, rhs = operands.partition(",")
        return lhs, rhs, out


@dataclass(frozen=True)
class Case:
    """Some einsums that are compiled as one program."""

    mesh: tuple[int, ...]
    einsums: tuple[Drawn, ...]


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    return jax.make_mesh(shape, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


@st.composite
def spec_on(draw: Any, shape: tuple[int, ...], mesh: tuple[int, ...]) -> Dims:
    """Draw the mesh axes on each dim of a value, so that they divide it."""
    dims: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for axis, size in draw(st.permutations(list(zip(AXES, mesh, strict=False)))):
        fits = [d for d, n in enumerate(left) if n % size == 0]
        dim = draw(st.sampled_from([None, *fits, *fits]))
        if dim is not None:
            dims[dim].append(axis)
            left[dim] //= size
    return tuple(map(tuple, dims))


@st.composite
def einsums(draw: Any, mesh: tuple[int, ...]) -> Drawn:
    names = iter("abcdefgh")
    batch, summed, left, right = (
        [next(names) for _ in range(draw(st.integers(low, high)))]
        for low, high in ((0, 1), (1, 2), (0, 2), (0, 2))
    )
    lhs = "".join(draw(st.permutations([*batch, *summed, *left])))
    rhs = "".join(draw(st.permutations([*batch, *summed, *right])))
    out = "".join(draw(st.permutations([*batch, *left, *right])))
    sizes = tuple(
        (c, draw(st.sampled_from((8, 8, 8, 16, 4, 6)))) for c in (*batch, *summed, *left, *right)
    )

    def lies(letters: str) -> Dims:
        return draw(spec_on(tuple(dict(sizes)[c] for c in letters), mesh))

    return Drawn(
        f"{lhs},{rhs}->{out}",
        sizes,
        lies(lhs),
        lies(rhs),
        lies(out) if draw(st.booleans()) else None,
        draw(st.sampled_from(TRANSFORMS)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from((1, 1, 1, 2))),
    )


@st.composite
def cases(draw: Any, count: int) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    return Case(mesh, tuple(draw(einsums(mesh)) for _ in range(count)))


def arguments(case: Case) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """Make the operands of each einsum, on no device yet."""
    made = []
    for number, einsum in enumerate(case.einsums):
        random = np.random.default_rng(number)
        lhs, rhs, _ = einsum.letters
        more_left = (4,) if einsum.transform.startswith("vmap") else ()
        more_right = (3,) if einsum.transform == "scan" else ()
        more_right = (4,) if einsum.transform == "vmap both" else more_right

        def operand(letters: str, more: tuple[int, ...], random: Any, einsum: Drawn) -> np.ndarray:
            values = random.standard_normal((*more, *einsum.shape(letters)))
            return np.asarray(jnp.asarray(values, einsum.dtype))

        x = operand(lhs, more_left, random, einsum)
        ws = tuple(operand(rhs, more_right, random, einsum) for _ in range(einsum.several))
        made.append((x, ws))
    return made


def placed(case: Case, mesh: Mesh) -> list[Any]:
    """Put the operands of each einsum on a mesh."""

    def put(value: np.ndarray, dims: Dims) -> jax.Array:
        more = ((),) * (value.ndim - len(dims))
        return jax.device_put(value, NamedSharding(mesh, partition((*more, *dims))))

    return [
        (put(x, e.lhs), tuple(put(w, e.rhs) for w in ws))
        for (x, ws), e in zip(arguments(case), case.einsums, strict=True)
    ]


def partition(dims: Dims) -> P:
    return P(*(axes or None for axes in dims))


def program(case: Case, multiply: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Make the program of a case: `multiply(spec, x, ws)` gives a result for each right side."""

    def run(operands: list[Any]) -> list[Any]:
        return [
            transformed(e, multiply, mesh)(x, ws)
            for e, (x, ws) in zip(case.einsums, operands, strict=True)
        ]

    return run


def transformed(e: Drawn, multiply: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    def plain(x: Any, ws: Any) -> Any:
        ys = multiply(e.spec, x, ws)
        if mesh is not None and e.out is not None:
            at = NamedSharding(mesh, partition(e.out))
            ys = [jax.lax.with_sharding_constraint(y, at) for y in ys]
        return tuple(ys)

    def loss(x: Any, ws: Any) -> Any:
        return sum(jnp.mean(jnp.square(y.astype(jnp.float32))) for y in plain(x, ws))

    if e.transform == "jit":
        return plain
    if e.transform == "grad":
        return jax.value_and_grad(loss, argnums=(0, 1))
    if e.transform == "remat":
        return jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1))  # type: ignore[arg-type]
    if e.transform == "vmap":
        return jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), (0, None))
    if e.transform == "vmap both":
        return jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), (0, 0))

    def scanned(x: Any, ws: Any) -> Any:
        def body(total: Any, w: Any) -> Any:
            return total + loss(x, w), None

        return jax.lax.scan(jax.checkpoint(body), jnp.float32(0), ws)[0]

    return jax.value_and_grad(scanned, argnums=(0, 1))


def by_jnp(spec: str, x: Any, ws: Any) -> list[Any]:
    return [jnp.einsum(spec, x, w) for w in ws]


def check(
    case: Case, multiply: Callable[..., Any], wrap: Callable[..., Any] = jax.jit
) -> jax.stages.Compiled:
    """Compare a case's values with an unsharded reference, and its results' shardings with plain's."""
    mesh = make_mesh(case.mesh)
    operands = placed(case, mesh)
    compiled = wrap(program(case, multiply, mesh)).lower(operands).compile()
    reference = jax.jit(program(case, by_jnp, None))(
        jax.tree.map(lambda a: a.astype(np.float32), arguments(case))
    )
    plain = jax.jit(program(case, by_jnp, mesh)).lower(operands).compile()
    got = compiled(operands)
    for number, einsum in enumerate(case.einsums):
        compare(einsum, got[number], reference[number])
    shardings = zip(compiled.output_shardings, plain.output_shardings, got, strict=True)
    for einsum, (mine, theirs, values) in zip(case.einsums, shardings, strict=True):
        alike = jax.tree.map(lambda a, b, v: a.is_equivalent_to(b, v.ndim), mine, theirs, values)
        assert einsum.conflicts or all(jax.tree.leaves(alike)), f"{einsum}: {mine}, not {theirs}"
    return compiled


def compare(einsum: Drawn, got: Any, reference: Any) -> None:
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[einsum.dtype]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True):
        assert a.shape == b.shape, einsum
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        scale = max(np.abs(b).max(), 1.0)
        assert np.abs(a - b).max() <= tolerance * scale, (einsum, np.abs(a - b).max(), scale)
