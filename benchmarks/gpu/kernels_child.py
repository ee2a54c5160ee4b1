"""A process's part in timing kernels: compile, fill the memory, profile, simulate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxoverlap
from benchmarks.gpu.child import Process
from benchmarks.gpu.kernels import REHEARSED
from benchmarks.gpu.race_child import about
from benchmarks.gpu.steps import STEPS
from benchmarks.pods.names import PLAIN
from benchmarks.pods.suite import STEPS as SUITE
from benchmarks.questions.asked import QUESTIONS
from benchmarks.questions.asked import STEPS as ASKED
from benchmarks.questions.model import KEPT, abstract_args, make_step
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.cost.adjusted_tables import cluster_here
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.model import CostModel
from jaxoverlap.cost.tables import Here, InAStep, replace
from jaxoverlap.hardware.topology import chip_of

_RUNS = 3
_FILLED, _PIECES = 0.4, 32  # of the device's memory with random numbers, in so many arrays


def kernels(here: Process, *, step: str, row: str, hosts_x_gpus: str) -> None:
    """Send the row of a step: kernels' seconds by kind, measured and simulated, and memory."""
    here.send("device", **about())
    here.send("doing", row=row, what="compiling")
    function, args, mesh = _built(step)
    cost, pod = _prices(mesh, hosts_x_gpus)
    options: dict[str, Any] = dict(never_slower=False)
    options |= dict(cluster=pod) if pod else {}
    ours: Any = jaxoverlap.overlap(function, **options) if row != "plain" else function
    compiled = ours.lower(*args).compile()
    memory = compiled.memory_analysis()
    here.send("doing", row=row, what="running")
    _fill()
    values = jax.tree.map(_random, args)
    found = jaxoverlap.profile(compiled, *values, steps=_RUNS, cluster=cost)
    simulation = jaxoverlap.simulate(compiled, cost)
    ratios = [r for r in found.ratios if r.kind in ("matmul", "attention", "memory")]
    used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    here.send(
        "row",
        row=row,
        pod=str(cost.cluster),
        kinds=[[r.kind, r.instructions, r.measured_s, r.predicted_s] for r in ratios],
        measured_s=found.sums.compute_s,
        step_s=found.sums.step_s,
        simulated_s=simulation.compute_s,
        peak_bytes=peak_bytes(memory),
        used_bytes=used,
        unknown=list(simulation.unknown),
    )


def _built(step: str) -> tuple[Any, Any, Mesh]:
    """Return a jitted step, its arguments' shapes, and its mesh of all devices."""
    if step == REHEARSED:
        make, _, small = STEPS["FSDP"]
        built = make(small, "float32")
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), built.args
        )
        return built.step, like, jax.tree.leaves(like)[0].sharding.mesh
    if step in SUITE:
        mesh = _mesh(SUITE[step].axes)
        return *SUITE[step].build(PLAIN, mesh), mesh
    question, mesh_name = ASKED[step]
    asked = QUESTIONS[question]
    mesh = _mesh(asked.meshes[mesh_name], explicit=asked.explicit)
    function = make_step(asked.model, mesh, KEPT["dots + attention"])
    return function, abstract_args(asked.model, mesh), mesh


def _mesh(axes: dict[str, int], *, explicit: bool = False) -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices(), dtype=object).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def _prices(mesh: Mesh, hosts_x_gpus: str) -> tuple[CostModel, str]:
    """Return the prices of so many of the chip that is here, and their name for overlap()."""
    chip = chip_of(mesh)
    if chip is not None:
        pod = f"{chip.name}:{hosts_x_gpus}/{hosts_x_gpus.partition('x')[2]}"
        return cost_model(pod), pod
    if mesh.devices.flat[0].platform != "cpu":
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(f"no cost table has {kind}: expected a chip of jaxoverlap's tables")
    tables = cost_model("h100-sxm:1x8").tables  # in a rehearsal any prices do
    tables = replace(tables, chip="cpu", here=Here(mesh.size, "cpu", "", InAStep()))
    assert tables.here
    return CostModel(cluster_here(tables, tables.here), tables), ""


def _fill() -> None:
    """Leave random numbers in the device's free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:  # CPU devices have no such limit
        return
    size = int(_FILLED * stats["bytes_limit"]) // 2 // _PIECES
    draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (size,), jnp.bfloat16))
    device = jax.local_devices()[0]
    pieces = [draw(jax.device_put(np.uint32(seed), device)) for seed in range(_PIECES)]
    jax.block_until_ready(pieces)


def _random(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random values of this process's devices; of integers, small ones."""

    def part(index: Any) -> np.ndarray:
        shape = [len(range(*dim.indices(n))) for dim, n in zip(index, like.shape, strict=True)]
        generator = np.random.default_rng(0)
        if jnp.issubdtype(like.dtype, jnp.integer):
            return generator.integers(0, 256, shape).astype(like.dtype)
        return ((generator.random(shape, np.float32) - 0.5) * 0.04).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, part)
