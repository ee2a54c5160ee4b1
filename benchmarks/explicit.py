"""Compare steps on explicit meshes with the same steps on automatic ones, by simulation.

python -m benchmarks.explicit                     # three steps, some 15 minutes on two cores
python -m benchmarks.explicit --only "GPT, data 8 x model 8"

Each step is written twice: with constraints on an automatic mesh, and with `reshard` and
`out_sharding=` on an explicit one, as JAX's tutorials have it. All have cuDNN's attention, remat
and SGD. Plain and overlapped steps are compiled for a pod by XLA's GPU compiler and their schedules
simulated: nothing was timed on a GPU. Needs no GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.children import each_in_fork, import_first
from benchmarks.drawn.step import Built, lower
from benchmarks.frame import Only, Written, chosen, in_ms, provenance
from jaxoverlap.hardware.pods import compiler_options

HEAD = 128
COLUMNS = (
    "step", "mesh", "plain", "overlapped", "times", "of plain's compute", "of automatic",
)  # fmt: skip
KINDS = ("automatic", "explicit")
CHILD_S = 1200
console = Console(width=200)
app = frame.app()


@dataclass(frozen=True)
class Model:
    """A transformer and its mesh; its weights are sharded over data, and over model where it is.

    Attributes:
        pod: as `jaxoverlap.parse_cluster` takes it.
        data: size of the axis of the batch.
        model: size of the axis of heads and of the MLP's hidden dim.
        mlp: width of the MLP; 0: there is none.
        scan: whether layers are scanned.
        by_hand: whether each weight is gathered by a `reshard`; if not, `out_sharding=` says so.
        vocab: size of the table of tokens; 0: the input is embedded already.
    """

    pod: str
    data: int
    model: int
    layers: int
    hidden: int
    mlp: int
    batch: int
    sequence: int
    scan: bool
    by_hand: bool
    vocab: int = 0


_GB200 = "gb200:16x4"
CASES = {
    "GPT, data 8 x model 8": Model(
        "h100-sxm:8x8", 8, 8, 4, 4096, 16384, 64, 4096, scan=False, by_hand=False
    ),
    "attention alone, FSDP 64": Model(
        _GB200, 64, 1, 16, 4096, 0, 64, 4096, scan=True, by_hand=True
    ),
    "transformer, FSDP 64": Model(
        _GB200, 64, 1, 8, 4096, 16384, 64, 4096, scan=False, by_hand=False, vocab=32768
    ),
}


def build(m: Model, mesh: Mesh, kind: str) -> Built:
    """Return the train step of a model, on a mesh of these devices, and shapes of its arguments."""
    explicit = kind == "explicit"
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(mesh.devices, ("data", "model"), axis_types=(axis_type,) * 2)
    layer = _layer(m, mesh, explicit)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        layers, table, tokens = p["layers"], p.get("table"), x
        if table is not None:
            x = _lookup(table, tokens, mesh, explicit)
        if m.scan:
            x, _ = lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, layers)
        else:
            for weights in layers:
                x = jax.checkpoint(layer)(x, weights)
        if table is None:
            return jnp.mean(jnp.square(x.astype(jnp.float32)))
        logits = _einsum("bsd,vd->bsv", x, table, P("data"), mesh, explicit)
        likely = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(likely, tokens[..., None], -1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(p: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.001 * g.astype(w.dtype), p, gradients), value

    return Built(step, _arguments(m, mesh), functools.partial(jax.set_mesh, mesh))


def _arguments(m: Model, mesh: Mesh) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Return shapes of the parameters and of the batch."""

    def array(*spec: Any, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    heads = m.hidden // HEAD

    def weights(*stacked: int) -> dict[str, Any]:
        first = (None,) * len(stacked)

        def weight(*spec: Any, shape: tuple[int, ...]) -> Any:
            return array(*first, *spec, shape=(*stacked, *shape))

        attention = {
            **{n: weight("data", "model", shape=(m.hidden, heads, HEAD)) for n in "qkv"},
            "o": weight("model", None, "data", shape=(heads, HEAD, m.hidden)),
        }
        mlp = {
            "up": weight("data", "model", shape=(m.hidden, m.mlp)),
            "down": weight("model", "data", shape=(m.mlp, m.hidden)),
        }
        return attention | (mlp if m.mlp else {})

    p = {"layers": weights(m.layers) if m.scan else [weights() for _ in range(m.layers)]}
    if not m.vocab:
        return p, array("data", shape=(m.batch, m.sequence, m.hidden))
    p["table"] = array(None, "data", shape=(m.vocab, m.hidden))
    return p, array("data", shape=(m.batch, m.sequence), dtype=jnp.int32)


def _layer(m: Model, mesh: Mesh, explicit: bool) -> Callable[[jax.Array, Any], jax.Array]:
    def einsum(spec: str, x: jax.Array, w: jax.Array, *weight: Any, out: P) -> jax.Array:
        if m.by_hand:
            target = NamedSharding(mesh, P(*weight))
            w = jax.sharding.reshard(w, target) if explicit else _constrained(w, target)
        return _einsum(spec, x, w, out, mesh, explicit)

    def layer(x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x)
        heads, stream = P("data", None, "model"), P("data")
        q, k, v = (einsum("bsd,dhk->bshk", y, p[n], None, "model", out=heads) for n in "qkv")
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + einsum("bshk,hkd->bsd", a, p["o"], "model", out=stream)
        if not m.mlp:
            return x
        wide = P("data", None, "model")
        y = jax.nn.gelu(einsum("bsd,df->bsf", _norm(x), p["up"], None, "model", out=wide))
        return x + einsum("bsf,fd->bsd", y, p["down"], "model", out=stream)

    return layer


def _einsum(spec: str, x: jax.Array, w: jax.Array, out: P, mesh: Mesh, explicit: bool) -> jax.Array:
    """Return an einsum whose result is sharded as said."""
    target = NamedSharding(mesh, out)
    if explicit:
        return jnp.einsum(spec, x, w, out_sharding=target)
    return _constrained(jnp.einsum(spec, x, w), target)


def _lookup(table: jax.Array, tokens: jax.Array, mesh: Mesh, explicit: bool) -> jax.Array:
    target = NamedSharding(mesh, P("data"))
    if explicit:
        return table.at[tokens].get(out_sharding=target)
    return _constrained(table[tokens], target)


def _constrained(x: jax.Array, target: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(x, target)


def _norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * lax.rsqrt(mean + 1e-6).astype(x.dtype)


def measured(name: str, kind: str, row: str) -> dict[str, Any]:
    """Compile a step for its pod, plain or overlapped, and simulate it."""
    case = CASES[name]
    mesh = jaxoverlap.pod_mesh(case.pod, {"data": case.data, "model": case.model})
    built = build(case, mesh, kind)
    with built.context():
        if row == "plain":
            compiled = lower(built.function, built.args).compile(compiler_options())
            simulation, edits = jaxoverlap.simulate(compiled, case.pod), list[str]()
        else:
            overlapped: Any = jaxoverlap.overlap(built.function, cluster=case.pod)
            compiled = overlapped.lower(*built.args).compile()
            simulation = compiled.simulate()
            edits = [str(edit) for edit in compiled.plan.edits] if compiled.plan else []
    return {
        **provenance(),
        "step_s": simulation.step_s,
        "compute_s": simulation.compute_s,
        "exposed_s": simulation.exposed_s,
        "edits": edits,
    }


@app.command()
def main(only: Only = None, out: Written = Path("out/explicit.jsonl")) -> None:
    """Compile and simulate; print a table."""
    import_first(["benchmarks.explicit"])
    names = chosen("only", only, CASES)
    wanted = itertools.product(names, KINDS, ("plain", "overlapped"))
    made = table(each_in_fork(measured, wanted, out, CHILD_S, console))
    console.print(frame.filled("explicit meshes, ms", COLUMNS, made, words=("step", "mesh")))


def table(rows: list[frame.Row]) -> list[tuple[str, ...]]:
    """Return the cells of each step and mesh that was measured both ways."""
    known = {(row["step"], row["row"]): row for row in rows if "step_s" in row}
    cells = []
    for name in CASES:
        auto = known.get((name, "automatic, overlapped"))
        for kind in KINDS:
            plain, mine = (known.get((name, f"{kind}, {row}")) for row in ("plain", "overlapped"))
            if not (plain and mine and auto):
                continue
            ratios = plain["step_s"] / mine["step_s"], mine["step_s"] / plain["compute_s"]
            cells.append(
                (
                    name,
                    kind,
                    in_ms(plain["step_s"]),
                    in_ms(mine["step_s"]),
                    *(f"{ratio:.2f}" for ratio in (*ratios, mine["step_s"] / auto["step_s"])),
                )
            )
    return cells


if __name__ == "__main__":
    app()
