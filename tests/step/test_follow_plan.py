"""`overlap(plan=)` makes the same step again from a plan, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, MadeFor, Plan, Scheduler, Skip, Variant, overlap
from jaxoverlap.api import Overlapped
from jaxoverlap.passes.analysis.fingerprint import fingerprint
from jaxoverlap.plan.edits import (
    DropTypes,
    GatherAhead,
    MakeRing,
    Pin,
    PinResults,
    ScatterLookup,
    SplitBatch,
    in_order,
)
from jaxoverlap.step import check_plan as made
from jaxoverlap.tuning.candidates import with_variants
from tests.golden.facts import counted
from tests.support.pods import needs_plugin
from tests.support.seeds import some

SHAPE, AXES = (2, 4), ("data", "model")
MESH = jax.make_mesh(SHAPE, AXES, axis_types=(AxisType.Auto,) * 2)
BATCH, SEQ, HIDDEN, FF, LAYERS = 4, 16, 32, 64, 2
SPECS = {
    "q": P(None, "data", "model"),
    "k": P(None, "data", "model"),
    "o": P(None, "model", "data"),
}


def at(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def block(mesh: Mesh, x, w):
    columns, rows = at(mesh, "data", None, "model"), at(mesh, "data", "model")
    q = lax.with_sharding_constraint(x @ w["q"], columns)
    k = lax.with_sharding_constraint(x @ w["k"], columns)
    return x + lax.with_sharding_constraint(jax.nn.relu(q) * k @ w["o"], rows)


Q_LINE, O_LINE = (f"step/{Path(__file__).name}:{block.__code__.co_firstlineno + n}" for n in (2, 4))


def loss(mesh: Mesh, w, x):
    x, _ = lax.scan(lambda x, w: (block(mesh, x, w), None), x, w)
    return jnp.mean(x * x)


def train_step(mesh: Mesh = MESH):
    """Return a sequence-parallel step with FSDP: a scan of gathers that two share, and scatters."""
    return jax.jit(jax.value_and_grad(partial(loss, mesh)))


def arguments(mesh: Mesh = MESH, **sizes: int) -> tuple[dict[str, Any], Any]:
    batch, dtype = sizes.get("batch", BATCH), jnp.float32
    shapes = {"q": (HIDDEN, FF), "k": (HIDDEN, FF), "o": (FF, HIDDEN)}
    w = {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), dtype, sharding=at(mesh, *SPECS[name]))
        for name, shape in shapes.items()
    }
    x = at(mesh, "data", "model")
    return w, jax.ShapeDtypeStruct((batch, SEQ, HIDDEN), dtype, sharding=x)


def arrays() -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jax.device_put(rng.standard_normal(s.shape).astype("f") / 6, s.sharding),
        arguments(),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    # JAX caches the traces of inner functions with the line that called them first: a test of
    # another file that ran before in this process would lend this plan its lines.
    jax.clear_caches()
    return overlap(train_step()).explain(*arguments())


def program(step: Overlapped, *args: Any) -> str:
    """Return the fingerprint of the rewritten step."""
    return fingerprint(step.trace(*args).jaxpr)


def same_again(tmp_path: Path, first: Overlapped, *args: Any) -> Plan:
    """Return a step's plan, once it went through a file and made the same program again."""
    plan = first.explain(*args)
    plan.write(tmp_path / "plan.json")
    second = overlap(first._fn, plan=tmp_path / "plan.json")
    assert second.explain(*args) == plan
    assert program(second, *args) == program(first, *args)
    return plan


# -- round trips ----------------------------------------------------------------------------------

OPTIONS = {
    "as it is": {},
    "a variant": dict(granularity="two_way x 2"),
    "rings for weights": dict(fsdp="ring", granularity="direct"),
    "a line left alone": dict(skip=[O_LINE]),
    "a line plain": dict(granularity={Q_LINE: "plain"}),
    "a cluster, whose prices leave rings alone": dict(cluster="h100-sxm:1x8", halves=None),
    "a cluster, and slices between its hosts": dict(cluster="h100-sxm:4x2", halves=None),
    "halves": dict(halves=2),
    "halves by price": dict(cluster="h100-sxm:4x2"),
}


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_step_comes_out_again(tmp_path, options):
    plan = same_again(tmp_path, overlap(train_step(), **options), *arguments())
    assert len(plan.entries) == (18 if plan.split else 9)
    if "skip" in options or isinstance(options.get("granularity"), dict):
        assert any(skip.chosen for skip in plan.skips) and plan.decisions
    if "cluster" in options and "halves" in options:
        assert any("more than matmul" in s.reason for s in plan.skips)
    if not plan.pins and options.get("fsdp") == "ring":
        assert not any(isinstance(edit, GatherAhead) for edit in plan.edits)


def test_a_compiled_steps_plan_goes_back_too(tmp_path):
    first = overlap(train_step(), granularity="two_way")
    compiled = first.lower(*arguments()).compile()
    assert compiled.plan is not None
    compiled.plan.write(tmp_path / "plan.json")
    second = overlap(train_step(), plan=str(tmp_path / "plan.json"))
    w, x = arrays()
    for got, expected in zip(*map(jax.tree.leaves, (second(w, x), compiled(w, x))), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_sums_that_stay_scattered(tmp_path):
    def mlp(ws, x):
        for up, down in ws:
            x = x + jax.nn.relu(jnp.sin(x) @ up) @ down
        return jnp.sum(x * x)

    up = jax.ShapeDtypeStruct((HIDDEN, FF), "float32", sharding=at(MESH, None, "model"))
    down = jax.ShapeDtypeStruct((FF, HIDDEN), "float32", sharding=at(MESH, "model"))
    x = jax.ShapeDtypeStruct((BATCH, SEQ, HIDDEN), "float32", sharding=at(MESH, "data"))
    step, args = jax.jit(jax.grad(mlp)), ([(up, down)] * 2, x)
    plan = same_again(tmp_path, overlap(step), *args)
    scattered = [d for d in plan.decisions if "an all-reduce, scattered" in d.why]
    assert scattered and all(d.axis == "model" for d in scattered)


@pytest.mark.parametrize("variant", [None, "two_way", "sliced x 2"])
def test_manual_code(tmp_path, variant):
    def body(x, w, v):
        x = lax.all_gather(x, "model", axis=0, tiled=True)
        return lax.psum_scatter(jnp.sin(x @ w) @ v, "model", scatter_dimension=0, tiled=True)

    rows = P("model")
    step = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=(rows, P(), P()), out_specs=rows))
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=at(MESH, *spec))
        for shape, spec in (((64, 32), ("model",)), ((32, 16), ()), ((16, 8), ()))
    ]
    plan = same_again(tmp_path, overlap(step, granularity=variant), *args)
    assert [type(e) for e in plan.entries] == [Decision, Decision]
    # One ring left out, and the other in another way.
    first, second = plan.rings
    direct = msgspec.structs.replace(second, variant=Variant("direct"))
    changed = [direct if e is second else e for e in plan.edits if e is not first]
    chosen = same_again(tmp_path, overlap(step, plan=with_edits(plan, changed)), *args)
    left, ring = chosen.entries
    assert isinstance(left, Skip) and left.reason == "not ringed: by the plan" and left.chosen
    assert isinstance(ring, Decision) and ring.variant == Variant("direct")
    elsewhere = msgspec.structs.replace(first, written=99)
    misplaced = [elsewhere if e is first else e for e in plan.edits]
    said = refused(with_edits(plan, misplaced), step, *args)
    assert "no collective of the user's is next to these matmuls" in said


def test_explicit_meshes(tmp_path):
    mesh = jax.make_mesh(SHAPE, AXES, axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=at(mesh, "model", None))
    w = jax.ShapeDtypeStruct((32, 64), "float32", sharding=at(mesh, None, "model"))
    step = jax.jit(lambda x, w: jax.reshard(x, at(mesh, None, None)) @ w)
    plan = same_again(tmp_path, overlap(step), x, w)
    assert len(plan.decisions) == 1
    assert plan.made_for and plan.made_for.axis_types == {"data": "Explicit", "model": "Explicit"}


def test_the_line_of_a_matmul_may_move(plan):
    """The plan shows the line where the matmul is now."""
    moved = [msgspec.structs.replace(e, source="elsewhere.py:1") for e in plan.entries]
    again = overlap(
        train_step(), plan=msgspec.structs.replace(plan, entries=tuple(moved), step="other")
    ).explain(*arguments())
    assert again == plan


def test_arguments_of_any_kind():
    """Arrays on the mesh are traced with shardings in their types, those of the host without."""
    at_mesh = dict.fromkeys("qko", at(MESH, None, "data")), at(MESH, "data", "model")
    step = jax.jit(partial(loss, MESH), in_shardings=at_mesh)
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments())
    plan = overlap(step).explain(*abstract)
    host = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract)
    for given_args in (host, jax.device_put(host, at_mesh)):
        assert overlap(step, plan=plan).explain(*given_args) == plan


# -- edits by hand --------------------------------------------------------------------------------

_rings = st.sampled_from(["plain", "one_way", "two_way", "direct x 2", "sliced x 2"])


def with_edits(plan: Plan, edits: Any) -> Plan:
    return msgspec.structs.replace(plan, edits=tuple(edits))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return jax.tree.leaves(train_step()(*arrays()))


@settings(max_examples=6, deadline=None)
@given(names=st.lists(_rings, min_size=9, max_size=9), fsdp=st.sampled_from(["prefetch", "ring"]))
def test_rings_in_any_way_compute_the_same(tmp_path_factory, expected, names, fsdp):
    step = train_step()
    plan = overlap(step, fsdp=fsdp).explain(*arguments())
    ways = {ring.site: Variant.parse(names[ring.site]) for ring in plan.rings}
    changed = with_variants(plan, ways)
    followed = overlap(step, plan=changed)
    again = same_again(tmp_path_factory.mktemp("plan"), followed, *arguments())
    assert {r.site: r.variant for r in again.rings} == {
        site: way for site, way in ways.items() if way.style != "plain"
    }
    for entry in again.entries:
        if isinstance(entry, Decision) and entry.num_chunks > 1:
            assert entry.variant == ways[entry.ring]
    got = jax.tree.leaves(followed(*arrays()))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_following_a_plan_asks_xla_nothing(plan):
    with counted() as questions:
        overlap(train_step(), plan=plan).lower(*arguments())
    assert questions == []


def test_a_way_is_for_the_whole_ring(plan):
    ring = next(r for r in plan.rings if len(r.matmuls) == 2)
    for name in ("two_way", "plain"):
        changed = with_variants(plan, {ring.site: Variant.parse(name)})
        entries = overlap(train_step(), plan=changed).explain(*arguments()).entries
        for matmul in ring.matmuls:
            entry = entries[matmul.site]
            if isinstance(entry, Decision):
                assert name == "two_way" and str(entry.variant) == name
            else:
                assert name == "plain" and entry.reason == "not ringed: by the plan"


# -- refusals -------------------------------------------------------------------------------------


def refused(plan: Plan, step: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        overlap(step, plan=plan, **options).explain(*args)
    return str(caught.value)


def test_another_step_is_refused_with_its_first_matmuls(plan):
    def fewer(w, x):
        return jnp.sum(block(MESH, x, jax.tree.map(lambda leaf: leaf[0], w)))

    said = refused(plan, jax.jit(fewer), *arguments())
    assert "the plan was made for something else than fewer as it is here; this differs:" in said
    assert (
        f"matmul 0: the plan's abc,cd->abd x 2 ({Q_LINE}), here abc,cd->abd x 1 ({Q_LINE})" in said
    )
    assert "and 6 matmuls more" in said
    assert "Tune again" in said


def test_another_formula_between_the_matmuls_is_refused(plan):
    step = jax.jit(jax.value_and_grad(lambda w, x: 2 * loss(MESH, w, x)))
    said = refused(plan, step, *arguments())
    assert "the step, though not its matmuls, arguments or results: the plan's " in said


def test_other_arguments_are_refused_by_name(plan):
    said = refused(plan, train_step(), *arguments(batch=8))
    assert (
        "argument x: the plan's float32[4@data, 16@model, 32], here float32[8@data, 16@model, 32]"
        in said
    )
    w, x = arguments()
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at(MESH, "data"))
    said = refused(plan, train_step(), w, whole)
    assert (
        "argument x: the plan's float32[4@data, 16@model, 32], here float32[4@data, 16, 32]" in said
    )
    said = refused(plan, train_step(), w, jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert "here float32[4, 16, 32], anywhere" in said
    placed = jax.jit(train_step(), out_shardings=(at(MESH), dict.fromkeys("qko", at(MESH))))
    assert "result 1: the plan's float32[2, 32, 64], anywhere" in refused(plan, placed, w, x)


def test_another_mesh_is_refused(plan):
    for shape, axes, said in (
        ((4, 2), AXES, "mesh: the plan's data 2 x model 4, here data 4 x model 2"),
        ((4, 2), AXES[::-1], "mesh: the plan's data 2 x model 4, here model 4 x data 2"),
        ((2, 4), ("rows", "model"), "mesh: the plan's data 2 x model 4, here rows 2 x model 4"),
    ):
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2)
        if "rows" not in axes:
            assert said in refused(plan, train_step(mesh), *arguments(mesh))
        else:
            x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=at(mesh, "model"))
            assert said in refused(plan, jax.jit(lambda x: x @ x.T), x)


def with_made_for(plan: Plan, **fields: Any) -> Plan:
    assert plan.made_for is not None
    return msgspec.structs.replace(plan, made_for=msgspec.structs.replace(plan.made_for, **fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"versions": {"jax": "0.9.1"}},
            "version of jax: the plan's 0.9.1, here " + jax.__version__,
        ),
        (
            {"devices": "NVIDIA H100 80GB HBM3"},
            "devices: the plan's NVIDIA H100 80GB HBM3, here cpu",
        ),
        (
            {"axis_types": {"data": "Explicit", "model": "Auto"}},
            "types of the mesh's axes: the plan's {'data': 'Explicit'",
        ),
        (
            {"domains": {"data": 2, "model": 1}},
            "NVLink domains along each axis: the plan's {'data': 2, 'model': 1}, here {}",
        ),
        (
            {"cluster": "h100-sxm:2x8"},
            "cluster: the plan's h100-sxm:2x8, here not known; if it is that one, name it in",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_other_versions_and_devices_are_refused(plan, fields, said):
    message = refused(with_made_for(plan, **fields), train_step(), *arguments())
    assert said in message
    assert "matmul" not in message, "it is the same step"


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_another_cluster_is_refused():
    plan = overlap(train_step(), cluster="h100-sxm:1x8").explain(*arguments())
    said = refused(plan, train_step(), *arguments(), cluster="h200:1x8")
    assert "cluster: the plan's h100-sxm:1x8, here h200:1x8" in said
    again = overlap(train_step(), plan=plan, cluster="h100-sxm:1x8")
    assert again.explain(*arguments()) == plan


def test_all_that_differs_is_said_at_once(plan):
    other = with_made_for(plan, versions={"jax": "0.9"}, devices="H100", step="00")
    said = refused(other, train_step(), *arguments())
    assert {"version of jax", "devices", "the step, though"} <= {
        line.strip().split(":")[0].split(" not")[0] for line in said.splitlines()
    }  # fmt: skip


def with_keep(ring: MakeRing) -> MakeRing:
    return msgspec.structs.replace(ring, keep=not ring.keep)


def changed_edits(plan: Plan, ring: MakeRing) -> dict[str, tuple[list[Any], str]]:
    """Return edits that do not fit the step, and what is said of them."""
    first = ring.matmuls[0]

    def with_ring(**changes: Any) -> list[Any]:
        changed = msgspec.structs.replace(ring, **changes)
        return [changed if edit is ring else edit for edit in plan.edits]

    def with_matmul(**changes: Any) -> list[Any]:
        return with_ring(matmuls=(msgspec.structs.replace(first, **changes), *ring.matmuls[1:]))

    return {
        "a variant that does not divide": (
            with_ring(variant=Variant("one_way", 3)),
            "a chunk of 4 rows does not divide by 3",
        ),
        "another axis": (with_ring(axis="data"), "does not wait for it alone on data"),
        "another collective": (with_ring(kind="all_reduce"), "they wait for all_gather along"),
        "a matmul that is none": (with_matmul(site=99), "the step has 9 matmuls, counted from 0"),
        "a sharding of other dims": (with_matmul(lhs=()), "has 3 dims, and its sharding 0"),
        "a matmul in two rings": (
            [
                e
                for edit in plan.edits
                for e in ([edit, with_keep(ring)] if edit is ring else [edit])
            ],
            "is in another edit too",
        ),
        "another order": ([*plan.edits, ring], "it has to come before 'leave out dims of size 1"),
        "a pin that is none": (
            [Pin(site=99, spec=((),) * 3), *plan.edits],
            "the step has 9 matmuls, counted from 0",
        ),
        "a result that is none": (
            [PinResults(specs=((7, ()),)), *plan.edits],
            "the step has no result 7",
        ),
        "a lookup that is none": (
            [ScatterLookup(number=0, updates=(), out=(), scatters=()), *plan.rings],
            "no gradient of a lookup is there",
        ),
        "types on an automatic mesh": ([DropTypes(), *plan.edits], "on an explicit mesh"),
        "a batch along no dim": (
            [SplitBatch(site=0, operand=0, dim=7, parts=2), *plan.rings],
            "matmul 0 has no such dim",
        ),
    }


def test_edits_that_do_not_fit_are_refused(plan):
    ring = next(r for r in plan.rings if r.kind == "all_gather")
    for name, (edits, said) in changed_edits(plan, ring).items():
        message = refused(with_edits(plan, edits), train_step(), *arguments())
        assert message.startswith("the edit does not fit the step: "), name
        assert said in message and "Take the plan that explain()" in message, name
    message = refused(msgspec.structs.replace(plan, made_for=None), train_step(), *arguments())
    assert "does not say which step it was made for" in message


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_an_edit_of_ones_own_leaves_results_and_donation_as_they_are(kind):
    mesh = jax.make_mesh(SHAPE, AXES, axis_types=(kind,) * 2)

    def fn(w, x):
        return w * 2 + jnp.sum(x @ w), jnp.cos(x @ w)

    def given():
        rng = np.random.default_rng(0)
        specs = P(None, "data"), P("model")
        return [
            jax.device_put(rng.standard_normal((32, 32)).astype("f"), NamedSharding(mesh, spec))
            for spec in specs
        ]

    step, mine, theirs = jax.jit(fn, donate_argnums=0), given(), given()
    plan = overlap(step).explain(*given())
    types = [] if kind == AxisType.Auto else [DropTypes()]
    own = in_order([Pin(site=0, spec=((), ("model",))), *(plan.edits or types)])
    followed = overlap(step, plan=with_edits(plan, own))
    for one, other in zip(followed(*mine), step(*theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        assert jax.typeof(one) == jax.typeof(other)
        assert one.sharding.is_equivalent_to(other.sharding, 2)
    assert mine[0].is_deleted() == theirs[0].is_deleted()


def test_edits_are_put_in_order_and_pins_after_a_split_stay_there():
    split = SplitBatch(site=0, operand=0, dim=0, parts=2)
    pins = [Pin(site=number, spec=()) for number in range(3)]
    edits = [GatherAhead(), pins[0], split, pins[1], DropTypes(), pins[2]]
    assert in_order(edits) == [DropTypes(), pins[0], split, pins[1], pins[2], GatherAhead()]


def test_each_edit_prints_itself_in_a_line(plan):
    lines = [str(edit) for edit in plan.edits]
    assert lines[0] == "pin 3 results of the step to where XLA put them"
    assert "ring of all_gather over model, one_way: matmuls 0, 1" in lines
    assert lines[-2:] == [
        "gather weights of scans a step of the scan ahead",
        "leave out dims of size 1 once for all matmuls that read a value",
    ]


def test_what_a_plan_says_is_not_said_twice(plan):
    for options in (
        {"skip": ["a.py:1"]},
        {"granularity": "two_way"},
        {"fsdp": "prefetch"},
        {"schedule": None},
        {"schedule": Scheduler(slack=0.1)},
    ):
        (name,) = options
        with pytest.raises(ValueError, match=f"^{name} beside plan=: a plan says that already"):
            overlap(train_step(), plan=plan, **options)
    with pytest.raises(ValueError, match=r"plan=3: expected a jaxoverlap\.Plan, or the path"):
        overlap(train_step(), plan=3)  # type: ignore[arg-type]


def test_a_bad_file_is_refused_at_once(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json: the file is truncated"):
        overlap(train_step(), plan=tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        overlap(plan="nowhere.json")


# -- the fingerprint ------------------------------------------------------------------------------

CHILD = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.step.test_follow_plan import *
print(overlap(train_step()).explain(*arguments()).to_json())
"""


def test_a_plan_is_the_same_in_every_process(tmp_path, plan):
    """A plan depends neither on Python's hash seed nor on the process that made it."""
    children = []
    for seed in ("1", "2"):
        path = [str(Path(__file__).parents[2]), *sys.path]
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        command = [sys.executable, "-c", CHILD]
        children.append(
            subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=-1, text=True)
        )
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert Plan.from_json(out) == plan


def digest(fn: Any, *shapes: tuple[int, ...]) -> str:
    return fingerprint(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))


def test_what_a_fingerprint_tells_apart():
    def clipped(limit):
        @jax.custom_vjp
        def clip(x):
            return jnp.minimum(x, limit)

        clip.defvjp(lambda x: (clip(x), None), lambda _, g: (g,))
        return clip

    def halves(length, reverse=False):
        return lambda x: lax.scan(lambda c, _: (c / 2, None), x, length=length, reverse=reverse)[0]

    functions = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: (x + 1) * 2,
        lambda x: x.astype("bfloat16"),
        lambda x: x.reshape(4, 2),
        lambda x: x.T.reshape(2, 4),
        lambda x: jnp.dot(x, x.T),
        lambda x: jnp.dot(x, x.T, precision="highest"),
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
        lambda x: lax.with_sharding_constraint(x, at(MESH, "data")),
        lambda x: lax.with_sharding_constraint(x, at(MESH, "model")),
        halves(2),
        halves(3),
        halves(3, reverse=True),
        clipped(1.0),
        clipped(2.0),
        lambda x: (x, x + 1),
        lambda x: (x + 1, x),
    ]
    digests = [digest(fn, (2, 4)) for fn in functions]
    assert len(set(digests)) == len(functions)
    assert digests == [digest(fn, (2, 4)) for fn in functions], "each is traced anew"
    assert digest(functions[0], (4, 2)) not in digests


def test_what_a_fingerprint_leaves_out():
    """A fingerprint leaves out names, lines, and which devices they are."""
    one = jax.jit(lambda x: x @ x.T)

    @jax.jit
    def other(y):
        return y @ y.T

    assert digest(lambda x: one(x), (2, 4)) == digest(lambda z: other(z), (2, 4))
    transposed = Mesh(MESH.devices.ravel()[::-1].reshape(SHAPE), AXES)
    constraints = [
        lambda x, m=m: lax.with_sharding_constraint(x, at(m, "data")) for m in (MESH, transposed)
    ]
    assert digest(constraints[0], (2, 4)) == digest(constraints[1], (2, 4))


# -- pods -----------------------------------------------------------------------------------------


@needs_plugin
@pytest.mark.pods
def test_a_pods_plan_is_for_the_gpus_of_that_cluster(tmp_path, monkeypatch):
    """A plan leaves out what a pod alone needs; the GPUs that are there get what it names."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", dict(zip(AXES, SHAPE, strict=True)))
    step, args = jax.jit(lambda x, w: lax.with_sharding_constraint(x @ w, at(mesh, None, "model"))), [
        jax.ShapeDtypeStruct((8192, 8192), "bfloat16", sharding=at(mesh, *spec))
        for spec in (("model",), (None, "model"))
    ]  # fmt: skip
    first = overlap(step, schedule=Scheduler(slack=0.05))
    plan = same_again(tmp_path, first, *args)
    assert plan.made_for and plan.made_for.cluster == "h100-sxm:1x8"
    assert plan.made_for.devices == "NVIDIA H100 80GB HBM3"
    assert plan.xla_options["xla_gpu_enable_latency_hiding_scheduler"] == "True"
    assert not {*plan.xla_options} & {*jaxoverlap.hardware.pods.compiler_options()}
    assert plan.schedule is not None and plan.schedule.slack == 0.05
    with_pods = dict(first.trace(*args)._params["compiler_options_kvs"])
    assert with_pods == {**plan.xla_options, **jaxoverlap.hardware.pods.compiler_options()}

    changed = msgspec.structs.replace(
        plan, xla_options={"xla_gpu_enable_latency_hiding_scheduler": "False"}
    )
    monkeypatch.setattr("jaxoverlap.hardware.pods.is_pod", lambda mesh: False)
    there = overlap(step, plan=changed).trace(*args)
    assert dict(there._params["compiler_options_kvs"]) == changed.xla_options

    smaller = jaxoverlap.pod_mesh("h200:1x8", dict(zip(AXES, SHAPE, strict=True)))
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at(smaller, *a.sharding.spec)) for a in args
    ]
    said = refused(plan, jax.jit(lambda x, w: lax.with_sharding_constraint(x @ w, at(smaller, None, "model"))), *args)  # fmt: skip
    assert "devices: the plan's NVIDIA H100 80GB HBM3, here NVIDIA H200" in said
    assert "cluster: the plan's h100-sxm:1x8, here h200:1x8" in said
    assert "the step" not in said


def test_the_cluster_that_a_plan_went_by(plan):
    """A plan's cluster is used, unless the devices are another or already say the same of links."""
    made_for: MadeFor | None = plan.made_for
    assert made_for is not None
    assert made.cluster_for(plan, MESH) is None
    named = with_made_for(plan, cluster="h100-sxm:2x4", domains={"data": 2, "model": 1})
    assert str(made.cluster_for(named, MESH)) == "h100-sxm:2x4"
    assert made.cluster_for(with_made_for(plan, cluster="h100-sxm:2x8"), MESH) is None
    assert made.cluster_for(with_made_for(plan, cluster="mine:2x4"), MESH) is None


@pytest.mark.rotating
@needs_plugin
@pytest.mark.parametrize("tied", some(1, [True, False]))
def test_a_plan_that_leaves_lookups_whole_is_followed(tmp_path, tied):
    """Their gradients could be scattered; the price decided that nothing is rewritten."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"fsdp": 8})

    def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at(mesh, "fsdp"))

    params: dict[str, Any] = {"table": shaped(8192, 1024)}
    params["layers"] = [{"up": shaped(1024, 4096), "down": shaped(4096, 1024)} for _ in range(2)]
    params |= {} if tied else {"head": shaped(1024, 8192)}

    def loss(params, tokens):
        x = params["table"][tokens]
        for layer in params["layers"]:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        logits = x @ (params["table"].T if tied else params["head"])
        picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).astype(jnp.float32).mean()

    @jax.jit
    def step(params, tokens):
        gradients = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    args = params, shaped(16, 512, dtype=jnp.int32)
    plan = overlap(step).explain(*args)
    plan.write(tmp_path / "plan.json")
    follows = overlap(step, plan=tmp_path / "plan.json")
    assert follows.explain(*args).entries == plan.entries
    assert follows.explain(*args).applied == plan.applied
    tuning = jaxoverlap.Tuning(budget_s=1, cache=str(tmp_path), show=False)
    assert overlap(step, tune=tuning).lower(*args).plan is not None
