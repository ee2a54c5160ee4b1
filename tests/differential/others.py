"""Draw programs of manual shard_maps, and graphs of matmuls that are nobody's model."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.differential import layers
from tests.differential.training import Program, optimizer_state, trained, transformation
from tests.differential.world import Leaf, World


def replicated(tree):
    return jax.tree.map(lambda leaf: Leaf(leaf.value, P()), tree)


# -- shard_map ------------------------------------------------------------------------------------


def data_parallel(w: World) -> Program:
    """Draw a whole step in a shard_map over the batch, with gradients summed by hand."""
    axes = tuple(w.sizes)
    tx = transformation(w)
    lookup = w.pick("data", ("tokens", "tokens", "rows"))
    shapes = {"up": "DF", "down": "FV"} | ({"embed": "VD"} if lookup == "tokens" else {})
    params = replicated(layers.initial(w, "net", shapes))
    state = jax.tree.map(
        lambda leaf: Leaf(leaf.value, P()) if leaf.spec is not None else leaf,
        optimizer_state(w, tx, params),
    )
    rows = 8 if lookup == "tokens" else 16
    checked = not w.chance("check_vma off", 0.3)

    def loss(params, x, targets):
        p = w.cast(params)
        x = layers.look_up(w, "embed", p["embed"], x) if "embed" in p else x.astype(w.compute)
        logits = jax.nn.gelu(x @ p["up"]) @ p["down"]
        return layers.cross_entropy(w, "loss", logits, targets)

    def local(params, opt_state, x, targets):
        if checked:  # parameters differ by device from here on, so that their gradients do
            own = jax.tree.map(lambda p: jax.lax.pcast(p, axes, to="varying"), params)
        else:
            own = params
        value, grads = jax.value_and_grad(loss)(own, x, targets)
        grads = jax.lax.pmean(grads, axes)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(value, axes)

    specs = (P(), P(), P(axes), P(axes))
    step = w.manual(local, specs, P(), check_vma=checked)

    def data(n):
        if lookup == "tokens":
            shape = (rows, w.size("S"))
            return [
                w.integers(f"x {n}", shape, w.size("V")),
                w.integers(f"y {n}", shape, w.size("V")),
            ]
        x = w.normal(f"x {n}", (rows, w.size("D")))
        return [x, w.integers(f"y {n}", (rows,), w.size("V"))]

    def train_step(params, opt_state, x, targets):
        return step(params, opt_state, x, targets)

    return Program(train_step, [params, state], data, (0, 1, None))


def manual_mlp(w: World) -> Program:
    """Draw an MLP whose gathers and scatters are written out, inside an automatic step."""
    axes = tuple(w.sizes)
    tp = axes[-1]
    partly = len(axes) > 1 and w.chance("partly manual", 0.4)
    batch = axes[0] if len(axes) > 1 and not partly else None
    gathered = w.chance("sequence gathered", 0.6)
    dims = {"D": 16, "F": 32, "S": 8, "B": 8}
    params = {
        "w1": Leaf(_normal(w, "w1", dims["D"], dims["F"]), P(None, tp)),
        "w2": Leaf(_normal(w, "w2", dims["F"], dims["D"]), P(tp, None)),
        "out": Leaf(_normal(w, "out", dims["D"], dims["D"]), w.wild("out", (16, 16), even=True)),
    }
    rows = P(batch, tp if gathered else None, None)

    def body(x, w1, w2):
        if gathered:
            x = jax.lax.all_gather(x, tp, axis=1, tiled=True)
        h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, w1))
        out = jnp.einsum("bsf,fd->bsd", h, w2)
        if gathered:
            return jax.lax.psum_scatter(out, tp, scatter_dimension=1, tiled=True)
        return jax.lax.psum(out, tp)

    more = {"axis_names": {tp}} if partly else {}
    mlp = w.manual(body, (rows, P(None, tp), P(tp, None)), rows, **more)
    remat = w.chance("remat", 0.3)

    def loss(params, x, y):
        x = w.pin("x", x)
        block = jax.checkpoint(mlp) if remat else mlp
        x = x + block(x, params["w1"], params["w2"])
        out = w.pin("stream", x) @ params["out"]
        return jnp.mean(jnp.square(out - y))

    shape = (dims["B"], dims["S"], dims["D"])
    return trained(
        w, params, loss, lambda n: [w.normal(f"x {n}", shape), w.normal(f"y {n}", shape)]
    )


def vocabulary_parallel(w: World) -> Program:
    """Draw a lookup and a cross-entropy whose vocabulary is split by hand, as in Megatron."""
    axes = tuple(w.sizes)
    tp = axes[-1]
    batch = axes[0] if len(axes) > 1 else None
    vocabulary, d = 64, 16
    params = {
        "embed": Leaf(_normal(w, "embed", vocabulary, d), P(tp, None)),
        "w": Leaf(_normal(w, "w", d, d), w.wild("w", (d, d), even=True)),
    }
    rows = P(batch, None)

    def own(table, ids):
        """Return ids as rows of this device's part, and which of them it has."""
        at = ids - jax.lax.axis_index(tp) * table.shape[0]
        has = (at >= 0) & (at < table.shape[0])
        return jnp.clip(at, 0, table.shape[0] - 1), has

    def embed(table, ids):
        at, has = own(table, ids)
        embeddings = jnp.take(table, at, axis=0) if taken else table[at]
        return jax.lax.psum(jnp.where(has[..., None], embeddings, 0), tp)

    def entropy(table, x, targets):
        logits = x @ table.T
        peak = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), tp)
        total = jax.lax.psum(jnp.exp(logits - peak[..., None]).sum(-1), tp)
        at, has = own(table, targets)
        right = jnp.take_along_axis(logits, at[..., None], axis=-1)[..., 0]
        right = jax.lax.psum(jnp.where(has, right, 0), tp)
        return jnp.log(total) + peak - right

    taken = w.chance("takes", 0.5)
    whole = P(batch, None, None)
    look_up = w.manual(embed, (P(tp, None), rows), whole)
    score = w.manual(entropy, (P(tp, None), whole, rows), rows)

    def loss(params, tokens, targets):
        x = w.pin("x", look_up(params["embed"], tokens))
        x = w.pin("h", x + jnp.tanh(x @ params["w"]))
        return score(params["embed"], x, targets).mean()

    shape = (8, w.size("S"))
    return trained(
        w, params, loss,
        lambda n: [w.integers(f"x {n}", shape, vocabulary), w.integers(f"y {n}", shape, vocabulary)],
    )  # fmt: skip


def zero(w: World) -> Program:
    """Draw ZeRO in a shard_map: parameters gathered by hand before use, gradients scattered."""
    axis = next(iter(w.sizes))
    others = tuple(a for a in w.sizes if a != axis)
    everywhere = (axis, *others)
    dims = {"a": (16, 32), "b": (32, 16)}
    params = {k: Leaf(_normal(w, k, *shape), P(axis, None)) for k, shape in dims.items()}
    remat = w.chance("remat", 0.4)

    def local(params, x, y):
        def loss(params):
            def block(x, a, b):
                a, b = (jax.lax.all_gather(p, axis, axis=0, tiled=True) for p in (a, b))
                return x + jnp.tanh(x @ a) @ b

            block = jax.checkpoint(block) if remat else block
            out = block(x, params["a"], params["b"])
            out = block(out, params["a"], params["b"])
            return jnp.sum(jnp.square(out - y)) / (16 * 16)

        # An all_gather's transpose scatters the sum over its axis; other axes are summed here.
        value, grads = jax.value_and_grad(loss)(params)
        if others:
            grads = jax.lax.psum(grads, others)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, jax.lax.psum(value, everywhere)

    specs = {k: P(axis, None) for k in dims}
    data = P(everywhere)
    step = w.manual(local, (specs, data, data), (specs, P()), check_vma=False)
    shape = (16, 16)
    return Program(
        lambda params, x, y: step(params, x, y),
        [params],
        lambda n: [w.normal(f"x {n}", shape), w.normal(f"y {n}", shape)],
        (0, None),
    )


def _normal(w: World, label: str, *shape: int) -> np.ndarray:
    return (w.rng(label).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


# -- graphs ---------------------------------------------------------------------------------------

DIMS = {"a": "B", "b": "S", "c": "D", "d": "F", "e": "H", "f": "K", "g": "C"}


@dataclass
class Matmuls:
    """A chain of matmuls, by letters of DIMS.

    Attributes:
        given: the dims of each value that is there at first.
        weights: the dims of each weight.
        all: the left operand's number, the right one's (weights are -1, -2, ...) and the einsum.
    """

    given: list[str]
    weights: list[str]
    all: list[tuple[int, int, str]]


def some_dims(rng: np.random.Generator) -> str:
    """Draw the dims of a value."""
    return "".join(rng.permutation(list(DIMS))[: rng.integers(2, 4)])


def matmuls_of(rng: np.random.Generator, size: dict[str, int]) -> Matmuls:
    """Draw matmuls of any value so far with a weight or another value, summed over shared dims."""
    values = [some_dims(rng), some_dims(rng)]
    drawn = Matmuls(list(values), [], [])
    for _ in range(int(rng.integers(3, 8))):
        matmul = matmul_of(rng, values, drawn.weights, size)
        if matmul is not None:
            drawn.all.append(matmul)
            values.append(matmul[2].split("->")[1])
    return drawn


def matmul_of(
    rng: np.random.Generator,
    values: list[str],
    weights: list[str],
    size: dict[str, int],
    most: int = 1 << 16,
) -> tuple[int, int, str] | None:
    """Draw a matmul, as `Matmuls.all` has it; None if its result has over `most` elements.

    A weight that it multiplies by is added to the weights.
    """
    at = int(rng.integers(len(values)))
    others = [i for i, v in enumerate(values) if i != at and set(v) & set(values[at])]
    by = int(rng.choice(others)) if others and rng.random() < 0.35 else None
    rhs = some_dims(rng) if by is None else values[by]
    if not set(rhs) & set(values[at]):
        rhs = values[at][-1] + rhs[:2]
    shared = [c for c in values[at] if c in rhs]
    summed = {str(c) for c in rng.permutation(shared)[: rng.integers(1, len(shared) + 1)]}
    out = [c for c in dict.fromkeys(values[at] + rhs) if c not in summed]
    out = [str(c) for c in rng.permutation(out)] if rng.random() < 0.4 else out
    if not 1 <= len(out) <= 4 or np.prod([size[c] for c in out]) > most:
        return None
    if by is None:
        weights.append(rhs)
        by = -len(weights)
    return at, by, f"{values[at]},{rhs}->{''.join(out)}"


def graph(w: World) -> Program:
    """Draw a graph of matmuls, trained or run forward."""
    size = {c: w.size(name) for c, name in DIMS.items()}
    drawn = matmuls_of(w.rng("graph"), size)
    given, weights, matmuls = drawn.given, drawn.weights, drawn.all
    w.said["matmuls"] = "  ".join(equation for *_, equation in matmuls)

    def leaf(label, dims, scale, call=0):
        shape = [size[c] for c in dims]
        values = w.rng(f"{label} {call}").standard_normal(shape) * scale
        return Leaf(values.astype(w.kept), w.wild(label, shape, even=True))

    params = [leaf(f"weight {i}", dims, 0.3) for i, dims in enumerate(weights)]

    def run(params, *xs):
        made = [x.astype(w.compute) for x in xs]
        params = w.cast(params)
        for i, (at, by, equation) in enumerate(matmuls):
            rhs = made[by] if by >= 0 else params[-by - 1]
            summed = set(equation.split("->")[0]) - set(equation.split("->")[1])
            scale = 1 / np.sqrt(np.prod([size[c] for c in summed if c != ","]))
            out = w.einsum(f"matmul {i}", equation, made[at], rhs) * jnp.asarray(scale, w.compute)
            out = jnp.tanh(out) if w.chance(f"tanh {i}", 0.5) else out
            made.append(w.pin(f"value {i}", out))
        return made[len(given) :]

    def data(n):
        return [leaf(f"x {i}", dims, 1.0, n) for i, dims in enumerate(given)]

    if w.chance("forward alone", 0.3) or not params:
        return Program(lambda *xs: run(xs[0], *xs[1:])[-2:], [], lambda n: [params, *data(n)], None)

    def loss(params, *xs):
        return sum(jnp.mean(jnp.square(v.astype(jnp.float32))) for v in run(params, *xs)[-2:])

    return trained(w, params, loss, data)


def power(w: World) -> Program:
    """Draw a power iteration in a while_loop: no train step at all."""
    n = w.size("F")
    matrix = Leaf(_normal(w, "matrix", n, n), w.wild("matrix", (n, n), even=True))
    start = Leaf(_normal(w, "start", n, w.size("R")), w.wild("start", (n, w.size("R")), even=True))
    times = w.pick("times", (2, 3))

    def iterate(v, matrix):
        def body(state):
            i, v = state
            v = matrix @ (matrix.T @ v)
            return i + 1, w.pin("v", v / (jnp.linalg.norm(v) + 1e-3))

        _, v = jax.lax.while_loop(lambda s: s[0] < times, body, (0, v))
        return v, jnp.einsum("nr,nm,mr->r", v, matrix, v)

    return Program(iterate, [start], lambda _: [matrix], (0, None))
