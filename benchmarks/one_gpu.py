"""Time steps on one GPU, and compare with their simulation.

python -m benchmarks.one_gpu                       # needs a GPU; some 3 minutes
python -m benchmarks.one_gpu --only "Adam, 512 million weights"

Steps have no collectives: what is compared is the time of kernels. A step is compiled for the GPU
that is there, run, profiled, and simulated from the same compiled program. Set
XLA_FLAGS=--xla_gpu_enable_command_buffer= to see each kernel's instruction in the profiles.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxoverlap
from benchmarks import explicit, frame
from benchmarks.frame import Only, Written, chosen, provenance, rows_in, write_rows
from jaxoverlap.hardware.topology import chip_of

BATCHES, RUNS = 7, 5
KINDS = ("matmul", "attention", "memory")
COLUMNS = ("step", "measured", "kernels alone", "simulated", "measured / simulated", *KINDS)
console = Console(width=200)
app = frame.app()


# -- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A jitted function and its arguments' shapes."""

    function: Any
    args: tuple[Any, ...]


def _mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def _transformer(**changes: Any) -> Timed:
    case = explicit.CASES["transformer, FSDP 64"]
    case = replace(case, data=1, batch=4, layers=4, **changes)
    built = explicit.build(case, _mesh(), "automatic")
    return Timed(built.function, built.args)


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(_mesh(), P()))


def _matmul(rows: int, inner: int, columns: int) -> Timed:
    return Timed(jax.jit(jnp.matmul), (_array(rows, inner), _array(inner, columns)))


def _batched(groups: int, rows: int, inner: int, columns: int) -> Timed:
    """Return forward and backward of a batched matmul: a grouped one whose groups are even."""

    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, transpose = jax.vjp(jnp.matmul, x, w)
        return y, transpose(g)

    shapes = (groups, rows, inner), (groups, inner, columns), (groups, rows, columns)
    return Timed(jax.jit(both), tuple(_array(*shape) for shape in shapes))


def _adam(weights: int) -> Timed:
    """Return an Adam update, which is bound by memory."""

    def update(p: Any, g: jax.Array) -> Any:
        m = 0.9 * p["m"] + 0.1 * g
        v = 0.999 * p["v"] + 0.001 * g * g
        return {"w": p["w"] - 1e-3 * m / (jnp.sqrt(v) + 1e-8), "m": m, "v": v}, m[0, 0]

    weight = _array(weights // 4096, 4096, dtype=jnp.float32)
    return Timed(jax.jit(update, donate_argnums=0), (dict.fromkeys("wmv", weight), weight))


def _attention(batch: int, length: int, heads: int, kv_heads: int, *, causal: bool) -> Timed:
    """Return forward and backward of cuDNN's attention."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        y, transpose = jax.vjp(attend, q, k, v)
        return y, transpose(g)

    q, k = _array(batch, length, heads, 128), _array(batch, length, kv_heads, 128)
    return Timed(jax.jit(both), (q, k, k, q))


def _grouped(tokens: int, groups: int, inner: int, columns: int) -> Timed:
    """Return forward and backward of one grouped matmul, inside a shard_map, as experts have it."""

    def both(x: jax.Array, w: jax.Array, sizes: jax.Array, g: jax.Array) -> Any:
        y, transpose = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
        return y, transpose(g)

    specs = (P("data"), P(), P(), P("data"))
    mapped = jax.shard_map(
        both, mesh=_mesh(), in_specs=specs, out_specs=(P("data"), (P("data"), P())), check_vma=False
    )
    shapes = _array(tokens, inner), _array(groups, inner, columns)
    sizes = _array(groups, dtype=jnp.int32)
    return Timed(jax.jit(mapped), (*shapes, sizes, _array(tokens, columns)))


TIMED: dict[str, Callable[[], Timed]] = {
    "transformer, 4 layers, unrolled": _transformer,
    "transformer, 4 layers, scan": functools.partial(_transformer, scan=True),
    "matmul 16384 x 4096 x 16384": functools.partial(_matmul, 16384, 4096, 16384),
    "matmul 8192 x 4096 x 4096": functools.partial(_matmul, 8192, 4096, 4096),
    "matmul 2048 x 8192 x 1024": functools.partial(_matmul, 2048, 8192, 1024),
    "attention 4 x 4096, 32 heads, causal": functools.partial(
        _attention, 4, 4096, 32, 32, causal=True
    ),
    "attention 4 x 4096, 32 heads": functools.partial(_attention, 4, 4096, 32, 32, causal=False),
    "attention 1 x 16384, 32 and 8 heads, causal": functools.partial(
        _attention, 1, 16384, 32, 8, causal=True
    ),
    "batched matmul 16 x 4096 x 2048 x 768": functools.partial(_batched, 16, 4096, 2048, 768),
    "Adam, 512 million weights": functools.partial(_adam, 2**29),
    "grouped matmul 65536 x 2048 x 768, 16 groups": functools.partial(
        _grouped, 65536, 16, 2048, 768
    ),
}


def filled(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Return random values; of integers, tokens, or sizes of groups that are uneven."""
    draw = np.random.default_rng(seed)
    if shape.dtype == jnp.int32 and len(shape.shape) == 1:
        likely = draw.dirichlet(np.full(shape.shape, 4.0))
        return jnp.asarray(np.floor(likely * 65536), jnp.int32)
    if shape.dtype == jnp.int32:
        return jnp.asarray(draw.integers(0, 32768, shape.shape), jnp.int32)
    key = jax.random.key(seed)
    return (jax.random.normal(key, shape.shape, jnp.float32) * 0.02).astype(shape.dtype)


def timed(name: str, profiles: Path | None) -> dict[str, Any]:
    """Time a step, and let the profile say what each kind of kernel took and should have taken."""
    case = TIMED[name]()
    leaves, tree = jax.tree.flatten(case.args)
    args: Any = jax.tree.unflatten(tree, [filled(x, i) for i, x in enumerate(leaves)])
    carried = isinstance(args[0], dict)  # a train step gives its parameters back
    compiled = jax.jit(case.function).lower(*case.args).compile()

    def run(args: Any) -> Any:
        out = compiled(*args)
        return (out[0], *args[1:]) if carried else args, out

    args, out = run(args)
    jax.block_until_ready(out)
    seconds = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(RUNS):
            args, out = run(args)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - began) / RUNS)
    chip = chip_of(_mesh())
    assert chip is not None, f"no cost table has {jax.devices()[0].device_kind}"
    pod = f"{chip.name}:1x1"
    folder = profiles / name.replace(" ", "_") if profiles else None
    profile = jaxoverlap.profile(compiled, *args, cluster=pod, folder=folder)
    console.print(str(profile), highlight=False)
    return {
        "pod": pod,
        "measured_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "profile_s": profile.sums.step_s,
        "simulated_s": jaxoverlap.simulate(compiled, pod).step_s,
        "kinds": [[r.kind, r.instructions, r.measured_s, r.predicted_s] for r in profile.ratios],
    }


@app.command()
def main(
    only: Only = None,
    profiles: Annotated[Path | None, typer.Option(help="A folder to keep profiles in.")] = None,
    out: Written = Path("out/one_gpu.jsonl"),
) -> None:
    """Measure on the first GPU; print what the profiles say."""
    device = jax.devices()[0]
    about = {"device": device.device_kind, "platform": device.client.platform_version}
    rows = rows_in(out)
    for name in chosen("only", only, TIMED):
        made = timed(name, profiles)
        rows[name, "one GPU"] = {"step": name, "row": "one GPU", **provenance(), **about, **made}
        write_rows(out, rows.values())
    made = table(list(rows.values()))
    console.print(frame.filled("one GPU, ms", COLUMNS, made, words=("step",)))


def table(rows: list[frame.Row]) -> list[tuple[str, ...]]:
    """Return the cells of each step; of each kind, seconds measured over seconds predicted."""
    cells = []
    for row in rows:
        kinds = {kind: (measured, predicted) for kind, _, measured, predicted in row["kinds"]}
        kernels_s = sum(measured for measured, _ in kinds.values())
        times = (f"{s * 1e3:.3g}" for s in (row["measured_s"], kernels_s, row["simulated_s"]))
        ratios = [row["measured_s"] / row["simulated_s"]]
        ratios += [kinds[k][0] / kinds[k][1] if k in kinds else 0.0 for k in KINDS]
        cells.append((row["step"], *times, *(f"{r:.2f}" if r else "" for r in ratios)))
    return cells


if __name__ == "__main__":
    app()
