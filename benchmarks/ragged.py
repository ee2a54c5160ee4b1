"""Compare mixtures with ragged experts, plain and overlapped, by simulation.

python -m benchmarks.ragged                     # six steps, some 15 minutes on two cores
python -m benchmarks.ragged --only "Qwen3-30B, 16 H100, EP 8"

The layers are of Qwen3-30B-A3B's and DeepSeek-V3's sizes: cuDNN's attention, and experts whose
tokens go by ragged all-to-alls (`models/ragged.py`), each device with room for twice an even load;
scanned, rematerialized, two sequences of 4096 a GPU, SGD. Grouped matmuls are priced as cuDNN's
(`jaxoverlap/_jax/grouped_matmuls.py`). Schedules are XLA:GPU's: nothing was timed on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.children import each_in_fork, import_first
from benchmarks.drawn.step import Built, lower
from benchmarks.frame import Only, Written, chosen, in_ms, provenance
from models import ragged

LAYERS, SEQUENCE, PER_GPU, ROOM, HEAD = 8, 4096, 2, 2.0, 128
COLUMNS = ("step", "plain", "overlapped", "times", "of the bound", "exchange", "hidden", "taken")
CHILD_S = 1200
_EXCHANGE = ("ragged-all-to-all", "all-to-all", "all-gather")  # XLA makes all of them of one
console = Console(width=200)
app = frame.app()


@dataclass(frozen=True)
class Mixture:
    """The sizes of a layer, and the mesh."""

    pod: str
    data: int
    expert: int
    hidden: int
    mlp: int
    experts: int
    heads: int
    choices: int = 8


_QWEN = dict(hidden=2048, mlp=768, experts=128, heads=32)
_DEEPSEEK = dict(hidden=7168, mlp=2048, experts=256, heads=56)
CASES = {
    "Qwen3-30B, 16 H100, EP 8": Mixture("h100-sxm:2x8", 2, 8, **_QWEN),
    "Qwen3-30B, 16 H100, EP 16": Mixture("h100-sxm:2x8", 1, 16, **_QWEN),
    "Qwen3-30B, 64 H100, EP 8": Mixture("h100-sxm:8x8", 8, 8, **_QWEN),
    "Qwen3-30B, 64 H100, EP 16": Mixture("h100-sxm:8x8", 4, 16, **_QWEN),
    "DeepSeek-V3, 16 H100, EP 16": Mixture("h100-sxm:2x8", 1, 16, **_DEEPSEEK),
    "DeepSeek-V3, 64 H100, EP 16": Mixture("h100-sxm:8x8", 4, 16, **_DEEPSEEK),
}


def build(m: Mixture) -> Built:
    """Return the train step of a mixture, and shapes of its arguments."""
    mesh = jaxoverlap.pod_mesh(m.pod, {"data": m.data, "expert": m.expert})
    both, axis = tuple(mesh.axis_names), "expert"
    mixed = ragged.experts(mesh, axis=axis, activation=jax.nn.silu, room=ROOM)

    def norm(x: jax.Array) -> jax.Array:
        mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return x * lax.rsqrt(mean + 1e-6).astype(x.dtype)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = norm(x)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in "qkv")
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + jnp.einsum("bshk,hkd->bsd", a, p["o"])
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P(both)))
        y = norm(x)
        likely = jax.nn.softmax((y @ p["router"]).astype(jnp.float32))
        weights, chosen = lax.top_k(likely, m.choices)
        weights = (weights / jnp.sum(weights, -1, keepdims=True)).astype(x.dtype)
        return x + mixed(y, weights, chosen, p["up"], p["down"], p["gate"]), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), x, p)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(p: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.001 * g.astype(w.dtype), p, gradients), value

    def array(*spec: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    attention = LAYERS, m.hidden, m.heads, HEAD
    inner = LAYERS, m.experts, m.hidden, m.mlp
    p = {
        **{name: array(None, "data", shape=attention) for name in "qkv"},
        "o": array(None, None, None, "data", shape=(LAYERS, m.heads, HEAD, m.hidden)),
        "router": array(shape=(LAYERS, m.hidden, m.experts)),
        **{name: array(None, axis, "data", shape=inner) for name in ("up", "gate")},
        "down": array(None, axis, None, "data", shape=(LAYERS, m.experts, m.mlp, m.hidden)),
    }
    x = array(both, shape=(mesh.size * PER_GPU, SEQUENCE, m.hidden))
    return Built(step, (p, x))


def measured(name: str, row: str) -> dict[str, Any]:
    """Compile a step for its pod, plain or overlapped, and simulate it."""
    case = CASES[name]
    built = build(case)
    if row == "plain":
        simulation = jaxoverlap.simulate(lower(built.function, built.args).compile(), case.pod)
        speedup, edits = None, list[str]()
    else:
        overlapped: Any = jaxoverlap.overlap(built.function)
        compiled = overlapped.lower(*built.args).compile()
        simulation, speedup = compiled.simulate(), compiled.speedup
        edits = [str(edit) for edit in compiled.plan.edits] if compiled.plan else []
    # XLA gives what it makes of an exchange no source line; it gives gathers of weights one.
    sent = [s for s in simulation.spent if s.collective.kind in _EXCHANGE]
    sent = [s for s in sent if not s.collective.source]
    return {
        **provenance(),
        "step_s": simulation.step_s,
        "bound_s": simulation.bound_s,
        "exposed_s": simulation.exposed_s,
        "exchange_s": sum(s.seconds for s in sent),
        "exchange_exposed_s": sum(s.exposed_s for s in sent),
        "taken": speedup.name if speedup else "",
        "edits": edits,
    }


@app.command()
def main(only: Only = None, out: Written = Path("out/ragged.jsonl")) -> None:
    """Compile and simulate; print a table."""
    import_first(["benchmarks.ragged"])
    wanted = itertools.product(chosen("only", only, CASES), ("plain", "overlapped"))
    made = table(each_in_fork(measured, wanted, out, CHILD_S, console))
    console.print(frame.filled("ragged experts, ms", COLUMNS, made, words=("step", "taken")))


def table(rows: list[frame.Row]) -> list[tuple[str, ...]]:
    """Return the cells of each step that was measured both ways."""
    known = {(row["step"], row["row"]): row for row in rows if "step_s" in row}
    cells = []
    for name in CASES:
        plain, mine = known.get((name, "plain")), known.get((name, "overlapped"))
        if plain and mine:
            hidden = 1 - mine["exchange_exposed_s"] / mine["exchange_s"]
            cells.append(
                (
                    name,
                    in_ms(plain["step_s"]),
                    in_ms(mine["step_s"]),
                    f"{plain['step_s'] / mine['step_s']:.2f}",
                    f"{mine['step_s'] / plain['bound_s']:.2f}",
                    in_ms(mine["exchange_s"]),
                    f"{hidden:.0%}",
                    mine["taken"],
                )
            )
    return cells


if __name__ == "__main__":
    app()
