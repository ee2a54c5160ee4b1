"""benchmarks/strangers judges its runs; none of the strangers is needed, nor installed."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.strangers import rows
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.child import numbers
from benchmarks.strangers.stranger import Stranger, fill, tokens

NUMBERS = {
    "case": "their trainer", "what": "numbers", "mesh": {"fsdp": 2, "tp": 4},
    "losses": [2.0, 1.0], "loss_difference": 1e-7, "gradients": 3, "gradients_zero": 0,
    "gradient_difference": 2e-6, "worst_gradient": ".mu['w']", "state_difference": 3e-6, "worst_state": "['w']",
    "sites": 9, "ringed": 5, "no_collective": 1, "skips": {"a | b": 2, "other": 1},
}  # fmt: skip
HOPS = {"count": 8, "covered": 7, "bytes_moved": 0, "bytes_covered": 0, "synchronous": 0}
ALL = {**HOPS, "bytes_moved": 2_000_000_000, "bytes_covered": 500_000_000}
POD = {"case": "their trainer", "mesh": {"fsdp": 2, "tp": 4}, "all": ALL, "hops": HOPS}
PLAIN = {**POD, "what": "plain", "temp_bytes": 100, "compile_s": 20.4}
RINGED = {
    **{name: NUMBERS[name] for name in ("sites", "ringed", "no_collective", "skips")},
    **POD, "what": "overlapped", "temp_bytes": 150, "compile_s": 31.0,
}  # fmt: skip
PICTURE = {"case": "their trainer", "what": "picture", "same": 8, "joined": 1, "unread": 0}
HALVED = {**NUMBERS, "what": "halves", "parts": 2}
FAILED = {"case": "another", "what": "numbers", "error": "exit 1: ValueError: no"}


# -- comparing ------------------------------------------------------------------------------------


def test_differences_are_of_norms():
    assert rows.difference([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)
    assert rows.difference([0.0], [0.0]) == 0.0
    assert rows.difference([0.0], [1.0]) == float("inf")
    assert np.isnan(rows.difference([1.0], [float("nan")]))


def test_gradients_are_adams_first_moments():
    plain = {".mu['a']": [1.0], ".mu['b']": [0.0], "['mul']['a']": [2.0]}
    other = {".mu['a']": [1.5], ".mu['b']": [0.0], "['mul']['a']": [2.5]}
    comparison = rows.compare(
        {"losses": [1.0, 2.0], "state": plain}, {"losses": [1.0, 2.2], "state": other}
    )
    assert comparison["loss_difference"] == pytest.approx(0.1)
    assert (comparison["gradient_difference"], comparison["worst_gradient"]) == (0.5, ".mu['a']")
    assert (comparison["gradients"], comparison["gradients_zero"]) == (2, 1)
    assert (comparison["state_difference"], comparison["worst_state"]) == (0.25, "['mul']['a']")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"loss_difference": 1e-3}, "loss is 1.0e-03 off"),
        ({"gradient_difference": float("nan")}, "gradient .mu['w'] is nan off"),
        ({"state_difference": float("inf")}, "state ['w'] is inf off"),
        ({"gradients_zero": 2}, "2 of 3 gradients are zero"),
        ({"ringed": 0}, "no matmul is ringed"),
        ({"what": "halves", "parts": 2}, None),
        ({"what": "halves", "parts": 0}, "its rows are not cut"),
    ],
)
def test_what_numbers_have_to_keep(change, problem):
    what = change.get("what", "numbers")
    expected = [f"their trainer: {what}: {problem}"] if problem else []
    assert rows.shortfalls({**NUMBERS, **change}) == expected


def test_what_schedules_have_to_keep():
    assert rows.shortfalls(PLAIN) == rows.shortfalls(RINGED) == []
    late = {**RINGED, "hops": {**HOPS, "synchronous": 3}}
    assert rows.shortfalls(late) == ["their trainer: overlapped: 3 hops are synchronous"]
    assert rows.shortfalls({**PICTURE, "otherwise": ["3 a.py:1: 0.5 times the work"]}) == [
        "their trainer: picture: XLA does otherwise: 3 a.py:1: 0.5 times the work"
    ]
    assert rows.shortfalls(FAILED) == ["another: numbers failed: exit 1: ValueError: no"]


def test_errors_name_no_folder():
    stderr = "Traceback\n  somewhere\njax.errors.SomeError: /home/me/x/lib.py:3: no\nmore of it\n"
    assert rows.error_of(1, stderr) == "exit 1: jax.errors.SomeError: lib.py:3: no more of it"
    assert rows.error_of(-6, "F1121 /a/b/c.cc:12] Check failed: a/b\n\n") == (
        "exit -6: F1121 c.cc:12] Check failed: a/b"
    )
    assert rows.error_of(-9, "") == "exit -9: "


# -- how rows read --------------------------------------------------------------------------------


def test_a_line_for_each_case():
    picture = {**PICTURE, "otherwise": ["3 a.py:1: 0.5 times the work"]}
    first, second = rows.table_cells([NUMBERS, PLAIN, RINGED, picture, HALVED, FAILED])
    assert dict(zip(rows.COLUMNS, first, strict=True)) == {
        "step": "their trainer", "mesh": "fsdp 2 x tp 4",
        "matmuls": "9", "ringed": "5", "none": "1", "skipped": "3",
        "loss": "1.0e-07", "gradient": "2.0e-06", "state": "3.0e-06",
        "hops covered": "7 of 8", "GB covered": "0.50 of 2.00", "plain: GB covered": "0.50 of 2.00",
        "temp": "1.50 x", "compile s": "31 (20)", "as XLA does": "8 of 9", "in halves": "3.0e-06",
    }  # fmt: skip
    assert second == ["another", *[""] * (len(rows.COLUMNS) - 1)]


def test_markdown_has_as_many_cells_in_every_line():
    text = rows.markdown([NUMBERS, PLAIN, RINGED, FAILED])
    table, reasons = text.split("\n\n")
    assert {line.count("|") for line in table.splitlines()} == {len(rows.COLUMNS) + 1}
    assert table.splitlines()[1].startswith("| --- | --- | ---: |")
    assert reasons.splitlines() == [
        "- their trainer: 2 skipped: a | b",
        "- their trainer: 1 skipped: other",
    ]
    assert rows.markdown([FAILED]).endswith("|\n")


# -- a stranger of our own ------------------------------------------------------------------------


def test_cases_can_be_told_apart():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(np.prod(list(case.axes.values())) == 8 for case in CASES)


def test_states_are_filled_where_gradients_flow():
    tree = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "norm": {"scale": jnp.zeros(8)}}
    tree |= {"opt": {"mu": jnp.zeros(8)}, "step": jax.ShapeDtypeStruct((), np.int32)}
    whole = jax.tree.map(lambda _: NamedSharding(jax.make_mesh((8,), ("d",)), P()), tree)
    filled = fill(tree, whole, real=False)
    assert 0.01 < np.std(filled["w"]) < 0.1
    assert np.mean(filled["norm"]["scale"]) == pytest.approx(1, abs=0.1)
    assert not np.any(filled["opt"]["mu"]) and filled["step"] == 0
    assert isinstance(fill(tree, whole, real=True)["w"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize(("halves", "parts"), [("auto", 0), (2, 2)])
def test_numbers_of_a_step(halves: Any, parts: int):
    row = numbers(tiny, halves)
    assert row["parts"] == parts
    assert row["ringed"] == row["sites"] - row["no_collective"] > 0
    assert row["losses"][-1] < row["losses"][0]
    assert rows.shortfalls({"case": "tiny", "what": "numbers", **row}) == []
    json.dumps(row)


def tiny() -> Stranger:
    """Return a stranger of two linear layers, sharded as Megatron does it."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    adam = optax.adam(1e-2)
    split = NamedSharding(mesh, P("data", "model"))

    @jax.jit
    def step(state: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            x = lax.with_sharding_constraint(jnp.sin(ids[..., None] * jnp.arange(1, 17)), split)
            x = lax.with_sharding_constraint(x @ params["up"] @ params["down"], split)
            return jnp.mean((x - 1) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = adam.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": moments}, value

    specs = {"up": P(None, "model"), "down": P("model")}
    params = {"up": jnp.zeros((16, 32)), "down": jnp.zeros((32, 16))}
    shapes = {"params": params, "opt": adam.init(params)}
    at = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes)
    at["params"] = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    ids = tokens((8, 16), 50, NamedSharding(mesh, P("data")), real=False)
    return Stranger(
        step=step,
        args=(fill(shapes, at, real=False), ids),
        after=lambda out: (out[1], out[0]),
        carried=lambda out: (out[0], ids),
    )


def test_layers_that_were_given_a_matmul_are_told_apart():
    ruled = {**POD, "what": "ruled"}
    given = {**NUMBERS, "what": "by_rules"}
    del given["ringed"]
    assert rows.shortfalls(given) == [] and rows.shortfalls(ruled) == []
    late = {**ruled, "hops": {**HOPS, "synchronous": 3}}
    assert rows.shortfalls(late) == ["their trainer: ruled: 3 hops are synchronous"]
    assert rows.by_rules([PLAIN, given, ruled]) == [
        "their trainer by rules: 3.0e-06 from plain",
        "their trainer by rules: 7 of 8 hops covered, 0.50 of 2.00 GB",
    ]
