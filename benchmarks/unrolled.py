"""Time overlap() as it traces and rewrites a step whose layers are written out, by its length.

A multilayer perceptron with FSDP and tensor parallelism, its gradients and its parameters' update:
six matmuls a layer. Plain is the trace of the jitted step. Asking is the time of XLA's partitioner,
with the lowering that it needs and the reading of its answers; pricing is the time to price those
on the cluster. The rest is to trace, decide and rewrite: it should grow as the step, and no faster.
Seconds are of this process's CPU time, so that other load on the machine counts little.

    python -m benchmarks.unrolled [matmuls ...]
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import overlap, pod_mesh
from jaxoverlap._jax import partitioner
from jaxoverlap._util.text import table
from jaxoverlap.simulation import hlo
from jaxoverlap.step import context

LENGTHS = (60, 120, 240, 480, 960)
POD = "h100-sxm:1x8"  # where rings have prices; on CPU devices all that can be a ring is one
AXES = {"data": 2, "model": 4}


PARTS = (
    (jax.stages.Traced, "lower", "asking"),
    (partitioner, "ask", "asking"),
    (hlo, "parse_partitioned", "asking"),
    (context, "estimate", "pricing"),
)


class Row(NamedTuple):
    """Seconds of one step.

    Attributes:
        matmuls: that it has.
        devices: that it is for.
        rings: that it got.
        plain_s: of the plain step's trace.
        asked_s: of XLA's answers.
        priced_s: of their prices.
        own_s: of all else.
    """

    matmuls: int
    devices: str
    rings: int
    plain_s: float
    asked_s: float
    priced_s: float
    own_s: float


def build(matmuls: int, mesh: Mesh) -> tuple[Any, tuple[Any, Any]]:
    """A step with so many matmuls, and its arguments."""

    def at(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def loss(params: Any, x: Any) -> Any:
        for up, down in params:
            h = lax.with_sharding_constraint(jnp.tanh(x @ up), at("data", "model"))
            x = x + lax.with_sharding_constraint(h @ down, at("data", None))
        return (x * x).mean()

    def train_step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def struct(shape: tuple[int, int], *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at(*spec))

    layer = struct((8192, 32768), "data", "model"), struct((32768, 8192), "model", "data")
    return train_step, ([layer] * (matmuls // 6), struct((32768, 8192), "data", None))


def measured(matmuls: int, devices: str, mesh: Mesh) -> Row:
    """Measure one step's row."""
    step, args = build(matmuls, mesh)
    start = time.process_time()
    plain: Any = jax.jit(step)
    plain.trace(*args)
    traced = time.process_time()
    spent = {"asking": 0.0, "pricing": 0.0}
    overlapped: Any = overlap(step, never_slower=False)
    with contextlib.ExitStack() as stack:
        for where, name, what in PARTS:
            timed = _timed(getattr(where, name), what, spent)
            stack.enter_context(mock.patch.object(where, name, timed))
        rewritten = overlapped.trace(*args)
    own_s = time.process_time() - traced - sum(spent.values())
    names = [eqn.primitive.name for eqn in rewritten.jaxpr.eqns]
    rings = names.count("shard_map")
    return Row(matmuls, devices, rings, traced - start, spent["asking"], spent["pricing"], own_s)


def _timed(fn: Callable[..., Any], what: str, spent: dict[str, float]) -> Callable[..., Any]:
    """Wrap a function so that its CPU seconds are added up, less those that are added within."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began, before = time.process_time(), sum(spent.values())
        try:
            return fn(*args, **kwargs)
        finally:
            within = sum(spent.values()) - before
            spent[what] += time.process_time() - began - within

    return call


def shown(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    columns = (
        "matmuls",
        "devices",
        "rings",
        "plain",
        "asking XLA",
        "pricing",
        "the rest",
        "a matmul",
    )
    cells = (
        (
            str(row.matmuls),
            row.devices,
            str(row.rings),
            f"{row.plain_s:.2f} s",
            f"{row.asked_s:.2f} s",
            f"{row.priced_s:.2f} s",
            f"{row.own_s:.2f} s",
            f"{row.own_s / row.matmuls * 1e3:.1f} ms",
        )
        for row in rows
    )
    title = "Tracing and rewriting unrolled steps: CPU seconds, and the rest by matmul"
    right = [column for column in columns if column != "devices"]
    return table(title, columns, cells, right=right)


def main() -> None:
    """Measure each length; the first step on each mesh is left out, as it imports and warms up."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    lengths = [int(length) for length in sys.argv[1:]] or LENGTHS
    here = jax.make_mesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * len(AXES))
    meshes = {"8 CPU devices": here, POD: pod_mesh(POD, AXES)}
    rows = []
    for devices, mesh in meshes.items():
        measured(12, devices, mesh)
        rows += [measured(length, devices, mesh) for length in lengths]
    print(shown(rows))


if __name__ == "__main__":
    main()
