"""Users' mistakes, and legal programs that do not fit, are each told in words.

A mistake is a ValueError that names what was given and what to do; a matmul that does not fit is a
Skip with its reason, and the step runs.
"""

from __future__ import annotations

import functools
import re
import types
import warnings

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, Skip, overlap
from jaxoverlap.hardware import pods
from jaxoverlap.passes.analysis.mesh import MeshError
from jaxoverlap.plan.edits import MakeRing, Pin, SplitBatch
from jaxoverlap.step.context import mesh_of as mesh_of_call
from tests.support.pods import needs_plugin


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    auto = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


MESH = mesh_of(data=2, model=4)


def on(mesh: Mesh, *spec) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def struct(*shape: int, spec=(), dtype=np.float32, mesh: Mesh = MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on(mesh, *spec))


def matmul(x, w):
    return x @ w


ARGS = (struct(16, 32, spec=("model",)), struct(32, 64, spec=(None, "model")))


def refuse(*parts: str, **options):
    """Check that calling, explaining and lowering are refused in words that hold all of `parts`."""
    fn, args = options.pop("fn", matmul), options.pop("args", ARGS)
    for entry in ("explain", "lower", "trace", "__call__"):
        with pytest.raises(ValueError) as error:
            getattr(overlap(fn, **options), entry)(*args)
        for part in parts:
            assert part in str(error.value)


# -- the arguments of overlap ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "cluster", ["", "h100-sxm", "8x8", "h100-sxm:8", "h100-sxm:8x8x8", "h100-sxm 8x8"]
)
def test_a_cluster_that_does_not_parse(cluster: str):
    with pytest.raises(ValueError, match=r"cannot read .* as a cluster.*'h100-sxm:8x8'"):
        overlap(matmul, cluster=cluster)
    with pytest.raises(ValueError, match="as a cluster"):
        overlap(cluster=cluster)  # as a decorator: at once, not when the step is made


@pytest.mark.parametrize(("given", "near"), [("h100", "h100-sxm"), ("gb20", "gb200")])
def test_an_unknown_chip_is_told_its_neighbours(given: str, near: str):
    with pytest.raises(ValueError, match=f"unknown chip '{given}'.*did you mean.*{near}"):
        overlap(matmul, cluster=f"{given}:1x8")


def test_a_cluster_of_another_size_than_the_mesh():
    refuse("matmul", "8 devices", "h100-sxm:8x8 has 64", "'model': 4", cluster="h100-sxm:8x8")


@pytest.mark.parametrize("value", ["ignore", "Raise", "", None, True])
def test_on_error(value):
    with pytest.raises(ValueError, match=r"on_error=.*expected 'raise' or 'plain'"):
        overlap(matmul, on_error=value)


def test_skip_as_one_string():
    with pytest.raises(ValueError, match=re.escape("skip='gpt.py:88': expected source lines")):
        overlap(matmul, skip="gpt.py:88")


@pytest.mark.parametrize(
    "entry", ["gpt.py:88", "test_bad_input.py", "test_bad_input.py:0", "py:47", ""]
)
def test_skip_of_a_line_without_a_matmul(entry: str):
    line = matmul.__code__.co_firstlineno + 1
    refuse(f"skip={entry!r}", f"api/test_bad_input.py:{line}", skip=(entry,))


@pytest.mark.parametrize("fn", [3, "train_step", [matmul], None])
def test_something_that_is_no_function(fn):
    with pytest.raises(ValueError, match=r"overlap\(\) was given .*expected a function"):
        overlap(fn)


@pytest.mark.parametrize(
    "options", [{"cluster": 8}, {"skip": 88}, {"skip": None}, {"skip": (88,)}], ids=str
)
def test_arguments_of_another_type(options):
    with pytest.raises(ValueError):
        overlap(matmul, **options).explain(*ARGS)


STEP = jax.jit(matmul)
COMPILED = STEP.lower(*ARGS).compile()
GPT = dict(name="m", layers=4, hidden=1024, heads=8, sequence=1024)


def configured(**options):
    model = options.pop("model", "llama2-7b")
    cluster = options.pop("cluster", "h100-sxm:1x8")
    return lambda: jaxoverlap.configure(model, cluster, global_batch=64, **options)


WRONG = [  # what is called, and what the error begins with
    (lambda: overlap(matmul, granularity={5: "two_way"}), "granularity={5: 'two_way'}"),
    (lambda: overlap(matmul, granularity={"a.py": {"b.py": "two_way"}}), "granularity="),
    (lambda: overlap(matmul, halves=np.array([2, 3])), "halves=array([2, 3])"),
    (lambda: overlap(matmul, layouts=np.array(["repair", "x"])), "layouts="),
    (lambda: overlap(matmul, agree_within_s="20"), "agree_within_s='20'"),
    (lambda: overlap(matmul, agree_within_s=None), "agree_within_s=None"),
    (lambda: overlap(matmul, prices=3), "prices=3"),
    (lambda: overlap(COMPILED), "overlap() was given jax"),
    (lambda: jaxoverlap.Tuning(budget_s="x"), "budget_s='x'"),
    (lambda: jaxoverlap.Tuning(measure="x"), "measure='x'"),
    (lambda: jaxoverlap.Tuning(cache=3), "cache=3"),
    (lambda: jaxoverlap.tune(STEP, ARGS, cache=3), "cache=3"),
    (lambda: jaxoverlap.tune(STEP, 5), "args=5"),
    (lambda: jaxoverlap.tune(STEP, ARGS, [1]), "kwargs=[1]"),
    (lambda: jaxoverlap.parse_cluster(3), "cluster=3"),
    (lambda: jaxoverlap.agreed(3), "make=3"),
    (lambda: jaxoverlap.profile(None), "step=None"),
    (lambda: jaxoverlap.per_sequence(3), "fn=3"),
    (lambda: jaxoverlap.per_sequence(matmul, argnums="x"), "argnums='x'"),
    (lambda: jaxoverlap.pod_mesh(None, {"data": 8}), "cluster=None"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", 8), "axes=8"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", [("data", 8)]), "axes=[('data', 8)]"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", "data=8"), "axes='data=8'"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", {1: 8}), "axes={1: 8}"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", {("a", "b"): 8}), "axes={('a', 'b'): 8}"),
    (lambda: jaxoverlap.pod_mesh("h100-sxm:1x8", {"": 8}), "axes={'': 8}"),
    (lambda: jaxoverlap.simulate(STEP, "h100-sxm:1x8"), "compiled=<PjitFunction"),
    (lambda: jaxoverlap.simulate(None, "h100-sxm:1x8"), "compiled=None"),
    (lambda: jaxoverlap.simulate(COMPILED, 3), "cluster=3"),
    (lambda: jaxoverlap.audit(None), "compiled=None"),
    (lambda: jaxoverlap.decisions(3), "compiled=3"),
    (lambda: jaxoverlap.compiler_options(3), "mesh=3"),
    (configured(model=3), "model=3"),
    (configured(cluster=3), "cluster=3"),
    (configured(stack="jax"), "stack='jax'"),
    (configured(cost="x"), "cost='x'"),
    (configured(axes=["model"]), "axes=['model']"),
    (configured(overlap=3), "overlap=3"),
    (lambda: jaxoverlap.Transformer(**{**GPT, "name": 3}), "name=3"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_named_with_what_to_give(call, said: str):
    with pytest.raises(ValueError, match=re.escape(said) + ".*: expected "):
        call()


# -- edits that were changed by hand --------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Pin(site=0, spec=(("nope",), ())), "'nope' is no axis of the mesh"),
        (Pin(site=0, spec=(("data",), ("data",))), "'data' is in one sharding 2 times"),
        (Pin(site=0, spec=(("data",),)), r"has 1 dims, and the value's shape is \(16, 64\)"),
        (Pin(site=0, spec=((), (), ())), r"has 3 dims, and the value's shape is \(16, 64\)"),
        (SplitBatch(site=0, operand=0, dim=0, parts=3), "its 16 rows do not divide in 1 x 3"),
        (SplitBatch(site=0, operand=0, dim=0, parts=0), r"parts=0.* does not fit: .* >= 2"),
        (SplitBatch(site=0, operand=0, dim=0, parts=2, shards=0), r"shards=0.* does not fit"),
        (SplitBatch(site=0, operand=0, dim=0, parts=2, unroll=0), r"unroll=0.* does not fit"),
        (MakeRing(kind="all_reduce", axis="model", matmuls=()), r"matmuls=\(\).* does not fit"),
        ("x", "'x' does not fit"),
    ],
    ids=str,
)
def test_an_edit_that_does_not_fit(edit, why: str):
    plan = msgspec.structs.replace(overlap(matmul).explain(*ARGS), edits=(edit,))
    with pytest.raises(ValueError, match=why + ".*Take the plan that explain"):
        overlap(matmul, plan=plan).explain(*ARGS)


# -- GPUs that are not there ----------------------------------------------------------------------


def on_pod(cluster: str = "h100-sxm:1x8"):
    mesh = jaxoverlap.pod_mesh(cluster, {"data": 2, "model": 4})
    return tuple(struct(*a.shape, spec=a.sharding.spec, mesh=mesh) for a in ARGS)


@needs_plugin
@pytest.mark.pods
def test_a_step_on_a_pod_cannot_be_called():
    """Neither before nor after it was explained or lowered; nothing is decided for it."""
    args = on_pod()
    step = overlap(STEP, never_slower=False, schedule=None)
    with pytest.raises(ValueError, match=r"GPUs are not there.*\.lower\(\.\.\.\)\.compile\(\)"):
        step(*args)
    assert not step._seen.cache_keys()
    compiled = step.lower(*args).compile()
    for call in (step, compiled, functools.partial(jaxoverlap.profile, STEP)):
        with pytest.raises(ValueError, match="GPUs are not there"):
            call(*args)


@needs_plugin
@pytest.mark.pods
def test_a_pod_is_its_own_cluster():
    """Chip, hosts and GPUs are the mesh's; the network may be another."""
    args = on_pod()
    compiled = STEP.lower(*args).compile(pods.compiler_options())
    for other in ("a100-sxm-80:1x8", "h100-sxm:2x4"):
        for call in (
            lambda other=other: overlap(matmul, cluster=other).explain(*args),
            lambda other=other: jaxoverlap.simulate(compiled, other),
        ):
            with pytest.raises(ValueError, match=f"{other} for a mesh of h100-sxm:1x8"):
                call()
    assert overlap(matmul, cluster="h100-sxm:1x8@80").explain(*args)
    assert jaxoverlap.simulate(compiled, "h100-sxm:1x8@80").step_s > 0
    assert jaxoverlap.simulate(compiled.as_text(), "a100-sxm-80:1x8").step_s > 0


@needs_plugin
@pytest.mark.pods
def test_arrays_and_programs_on_a_pod_are_refused_in_words():
    """JAX says UNIMPLEMENTED of its client, and that an object has no attribute."""
    sharding = on(jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4}), "data", "model")
    for wrong in (
        lambda: jax.device_put(np.ones((8, 8)), sharding),
        lambda: jnp.zeros((8, 8), device=sharding),
        jax.jit(lambda: jnp.zeros((8, 8)), out_shardings=sharding),
    ):
        with pytest.raises(ValueError, match=r"pod_mesh.*not there.*jax\.ShapeDtypeStruct"):
            wrong()
    np.testing.assert_array_equal(jax.device_put(np.ones(8), on(MESH, "data")), np.ones(8))


@needs_plugin
@pytest.mark.pods
def test_a_callback_on_a_pod_is_refused_with_its_line():
    def talks(x, w):
        y = x @ w
        jax.debug.print("mean {}", y.mean())
        return y

    line = talks.__code__.co_firstlineno + 2
    for method in ("explain", "lower", "advise"):
        with pytest.raises(ValueError, match=f"debug_print .*test_bad_input.py:{line}"):
            getattr(overlap(jax.jit(talks)), method)(*on_pod())
    assert overlap(jax.jit(talks)).lower(*ARGS)


def test_a_plans_missing_folder_is_named_and_no_temporary_file(tmp_path):
    plan = overlap(matmul).explain(*ARGS)
    with pytest.raises(FileNotFoundError, match=r"no/plan\.json: there is no folder .*no; make it"):
        plan.write(tmp_path / "no" / "plan.json")


# -- chips that are not known ---------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["tpu-v5p", "v5e", "v6e", "v5litepod-16", "trillium"])
def test_tpus_are_not_supported(chip: str):
    with pytest.raises(ValueError, match="TPUs are not supported"):
        jaxoverlap.parse_cluster(f"{chip}:8x8")


def test_a_step_on_tpus_runs_as_it_is_and_says_so(monkeypatch):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="tpu")]))
    monkeypatch.setattr("jaxoverlap.step.context.find_mesh", lambda *_: mesh)
    call = types.SimpleNamespace(
        name="step", params={"jaxpr": types.SimpleNamespace(consts=())}, flat=[]
    )
    call.params |= {"in_shardings": (), "out_shardings": (), "ctx_mesh": None, "name": "step"}
    with pytest.raises(MeshError, match="step runs on TPUs, which are not supported"):
        mesh_of_call(call)


# -- meshes ---------------------------------------------------------------------------------------


def left_as_it_is(*parts: str, fn=matmul, args, on_error: str = "raise") -> None:
    """Check that the step runs as it is and says so once, and that explain() refuses."""
    step, expected = overlap(fn, on_error=on_error), jax.jit(fn)(*args)
    with pytest.raises(ValueError) as error:
        overlap(fn).explain(*args)
    with pytest.warns(UserWarning, match="changes nothing") as caught:
        got = step(*args)
    said = str(caught[0].message), str(error.value)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(part in text for part in parts for text in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*[a.astype(np.float16) for a in args])  # another signature
        lowered = step.lower(*args)
        assert lowered.plan is None
        for again in (
            step(*args),
            lowered.compile()(*args),
            step.trace(*args).lower().compile()(*args),
        ):
            np.testing.assert_array_equal(again, expected)
    np.testing.assert_array_equal(got, expected)
    assert got.sharding == expected.sharding


@pytest.mark.parametrize("on_error", ["raise", "plain"])
@pytest.mark.parametrize("kind", ["host", "anywhere", "one device"])
def test_a_step_without_a_mesh(kind: str, on_error: str):
    x = np.ones((8, 8), np.float32)
    place = {"host": np.asarray, "anywhere": jnp.asarray}
    args = [place.get(kind, lambda x: jax.device_put(x, jax.devices()[1]))(x)] * 2
    left_as_it_is("matmul has no mesh", "Shard its arguments", args=args, on_error=on_error)


@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_a_mesh_of_one_device(on_error: str):
    x = jax.device_put(np.ones((8, 8), np.float32), on(mesh_of(data=1, model=1), "model"))
    parts = ("mesh of one device", "{'data': 1, 'model': 1}", "nothing to overlap")
    left_as_it_is(*parts, args=(x, x), on_error=on_error)


@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_two_meshes_of_the_same_devices(on_error: str):
    """A batch lies on a mesh of its own, beside parameters on another."""
    other, ones = mesh_of(batch=8), np.ones((32, 32), np.float32)
    args = (jax.device_put(ones, on(other, "batch")), jax.device_put(ones, on(MESH, "model")))
    parts = ("2 meshes", "{'batch': 8} and {'data': 2, 'model': 4}", "expected one")
    left_as_it_is(*parts, args=args, on_error=on_error)

    def constrained(x, w):
        return lax.with_sharding_constraint(x @ w, on(other, "batch"))

    args = [jax.device_put(ones, on(MESH, "model"))] * 2
    left_as_it_is(*parts, fn=constrained, args=args, on_error=on_error)


def test_meshes_of_other_devices_are_jits_own_error():
    ones, mesh = np.ones((8, 8), np.float32), mesh_of(model=4)
    args = (jax.device_put(ones, on(mesh, "model")), jax.device_put(ones, on(MESH, "model")))
    with pytest.raises(ValueError, match="incompatible devices for jitted computation"):
        jax.jit(matmul)(*args)
    with pytest.raises(ValueError, match="incompatible devices"), pytest.warns(match="2 meshes"):
        overlap(matmul)(*args)


def test_a_plan_is_for_a_mesh():
    plan = overlap(matmul).explain(*ARGS)
    x = np.ones((16, 32), np.float32)
    with pytest.raises(ValueError, match="matmul has no mesh"):
        overlap(matmul, plan=plan, on_error="plain")(x, x.T)


# -- matmuls that no ring fits: a reason each, and the step runs ----------------------------------


def entry_of(step, *args: jax.ShapeDtypeStruct) -> Decision | Skip:
    """Return the entry of the step's one matmul; it is also run, and compared."""
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(rng.integers(-3, 4, a.shape).astype(a.dtype), a.sharding) for a in args
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overlap.. changes nothing")
        (entry,) = overlap(step).explain(*args).entries
        got = overlap(step)(*arrays)
    np.testing.assert_array_equal(got, step(*arrays))
    return entry


def reason(step, *args: jax.ShapeDtypeStruct) -> str:
    """Return the reason why the step's one matmul is left alone."""
    entry = entry_of(step, *args)
    assert isinstance(entry, Skip)
    assert entry.source.startswith("api/test_bad_input.py:")
    return entry.reason


def placed(*spec, **options):
    """Return a step whose product lies at `spec`."""

    @jax.jit
    def step(x, w):
        return lax.with_sharding_constraint(lax.dot(x, w, **options), on(MESH, *spec))

    return step


def test_an_all_reduce_whose_dims_do_not_divide():
    args = (struct(3, 32, spec=(None, "model")), struct(32, 5, spec=("model",)))
    assert reason(placed(), *args) == "no dim of the result (a 3, c 5) divides into 4 chunks"


def test_a_chunk_that_would_not_divide():
    args = (struct(4, 32, spec=("model",)), struct(32, 64, spec=(None, "model")))
    why = reason(placed("data", "model"), *args)
    assert why == "dim a of lhs has size 4: not divisible by 8 devices"


def test_a_gather_by_the_major_axis_of_a_dim():
    """The rows left to a device would not be those that the result's other axis counts."""
    args = (struct(16, 32, spec=(("model", "data"),)), struct(32, 64, spec=(None, "model")))
    why = reason(placed("data", "model"), *args)
    assert why == "dim a is sharded in different orders: ('model', 'data') and ('data',)"


def test_a_result_that_must_be_gathered():
    args = (struct(16, 32, spec=("model",)), struct(32, 8))
    assert reason(placed(), *args) == "model wants gather of out dim a: no ring for that"


def batched(*spec):
    """Return a step of matmuls side by side, one for each row of its first dim."""

    @jax.jit
    def step(x, w):
        y = lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
        return lax.with_sharding_constraint(y, on(MESH, *spec))

    return step


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (4, "dim b of lhs has size 4: not divisible by 8 devices"),
        (16, "dim b is sharded in different orders: ('model', 'data') and ('data',)"),
    ],
)
def test_an_exchange_whose_blocks_do_not_meet(rows: int, why: str):
    """Data must find its part of the rows that are exchanged over model."""
    args = (struct(32, rows, 32, spec=(None, "model")), struct(32, 32, 64))
    fits = entry_of(batched("model"), *args)
    assert isinstance(fits, Decision) and fits.kind == "all_to_all_matmul"
    assert reason(batched("model", "data"), *args) == why


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_dtypes_that_no_ring_was_made_for(dtype: str):
    args = (
        struct(16, 32, spec=("model",), dtype=dtype),
        struct(32, 64, spec=(None, "model"), dtype=dtype),
    )
    why = reason(placed(None, "model"), *args)
    assert (
        why == f"dtype {dtype} is not supported (supported: float8_e4m3fn, float8_e5m2, float16, "
        "bfloat16, float32, float64, int8, uint8, int32)"
    )


def test_a_matmul_inside_a_shard_map():
    @jax.jit
    def step(x, w):
        specs = dict(in_specs=(P("model"), P(None, None)), out_specs=P("model"))
        return jax.shard_map(lambda x, w: x @ w, mesh=MESH, **specs)(x, w)

    args = (struct(16, 32, spec=("model",)), struct(32, 64))
    assert reason(step, *args) == "no collective: none next to it inside shard_map"


def test_more_dims_than_letters():
    @jax.jit
    def step(x, w):
        return lax.dot_general(x, w, (((0,), (0,)), ((), ())))

    args = [struct(8, *(1,) * 26, spec=("model",))] * 2
    assert reason(step, *args) == "its operands have 54 dims: more than letters (52)"


def test_empty_and_scalar_matmuls():
    step = placed(None, "model")
    plan = overlap(step).explain(
        struct(0, 32, spec=("model",)), struct(32, 64, spec=(None, "model"))
    )
    assert len(plan.entries) == 1
    x = jax.device_put(np.zeros((0, 32), np.float32), on(MESH, "model"))
    w = jax.device_put(np.zeros((32, 64), np.float32), on(MESH, None, "model"))
    assert overlap(step)(x, w).shape == (0, 64)
    dot = jax.jit(lambda x, y: x @ y, out_shardings=on(MESH))
    vectors = (struct(32, spec=("model",)), struct(32, spec=("model",)))
    assert reason(dot, *vectors) == "no dim of the result () divides into 4 chunks"


def test_ragged_matmuls_and_convolutions_are_named():
    @jax.jit
    def step(x, w, sizes, kernel):
        rows = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("model")))
        grouped = jax.lax.ragged_dot(rows, w, sizes)
        image = x.reshape(1, 1, *x.shape)
        return grouped, jax.lax.conv(image, kernel, (1, 1), "SAME")

    args = (struct(16, 32, spec=("model",)), struct(4, 32, 8), struct(4, dtype="int32"))
    skips = [e for e in overlap(step).explain(*args, struct(1, 1, 3, 3)).skips]
    assert sorted(e.reason for e in skips) == [
        "conv_general_dilated: no ring for that",
        "ragged_dot_general: no ring for that",
    ]
    assert all(e.source.startswith("api/test_bad_input.py:") for e in skips)
