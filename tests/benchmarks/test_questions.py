"""The questions: their steps compute what one device does, and their best rows answer them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from benchmarks.questions import __main__ as stages
from benchmarks.questions import answers
from benchmarks.questions.asked import QUESTIONS
from benchmarks.questions.fp8 import SCALES, fp8_einsum
from benchmarks.questions.measure import DEFAULTS, FREE_POLICY, OVERLAPPED, WITH_MEMORY
from benchmarks.questions.model import KEPT, Model, abstract_args, make_step
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from tests.support.seeds import some

QUESTION = "8B, 64 H100, 64 texts"
GB = 10**9
SMALL = Model(2, 64, 8, 128, 96, batch=16, sequence=32, kv_heads=4)
CASES = {
    "fsdp x tp": (SMALL, {"fsdp": 2, "tp": 4}),
    "context": (SMALL, {"fsdp": 2, "context": 4}),
    "experts": (replace(SMALL, experts=8, choices=2, mlp=32, room=None), {"fsdp": 2, "expert": 4}),
    "images": (replace(SMALL, pixels=12, vocab=10, gated=False), {"fsdp": 2, "tp": 4}),
    "micro-batches": (replace(SMALL, micro_batches=4), {"replica": 2, "fsdp": 2, "tp": 2}),
    "explicit": (SMALL, {"fsdp": 2, "tp": 4}),
}


def filled(args: Any) -> Any:
    """Return arrays of such shapes: small random numbers, tokens below ten."""
    random = np.random.default_rng(0)

    def leaf(like: Any) -> jax.Array:
        if like.dtype == jnp.int32:
            value = random.integers(0, 10, like.shape, np.int32)
        else:
            value = 0.1 * random.standard_normal(like.shape)
        return jax.device_put(np.asarray(value, like.dtype), like.sharding)

    weights, moments, *batch = args
    zero = jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), moments)
    return jax.tree.map(leaf, weights), zero, *map(leaf, batch)


@pytest.mark.rotating
@pytest.mark.parametrize("case", some(3, [*CASES]))
def test_a_sharded_step_is_one_devices(case: str):
    model, axes = CASES[case]
    kind = AxisType.Explicit if case == "explicit" else AxisType.Auto
    sharded = jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes))
    names = ("fsdp", "expert") if model.experts else ("fsdp",)
    one = jax.make_mesh(
        (1,) * len(names), names, (AxisType.Auto,) * len(names), devices=jax.devices()[:1]
    )
    results = []
    for mesh in (sharded, one):
        step = make_step(model, mesh, KEPT["dots"])
        with jax.set_mesh(mesh):
            _, moments, loss = step(*filled(abstract_args(model, mesh)))
        # Adam's first moments are a tenth of the clipped gradients.
        results.append((float(loss), jax.tree.leaves(optax.tree.get(moments, "mu"))))
    (loss, gradients), (alone, own) = results
    assert loss == pytest.approx(alone, rel=1e-2)
    for a, b in zip(gradients, own, strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) < 0.1 * np.linalg.norm(np.asarray(b))


def test_fp8_is_the_matmul_to_its_rounding_and_learns_its_scales():
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal((64, 64)), jnp.bfloat16) for _ in range(2))
    scales = jnp.full(SCALES, 0.02)

    def total(x, w, scales):
        return jnp.sum(fp8_einsum("bd,df->bf", x, w, scales).astype(jnp.float32) ** 2)

    def exact(x, w):
        return jnp.sum(jnp.einsum("bd,df->bf", x, w).astype(jnp.float32) ** 2)

    assert float(total(x, w, scales)) == pytest.approx(float(exact(x, w)), rel=0.02)
    new = jax.grad(total, 2)(x, w, scales)
    assert float(new[0]) == pytest.approx(float(jnp.max(jnp.abs(x))) / 448, rel=1e-3)
    scales = jnp.array([*new[:2], new[2]])
    for got, wanted in zip(
        jax.grad(total, (0, 1))(x, w, scales), jax.grad(exact, (0, 1))(x, w), strict=True
    ):
        off = jnp.linalg.norm((got - wanted).astype(jnp.float32))
        assert float(off / jnp.linalg.norm(wanted.astype(jnp.float32))) < 0.15


def test_model_flops_are_six_a_weight_and_token():
    model = Model(2, 64, 8, 128, 96, batch=4, sequence=32, kv_heads=4)
    matrices = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 96
    assert model.model_flops == 4 * 32 * (6 * matrices + 2 * 12 * 64 * 32 / 2)
    eight_b = QUESTIONS[QUESTION].model
    assert eight_b.weights == pytest.approx(8.03e9, rel=1e-3)
    assert QUESTIONS["70B, 64 H100, 64 texts"].model.weights == pytest.approx(70.6e9, rel=1e-2)
    assert QUESTIONS["Qwen3-30B-A3B, 64 H100, 128 texts"].model.weights == pytest.approx(
        30.5e9, rel=1e-2
    )


# -- stages and answers ---------------------------------------------------------------------------


def row(mesh: str, policy: str, options: str, step_s: float, **more: Any) -> dict[str, Any]:
    made = {"step": QUESTION, "mesh": mesh, "policy": policy, "options": options}
    made |= {"step_s": step_s, "peak_bytes": 10 * GB, "chip_bytes": 80 * GB, "model_s": 0.25}
    return made | {"compute_s": 0.4, "slowdown_s": 0.0, "exposed_s": 0.1} | more


def test_a_mesh_that_does_not_fit_is_tried_with_less_kept():
    wanted = list(stages.every_mesh(QUESTION, []))
    assert {policy for _, policy, _ in wanted} == {"dots + attention"}
    assert ("replica 8 x fsdp 8", "dots + attention", DEFAULTS) in wanted
    large = row("fsdp 64", "dots + attention", DEFAULTS, 0.5, peak_bytes=79 * GB)
    assert ("fsdp 64", "attention", DEFAULTS) in list(stages.every_mesh(QUESTION, [large]))


def test_stages_go_on_with_the_fastest():
    rows = [
        row("fsdp 64", "dots + attention", DEFAULTS, 0.5),
        row("fsdp 32 x tp 2", "dots + attention", DEFAULTS, 0.6),
        row("fsdp 16 x tp 4", "dots + attention", DEFAULTS, 0.7),
        row("replica 8 x fsdp 8", "dots + attention", DEFAULTS, 0.1, peak_bytes=79 * GB),
    ]
    assert [mesh for mesh, *_ in stages.every_policy(QUESTION, rows)] == ["fsdp 64"] * len(KEPT)
    others = [row("fsdp 64", one, DEFAULTS, 0.55) for one in KEPT if one != "dots + attention"]
    assert list(stages.every_policy(QUESTION, [*rows, *others]))[len(KEPT) :] == [
        ("fsdp 32 x tp 2", "dots + attention", DEFAULTS),
        ("fsdp 32 x tp 2", "full", DEFAULTS),
    ]
    rows += [row("fsdp 32 x tp 2", "full", "O1", 0.49)]
    assert list(stages.overlapped(QUESTION, rows)) == [
        ("fsdp 32 x tp 2", "full", OVERLAPPED),
        ("fsdp 32 x tp 2", FREE_POLICY, WITH_MEMORY),
        ("fsdp 64", FREE_POLICY, WITH_MEMORY),
    ]


def test_the_best_without_and_with_are_over_all_rows_that_fit():
    rows = [
        row("fsdp 64", "dots", DEFAULTS, 0.5),
        row("fsdp 64", "full", "O1", 0.45),
        row("fsdp 64", "dots", "O1", 0.4, peak_bytes=79 * GB),
        row("fsdp 64", "full", OVERLAPPED, 0.42),
        row("fsdp 32 x tp 2", FREE_POLICY, WITH_MEMORY, 0.3),
        row("fsdp 64", "full", "gpu-recipes", 0.1, unknown={UNKNOWN_TRIPS: 1}),
        {"step": QUESTION, "mesh": "fsdp 64", "policy": "full", "options": "x", "error": "stopped"},
    ]
    assert answers.table(rows) == [
        (
            QUESTION,
            *("fsdp 64; all recomputed; O1", "450", f"{8192 / 0.45:.0f}"),
            *(f"fsdp 32 x tp 2; {WITH_MEMORY}", "300", f"{8192 / 0.3:.0f}"),
            *("83%", "10", "1.50"),
        )
    ]
    assert answers.summary(rows) == [
        f"1.50 times as fast in geometric mean over 1 questions; the least is 1.50 ({QUESTION})."
    ]
    assert answers.without_figure(rows) == (
        "No figure, so not among the answers: "
        f"{QUESTION}, gpu-recipes ({UNKNOWN_TRIPS}); {QUESTION}, x (stopped)."
    )
    assert answers.without_figure(rows[:2]) == ""
    assert [cells[2] for cells in answers.parts(rows)] == ["450", "300"]
