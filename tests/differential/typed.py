"""Draw small train steps on explicit and mixed meshes, which state shardings in every way JAX has.

Each operation takes a value of before and draws how it states the sharding of its result, or leaves
it to JAX. Whether JAX accepts a step is JAX's matter: about one in ten it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from tests.differential.others import DIMS, matmul_of, some_dims
from tests.differential.training import Program, trained
from tests.differential.world import Leaf, World

MOST_ELEMENTS = 1 << 12  # of a value: XLA's code is not optimized
STEPS = ("sgd", "sgd", "sgd", "sgd", "grad", "value_and_grad", "aux")
UNSTATED = 0.35  # of the results whose sharding JAX can infer
RECKLESS = 0.05  # of the results whose sharding JAX may not infer, and that are not stated either
REMAT = 0.15


@dataclass(frozen=True)
class Operation:
    """A drawn operation.

    Attributes:
        run: run(world, label, operation, *operands).
        operands: the numbers of the values that it takes; weights are -1, -2, ...
        dims: the dims of its result, by letters of `DIMS`.
        equation: of a matmul; else the dims of its operand, if they are not the result's.
        ids: the number of the input by which rows are looked up, if they are.
    """

    run: Callable[..., jax.Array]
    operands: tuple[int, ...]
    dims: str
    equation: str = ""
    ids: int | None = None


@dataclass
class Drawn:
    """A drawn step's operations, in order.

    Attributes:
        size: the size of each dim.
        values: the dims of each value: the input, then the results.
        weights: the dims of each weight.
        operations: the operations.
        ids: the dims of each input by which rows are looked up, and the dim of the table's rows.
    """

    size: dict[str, int]
    values: list[str]
    weights: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    ids: list[tuple[str, str]] = field(default_factory=list)

    def weight(self, dims: str) -> int:
        """Add a weight and return its number."""
        self.weights.append(dims)
        return -len(self.weights)

    def add(self, operation: Operation | None) -> None:
        if operation is not None:
            self.operations.append(operation)
            self.values.append(operation.dims)

    def some_value(self, rng: np.random.Generator) -> int:
        """Return the number of a value: the last one in two of three cases."""
        last = len(self.values) - 1
        return last if rng.random() < 0.67 else int(rng.integers(len(self.values)))


# -- stating shardings ----------------------------------------------------------------------------


def typed_axes(w: World) -> set[str]:
    """Return the mesh's explicit axes."""
    return set(w.sizes) - w.automatic


def at(w: World, spec: P) -> Any:
    """Return what is written for a spec: itself where a mesh is set, else a NamedSharding."""
    return spec if w.ambient else NamedSharding(w.mesh(), spec)


def any_spec(w: World, label: str, x: Any) -> P:
    """Draw a spec over explicit axes."""
    return w.by_kind(w.wild(label, x.shape, even=True))[0]


def spec_of(x: jax.Array) -> P:
    """Return the sharding in the type of a value."""
    return jax.typeof(x).sharding.spec


def stated(w: World, label: str, like: Any, suggested: P, *, inferable: bool) -> Any:
    """Draw the `out_sharding` of a result: a drawn one, the suggested one, or none."""
    if not typed_axes(w):
        return None
    drawn = w.rng(f"stated {label}").random()
    if drawn < (UNSTATED if inferable else RECKLESS):
        return None
    spec = suggested if drawn < 0.7 else any_spec(w, f"stated {label}", like)
    w.said[f"stated {label}"] = str(spec)
    return at(w, spec)


def einsum(w: World, label: str, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply, with or without `out_sharding`."""
    like = jax.eval_shape(lambda x, y: jnp.einsum(equation, x, y), *map(_untyped, (x, y)))
    out = stated(w, label, like, w.stated(equation, x, y), inferable=_is_inferable(equation, x, y))
    return jnp.einsum(equation, x, y, out_sharding=out) * _scale(equation, x)


def _untyped(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _scale(equation: str, x: jax.Array) -> float:
    letters, out = equation.split("->")
    summed = [n for c, n in zip(letters.split(",")[0], x.shape, strict=True) if c not in out]
    return float(1 / np.sqrt(np.prod(summed)))


def _is_inferable(equation: str, x: jax.Array, y: jax.Array) -> bool:
    """Return whether JAX infers the sharding of a matmul's result."""
    (one, other), out = equation.split("->")[0].split(","), equation.split("->")[1]
    lhs, rhs = (dict(zip(c, spec_of(v), strict=True)) for c, v in ((one, x), (other, y)))
    if any(lhs[c] != rhs[c] if c in out else lhs[c] and rhs[c] for c in lhs.keys() & rhs.keys()):
        return False
    entries = [lhs.get(c) or rhs.get(c) for c in out]
    axes = _axes(entries)
    return len(axes) == len(set(axes))


# -- operations -----------------------------------------------------------------------------------


def multiplied(w: World, label: str, op: Operation, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply two values, or a value and a weight."""
    out = einsum(w, label, op.equation, x, y)
    return jnp.tanh(out) if w.rng(f"tanh {label}").random() < 0.4 else out


def resharded(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Reshard over the explicit axes; without any, constrain."""
    if not typed_axes(w):
        return constrained(w, label, op, x)
    w.said[label] = f"reshard {any_spec(w, label, x)}"
    return reshard(x, at(w, any_spec(w, label, x)))


def constrained(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Constrain the automatic axes; without any, reshard."""
    if not w.automatic:
        return resharded(w, label, op, x)
    spec = [*w.by_kind(w.wild(label, x.shape, even=True))[1]]
    spec += [None] * (x.ndim - len(spec))
    if w.rng(f"open {label}").random() < 0.3:
        spec = [P.UNCONSTRAINED if entry is None else entry for entry in spec]
    w.said[label] = f"constrain {spec}"
    return jax.lax.with_sharding_constraint(x, at(w, P(*spec)))


def _axes(spec: Iterable[Any]) -> list[str]:
    return [a for e in spec for a in ((e,) if isinstance(e, str) else e or ())]


def pointwise(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Apply an elementwise function, or a softmax over the last dim."""
    fn = w.pick(label, (jnp.tanh, jax.nn.gelu, jax.nn.silu, jnp.sin, jax.nn.softmax))
    return fn(x)


def added(w: World, label: str, op: Operation, x: jax.Array, y: jax.Array) -> jax.Array:
    """Add another value, resharded to the type of the first unless it has it."""
    if spec_of(x) != spec_of(y) and w.rng(f"alike {label}").random() >= RECKLESS:
        y = reshard(y, at(w, spec_of(x)))
    return x + y


def normalized(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Divide by the root mean square over a drawn dim."""
    dim = int(w.rng(f"dim {label}").integers(x.ndim))
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), dim, keepdims=True) + 1)


def reduced(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Sum, average or take a soft maximum over the dim that is not in the result.

    Without optimization XLA:CPU gets the gradient of a maximum wrong: docs/upstream.md.
    """
    (source,) = (i for i, c in enumerate(op.equation) if c not in op.dims)
    return w.pick(label, (jnp.mean, jnp.sum, jax.nn.logsumexp))(x, axis=source)


def transposed(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Permute the dims."""
    return jnp.transpose(x, [op.equation.index(c) for c in op.dims])


def picked(w: World, label: str, op: Operation, x: jax.Array) -> jax.Array:
    """Take rows in another order, by `.at[].get`."""
    dim = int(w.rng(f"dim {label}").integers(x.ndim))
    rows = jnp.asarray(w.rng(f"rows {label}").permutation(x.shape[dim]))
    whole = spec_of(x)[dim] is None
    out = stated(w, label, x, spec_of(x), inferable=whole)
    return x.at[(*[slice(None)] * dim, rows)].get(out_sharding=out)


def looked_up(
    w: World, label: str, op: Operation, x: jax.Array, table: jax.Array, ids: jax.Array
) -> jax.Array:
    """Add rows of a table."""
    suggested = spec_of(x) if typed_axes(w) else None
    rows = table.at[ids].get(out_sharding=None if suggested is None else at(w, suggested))
    return x + rows


def scanned(
    w: World, label: str, op: Operation, x: jax.Array, scale: jax.Array, *weights: jax.Array
) -> jax.Array:
    """Apply two layers of stacked weights; the carry keeps its type."""
    one, other = op.equation.split()
    kept = at(w, spec_of(x)) if typed_axes(w) else None
    gathers = w.chance(f"gathers {label}", 0.5)

    def layer(x, weights):
        scale, up, down = weights
        if typed_axes(w):
            scale = reshard(scale, at(w, P(*spec_of(x)[-1:])))
            up = reshard(up, at(w, any_spec(w, f"gathered {label}", up))) if gathers else up
        h = jnp.tanh(einsum(w, f"{label} up", one, x * (1 + scale), up))
        return x + jnp.einsum(other, h, down, out_sharding=kept) * 0.3, None

    remat = w.chance(f"remat in {label}", 0.3)
    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (scale, *weights))[0]


def in_automatic_axes(w: World, label: str, op: Operation, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply where some or all explicit axes are automatic."""
    typed = sorted(typed_axes(w))
    if not typed:
        return multiplied(w, label, op, x, y)
    rng = w.rng(f"axes {label}")
    axes = tuple(typed) if rng.random() < 0.7 else (str(rng.choice(typed)),)

    def inner(x, y):
        spec = [*w.wild(f"inner {label}", x.shape, even=True)]
        mine = [e if e in axes and e not in _axes(spec_of(x)) else None for e in spec]
        x = jax.lax.with_sharding_constraint(x, P(*mine))
        if set(axes) == set(typed):
            return jnp.tanh(jnp.einsum(op.equation, x, y) * _scale(op.equation, x))
        return jnp.einsum(op.equation, x, y, out_sharding=w.stated(op.equation, x, y))

    like = jax.eval_shape(lambda x, y: jnp.einsum(op.equation, x, y), _untyped(x), _untyped(y))
    out = any_spec(w, f"out of {label}", like)
    w.said[label] = f"auto_axes {axes} to {out}"
    return jax.sharding.auto_axes(axes=axes, out_sharding=at(w, out))(inner)(x, y)


def in_explicit_axes(w: World, label: str, op: Operation, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply where the automatic axes are explicit; that takes a mesh that is set."""
    if not w.automatic or not w.ambient:
        return multiplied(w, label, op, x, y)

    def inner(x, y):
        spec = w.stated(op.equation, x, y)
        return jnp.tanh(jnp.einsum(op.equation, x, y, out_sharding=spec) * _scale(op.equation, x))

    specs = tuple(w.wild(f"{label} {i}", v.shape, even=True) for i, v in enumerate((x, y)))
    w.said[label] = f"explicit_axes {specs}"
    return jax.sharding.explicit_axes(in_sharding=specs)(inner)(x, y)


MATMULS = (multiplied, multiplied, multiplied, multiplied, in_automatic_axes, in_explicit_axes)
OTHERS = (
    resharded, resharded, constrained, pointwise, added, normalized, reduced, transposed, picked,
    scanned, scanned, looked_up,
)  # fmt: skip


def operations_of(rng: np.random.Generator, size: dict[str, int]) -> Drawn:
    """Draw two to five operations, the first a matmul."""
    drawn = Drawn(size, [some_dims(rng)])
    for n in range(int(rng.integers(2, 6))):
        if n == 0 or rng.random() < 0.5:
            drawn.add(_matmul(rng, drawn))
        else:
            drawn.add(_other(rng, drawn))
    return drawn


def _matmul(rng: np.random.Generator, drawn: Drawn) -> Operation | None:
    matmul = matmul_of(rng, drawn.values, drawn.weights, drawn.size, MOST_ELEMENTS)
    if matmul is None:
        return None
    x, y, equation = matmul
    run = MATMULS[rng.integers(len(MATMULS))]
    return Operation(run, (x, y), equation.split("->")[1], equation)


def _other(rng: np.random.Generator, drawn: Drawn) -> Operation | None:
    """Draw an operation that is no matmul; None if the value that it takes has too few dims."""
    x = drawn.some_value(rng)
    dims, run = drawn.values[x], OTHERS[rng.integers(len(OTHERS))]
    if run is added:
        others = [i for i, v in enumerate(drawn.values) if i != x and v == dims]
        return Operation(run, (x, int(rng.choice(others))), dims) if others else None
    if run is reduced:
        without = dims.replace(str(rng.choice(list(dims))), "")
        return Operation(run, (x,), without, dims) if without else None
    if run is transposed:
        return Operation(run, (x,), "".join(rng.permutation(list(dims))), dims)
    if run is scanned:
        last, new = dims[-1], str(rng.choice([c for c in DIMS if c not in dims]))
        weights = [drawn.weight(f"L{c}") for c in (last, last + new, new + last)]
        h = dims[:-1] + new
        pair = f"{dims},{last}{new}->{h} {h},{new}{last}->{dims}"
        return Operation(run, (x, *weights), dims, pair)
    if run is looked_up:
        if len(dims) == 1:
            return None
        rows = str(rng.choice([c for c in DIMS if c not in dims]))
        drawn.ids.append((dims[:-1], rows))
        table = drawn.weight(f"{rows}{dims[-1]}")
        return Operation(run, (x, table), dims, ids=len(drawn.ids) - 1)
    return Operation(run, (x,), dims)


# -- the program ----------------------------------------------------------------------------------


def typed(w: World) -> Program:
    """Draw a step on a mesh with explicit axes."""
    size = {c: w.size(name) for c, name in DIMS.items()} | {"L": 2}
    drawn = operations_of(w.rng("operations"), size)
    names = (f"{op.run.__name__} {op.equation or op.dims}" for op in drawn.operations)
    w.said["operations"] = "; ".join(names)

    def leaf(label, dims, scale, call=0):
        shape = [size[c] for c in dims]
        values = w.rng(f"{label} {call}").standard_normal(shape) * scale
        stacked = dims[0] == "L"  # explicit axes cannot split what is scanned
        spec = w.wild(label, shape[stacked:], even=True)
        return Leaf(values.astype(w.kept), P(None, *spec) if stacked else spec)

    read = {n for op in drawn.operations for n in op.operands}
    params = [leaf(f"weight {i}", dims, 0.7) for i, dims in enumerate(drawn.weights)]

    def loss(params, x, *ids):
        values, params = [x.astype(w.compute)], w.cast(params)
        for i, op in enumerate(drawn.operations):
            operands = [values[n] if n >= 0 else params[-n - 1] for n in op.operands]
            if op.ids is not None:
                operands.append(ids[op.ids])
            label = f"{op.run.__name__} {i}"

            def run(*operands, op=op, label=label):
                return op.run(w, label, op, *operands)

            remat = w.chance(f"remat {i}", REMAT)
            values.append((jax.checkpoint(run) if remat else run)(*operands))
        ends = [v for i, v in enumerate(values) if i not in read]
        # A sum, no mean: a gradient is then so large that an error of it shows in the new weight.
        return sum(jnp.sum(jnp.square(v.astype(jnp.float32))) for v in ends)

    def data(n):
        ids = (
            w.integers(f"ids {i} {n}", [size[c] for c in dims], size[rows])
            for i, (dims, rows) in enumerate(drawn.ids)
        )
        return [leaf("x", drawn.values[0], 1.0, n), *ids]

    return trained(w, params, loss, data, STEPS)


def draw_axes(w: World) -> None:
    """Draw which axes are automatic: none, some, or seldom all; a mesh is set in half of the steps."""
    w.explicit, w.ambient = True, w.chance("mesh set", 0.5)
    axes = [*w.sizes]
    some = w.rng("automatic").permutation(axes)[: w.rng("how many").integers(1, len(axes) + 1)]
    if w.rng("mixed").random() < 0.5 and (len(some) < len(axes) or w.ambient):
        w.automatic = frozenset(map(str, some))
    w.said["automatic axes"] = ", ".join(sorted(w.automatic))
