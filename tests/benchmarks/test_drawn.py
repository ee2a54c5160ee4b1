"""benchmarks/drawn draws steps and judges their rows; one of them runs on CPU devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import AxisType, Mesh

from benchmarks.drawn import child, trainer
from benchmarks.drawn.__main__ import HELD_BACK, SEEDS, names
from benchmarks.drawn.drawing import CHIPS, PLACES, draw, rough_bytes
from benchmarks.drawn.named import NAMED
from benchmarks.drawn.rows import (
    FALLBACK,
    LARGE,
    OVERLAPPED,
    PLAIN,
    UNRINGED,
    compared,
    table,
    verdicts,
)
from benchmarks.drawn.sketch import Sketch, layer_shapes, place_spec, weight_spec
from benchmarks.drawn.step import Step
from benchmarks.drawn.steps import drawn_name, step_of
from benchmarks.frame import rows_in, write_rows
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

DRAWN = [draw(seed) for seed in (*SEEDS, *HELD_BACK)]

# -- drawing --------------------------------------------------------------------------------------


def test_a_seed_gives_one_sketch():
    assert [draw(seed) for seed in SEEDS] == DRAWN[: len(SEEDS)]
    kinds = {repr(dataclasses.replace(sketch, seed=0)) for sketch in DRAWN}
    assert len(kinds) == len(SEEDS) + len(HELD_BACK)


def test_steps_are_of_all_kinds():
    pods = [parse_cluster(sketch.pod) for sketch in DRAWN]
    assert {pod.chip.name for pod in pods} == set(CHIPS)
    assert {pod.num_hosts for pod in pods} == {1, 2, 4, 8}
    meshes = {tuple(sketch.axes) for sketch in DRAWN}
    assert meshes == {
        *[("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp")],
        ("dp", "fsdp", "tp"),
    }
    assert {sketch.layers for sketch in DRAWN} == set(range(2, 9))
    for kind in ("scan", "gated", "attention", "remat", "optimizer", "stream", "stated", "loss"):
        assert len({getattr(sketch, kind) for sketch in DRAWN}) >= 2, kind


@pytest.mark.parametrize("sketch", DRAWN[: len(SEEDS)], ids=lambda sketch: str(sketch.seed))
def test_meshes_and_shapes_fit(sketch: Sketch):
    pod = parse_cluster(sketch.pod)
    assert math.prod(sketch.axes.values()) == pod.num_devices
    assert rough_bytes(sketch) < pod.chip.memory_bytes
    assert sketch.hidden % sketch.heads == 0 and sketch.heads % sketch.kv_heads == 0
    assert sketch.kv_heads % sketch.axes.get("tp", 1) == 0
    mesh = jax.sharding.AbstractMesh(tuple(sketch.axes.values()), tuple(sketch.axes))
    for leaf in jax.tree.leaves(trainer.abstract_args(sketch, mesh)):  # type: ignore[arg-type]
        leaf.sharding.shard_shape(leaf.shape)  # raises where a dim does not divide
    for name, shape in layer_shapes(sketch).items():
        assert len(weight_spec(sketch, name, shape)) == len(shape)


# -- a step ---------------------------------------------------------------------------------------

SMALL = dataclasses.replace(
    draw(0),
    pod="h100-sxm:1x8",
    axes={"fsdp": 4, "tp": 2},
    layers=2,
    hidden=32,
    mlp=64,
    gated=True,
    parallel=False,
    heads=4,
    kv_heads=2,
    sequence=16,
    batch=4,
    vocab=64,
    scan=True,
    remat="none",
    optimizer="sgd",
    stream="sequence",
    constrained=("stream",),
    layout="megatron",
    dtype="float32",
    stated="nothing",
    donate=False,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "einsum", "projection": "headwise", "loss": "take", "tied": True},
        {"attention": "none", "vocab": 0, "scan": False, "constrained": ()},
    ],
    ids=lambda changes: changes["attention"],
)
def test_a_small_model_computes_what_it_computes_on_one_device(changes: dict[str, Any]):
    sketch = dataclasses.replace(SMALL, **changes)
    losses = []
    for shape in ((4, 2), (1, 1)):
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        mesh = Mesh(devices, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
        weights, _, *batch = _values(trainer.abstract_args(sketch, mesh))
        pin = trainer.Pin(mesh, sketch)
        loss = jax.jit(functools.partial(trainer.loss_of, sketch=sketch, pin=pin))
        losses.append(float(loss(weights, *batch)))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # matmuls are in bfloat16
    assert 0 < losses[0] < 100


def test_a_small_step_lowers_its_loss():
    sketch = dataclasses.replace(SMALL, attention="none", vocab=0, scan=False, dtype="float32")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2)
    built = trainer.build(sketch, mesh)
    args = _values(built.args)
    weights, state, first = built.function(*args)
    *_, second = built.function(weights, state, *args[2:])
    assert float(second) < float(first)


def _values(args: Any) -> Any:
    """Return random values of these shapes, in these places."""
    rng = np.random.default_rng(0)

    def value(x: jax.ShapeDtypeStruct) -> jax.Array:
        integer = jnp.issubdtype(x.dtype, jnp.integer)
        numbers = rng.integers(0, 64, x.shape) if integer else rng.standard_normal(x.shape) * 0.1
        return jax.device_put(jnp.asarray(numbers, x.dtype), x.sharding)

    return jax.tree.map(value, args)


@marked(pods)
@pytest.mark.parametrize("kind", [PLAIN, OVERLAPPED])
def test_a_small_step_becomes_a_row(kind: str, monkeypatch: pytest.MonkeyPatch):
    changes = dict(attention="none", vocab=0, layers=1, hidden=512, mlp=1024, heads=4)
    sketch = dataclasses.replace(SMALL, pod="h100-sxm:1x2", axes={"fsdp": 1, "tp": 2}, **changes)
    build = functools.partial(trainer.build, sketch)
    step = Step("small", sketch.pod, sketch.axes, build)
    monkeypatch.setattr(child, "step_of", {"small": step}.__getitem__)
    measured_row = child.measured("small", kind)
    parts = measured_row["compute_s"] + measured_row["slowdown_s"] + measured_row["exposed_s"]
    assert measured_row["step_s"] == pytest.approx(parts) and not measured_row["unknown"]
    assert (
        measured_row["link_bytes"]["NVLink"] > 0
        and measured_row["kernels"]
        and measured_row["collectives"]
    )
    assert 0 < measured_row["peak_bytes"] < measured_row["chip_bytes"]
    assert ("rings" in measured_row) == (kind == OVERLAPPED)


def test_a_constrained_step_has_its_constraints():
    changes = {"attention": "einsum", "scan": False, "mixer": "none"}
    everywhere = dataclasses.replace(SMALL, constrained=PLACES, **changes)  # type: ignore[arg-type]
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2)
    for projection, extra in (("each", 2), ("headwise", 2), ("fused", 0)):
        sketch = dataclasses.replace(everywhere, projection=projection, kv_heads=4)
        counts = []
        for constrained in (PLACES, ()):
            built = trainer.build(dataclasses.replace(sketch, constrained=constrained), mesh)
            counts.append(
                str(built.function.trace(*built.args).jaxpr).count("sharding_constraint[")
            )
        # Each layer has the stream twice, the hidden layer twice, attended and qkv; the
        # embedding and the logits come once; the backward pass has all of them again.
        assert counts == [2 * (2 * (6 + extra) + 2), 0]


def test_places_are_constrained_over_axes_that_there_are():
    for sketch in DRAWN:
        for place in sketch.constrained:
            names = jax.tree.leaves(tuple(place_spec(sketch, place)))
            assert set(names) <= set(sketch.axes)


# -- names ----------------------------------------------------------------------------------------


def test_steps_are_found_by_name():
    assert step_of("drawn-3").about == draw(3).about()
    assert set(NAMED) >= {LARGE, "dense, whole stream", "one constraint, 7B"}
    for step in NAMED.values():
        assert math.prod(step.axes.values()) == parse_cluster(step.pod).num_devices
    for name in ("drawn-", "drawn-x", "7"):
        with pytest.raises(ValueError, match=f"step '{name}': expected dense"):
            step_of(name)


def test_the_whole_benchmark_is_the_named_steps_and_forty():
    assert names("", False) == [*NAMED, *[drawn_name(seed) for seed in range(40)]]
    assert names("3:5", False) == ["drawn-3", "drawn-4"]
    assert not set(names("", True)) & set(names("", False))
    with pytest.raises(typer.BadParameter, match="expected FIRST:END"):
        names("3", False)


def test_rows_that_are_not_measured_again_stay(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    assert rows_in(file) == {}
    write_rows(file, [row("one", PLAIN, 1.0), row("one", OVERLAPPED, 0.5)])
    assert rows_in(file)["one", OVERLAPPED]["step_s"] == 0.5 and len(rows_in(file)) == 2


# -- rows -----------------------------------------------------------------------------------------


def row(step: str, kind: str, step_s: float, **more: Any) -> dict[str, Any]:
    seconds = dict(step_s=step_s, compute_s=step_s / 2, exposed_s=step_s / 2)
    moved = dict(link_bytes={"NVLink": 2e9, "network": 1e9}, peak_bytes=10**9, chip_bytes=8e10)
    where = dict(pod="h100-sxm:1x8", mesh={"tp": 8}, unknown={})
    return {"step": step, "row": kind, **where, **seconds, **moved, **more}


def suite(*ratios: float, fallback: float = 1.0) -> list[dict[str, Any]]:
    """Return rows of steps that are so many times as slow as plain."""
    of = {PLAIN: 1.0, FALLBACK: fallback}
    return [
        row(f"drawn-{i}", kind, 0.1 * times)
        for i, ratio in enumerate(ratios)
        for kind, times in (of | {OVERLAPPED: ratio}).items()
    ]


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    return verdicts(compared(rows))[1]


def test_steps_that_gain_are_no_shortfall():
    said, short = verdicts(compared(suite(*[0.9] * 20)))
    assert not short
    assert said[0] == "overlapped: 0 of 20 slower than plain; 0.900 on average"


def test_one_in_twenty_may_be_a_little_slower():
    assert not shortfalls(suite(1.029, *[0.9] * 19))
    assert shortfalls(suite(1.031, *[0.9] * 19)) == [
        "drawn-0, overlapped: 1.031 times plain's time"
    ]
    short = shortfalls(suite(1.02, 1.02, *[0.9] * 18))
    assert short == ["overlapped: 2 of 20 steps are slower than plain"]


def test_with_the_fallback_none_may_be_slower():
    short = shortfalls(suite(*[0.9] * 20, fallback=1.001))
    assert "drawn-0, never slower: 1.001 times plain's time" in short
    assert len(short) == 21
    assert not shortfalls(suite(*[0.9] * 20, fallback=1 + 0.9e-4))  # not told apart


def test_the_large_step_has_to_gain_and_may_not_move_more():
    rows = [row(LARGE, PLAIN, 1.0), row(LARGE, OVERLAPPED, 0.91)]
    assert shortfalls(rows) == [f"{LARGE}: 0.910 of plain's time, more than 0.9"]
    rows[1] |= {"step_s": 0.8, "link_bytes": {"network": 3.1e9}}
    assert shortfalls(rows) == [f"{LARGE}: moves 3.10 GB a GPU, plain 3.00"]


def test_what_did_not_compile_or_has_no_seconds_is_a_shortfall():
    rows = [row("one", PLAIN, 1.0), {**row("one", OVERLAPPED, 1.0), "error": "SIGABRT: no"}]
    assert shortfalls(rows) == ["one, overlapped: SIGABRT: no"]
    rows[1] = row("one", OVERLAPPED, 0.1, unknown={UNKNOWN_TRIPS: 1})
    assert shortfalls(rows)[0].startswith("one, overlapped: while without a known trip count")
    assert table(compared(rows)).row_count == 1


def test_the_table_has_a_line_a_step():
    more = dict(rings=3, slices=1, left_plain=0, skipped=2)
    rows = [row("one", PLAIN, 1.0), row("one", OVERLAPPED, 0.5, **more), row("two", PLAIN, 1.0)]
    rows += [row("one", UNRINGED, 0.7), row("one", FALLBACK, 0.5, taken="overlapped")]
    rich_table = table(compared(rows))
    assert rich_table.row_count == 2
    cells = {str(column.header): list(column.cells) for column in rich_table.columns}
    assert cells["taken"] == ["overlapped", ""]
    assert cells["ratio"] == ["0.500", ""] and cells["no rings"][0] == "700.0"
    assert cells["decided"][0] == "3 rings, 1 sliced, 2 skipped"
