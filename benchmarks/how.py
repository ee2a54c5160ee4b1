"""Draw the pictures of docs/how.md: two layers by each of the four tools, plain above.

python -m benchmarks.how                 # writes docs/how_*.svg; a minute
python -m benchmarks.how rings           # one of them
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from benchmarks import frame
from jaxoverlap.hardware.pods import compiler_options

DOCS = Path(__file__).parents[1] / "docs"
POD, TENSOR, FSDP = "h100-sxm:2x8", {"data": 2, "model": 8}, {"data": 16, "model": 1}
LAYERS, BATCH, LENGTH, WIDTH, HIDDEN = 2, 16, 2048, 8192, 28672
_ALONE: Mapping[str, Any] = {
    "halves": None,
    "granularity": "plain",
    "layouts": None,
    "schedule": None,
    "never_slower": False,
}
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "halves": _ALONE | {"halves": 2, "schedule": jaxoverlap.Scheduler()},
    "rings": _ALONE | {"granularity": "two_way"},
    "layouts": _ALONE | {"layouts": "complete"},
    "schedule": _ALONE | {"schedule": jaxoverlap.Scheduler()},
}
app = frame.app()


def build(mesh: Mesh, *, constrained: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of two MLPs, with Megatron's constraints or none, and shapes of arguments."""

    def pinned(x: jax.Array, *spec: Any) -> jax.Array:
        if not constrained:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            hidden = pinned(x @ up, "data", None, "model")
            x = x + pinned(jax.nn.gelu(hidden) @ down, "data", "model", None)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    @jax.jit
    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, jax.grad(loss)(params, x))

    def shape(spec: P, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    layer = shape(P("data", "model"), WIDTH, HIDDEN), shape(P("model", "data"), HIDDEN, WIDTH)
    return step, ([layer] * LAYERS, shape(P("data", "model", None), BATCH, LENGTH, WIDTH))


@app.command()
def main(
    tool: Annotated[str | None, typer.Argument(help="One tool; by default all.")] = None,
) -> None:
    """Compile a step for GPUs that are not there, and draw its simulated timeline."""
    for name in frame.chosen("tool", [tool] if tool else None, TOOLS):
        mesh = jaxoverlap.pod_mesh(POD, FSDP if name == "schedule" else TENSOR)
        step, args = build(mesh, constrained=name != "layouts")
        plain = jaxoverlap.simulate(step.lower(*args).compile(compiler_options()), POD)
        made: Any = jaxoverlap.overlap(step, cluster=POD, **TOOLS[name])
        with_tool = made.lower(*args).compile().simulate()
        with_tool.to_svg(DOCS / f"how_{name}.svg", plain=plain)
        typer.echo(f"{name}: {plain.step_s * 1e3:.1f} ms -> {with_tool.step_s * 1e3:.1f} ms")


if __name__ == "__main__":
    app()
