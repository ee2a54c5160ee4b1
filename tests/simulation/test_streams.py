"""The streams of the simulation are those on which XLA launches, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.flags.required import NVLINK_STREAM, SEEN
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import collectives
from jaxoverlap.simulation.device_groups import domains
from jaxoverlap.simulation.schedule import Collective
from jaxoverlap.simulation.streams import MULTI_STREAMING, apart, scheduled_module
from tests.support import thunks
from tests.support.pods import pytestmark as pods
from tests.support.two_axes import AXES, POD, two_axes

pytestmark = [*pods, pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")]

ONE: dict[str, str] = {}
BY_DOMAIN = {s.name: s.value for s in NVLINK_STREAM}
AS_COLLECTIVES = {s.name: s.value for s in SEEN}  # thunks of XLA's own kernels name no collective
IN_TURNS = {MULTI_STREAMING: "True"}
OPTIONS = {"one": ONE, "by domain": BY_DOMAIN, "in turns": IN_TURNS, "both": BY_DOMAIN | IN_TURNS}
WAYS = {
    "plain": None,
    "rings": {"granularity": "one_way", "halves": None},
    "halves": {"halves": 2},
}


def lowered(way: str):
    """Lower the step in a way, on one stream."""
    step, args = two_axes()
    options = WAYS[way]
    if options is None:
        return jax.jit(step).lower(*args)
    overlap = jaxoverlap.overlap(step, cluster=POD, never_slower=False, streams="one", **options)
    return overlap.lower(*args)


# Two of each way and of each option; the others are nightly.
SOON = {
    *(("plain", "one"), ("plain", "by domain"), ("rings", "one"), ("rings", "in turns")),
    *(("halves", "by domain"), ("halves", "both")),
}
COMPILED = [
    pytest.param((w, o), id=f"{w} {o}", marks=() if (w, o) in SOON else pytest.mark.nightly)
    for w in WAYS
    for o in OPTIONS
]


@pytest.fixture(scope="module", params=COMPILED)
def compiled(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[hlo.Module, Path]:
    """A scheduled module, and the folder with what XLA launches of it."""
    way, name = request.param
    folder = tmp_path_factory.mktemp("dump")
    options = {**compiler_options(), **AS_COLLECTIVES, **OPTIONS[name], **thunks.DUMP}
    options["xla_dump_to"] = str(folder)
    text = lowered(way).compile(options).as_text() or ""
    return scheduled_module(text, multi_streaming=MULTI_STREAMING in OPTIONS[name]), folder


def test_each_collective_runs_on_the_stream_that_xla_gives_it(compiled):
    module, folder = compiled
    simulated = {c.name: c.stream for c in collectives(module)}
    launched = thunks.launches(folder, "step")
    assert {x.name: x.stream for x in launched} == simulated
    assert len({x.stream for x in launched} - {None}) >= 1


@pytest.mark.parametrize("which", [thunks.BEFORE, thunks.AFTER])
def test_collectives_are_launched_and_awaited_in_the_order_of_the_schedule(compiled, which):
    module, folder = compiled
    known = {c.name: c for c in collectives(module)}
    launched = [(x.what, x.name) for x in thunks.launches(folder, "step", which)]
    assert launched == list(scheduled(module, module.entry, known))


def test_no_cuda_graph_captures_an_asynchronous_collective(compiled):
    """XLA makes a chain of what a graph captures: nothing would run beside anything there."""
    _, folder = compiled
    launched = thunks.launches(folder, "step", thunks.AFTER)
    assert not [x for x in launched if x.captured]


@pytest.mark.parametrize(
    ("pod", "sizes"), [("gb200:36x4", (2, 18, 4)), ("h100-sxm:4x8", (2, 2, 8))]
)
def test_xla_marks_what_lies_within_an_nvlink_domain_as_the_cluster_has_it(pod, sizes):
    mesh = jaxoverlap.pod_mesh(pod, dict(zip("abc", sizes, strict=True)))

    def at(*spec) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def gathered(x):
        """Gather over each axis, and over two."""
        total = 0.0
        for number, axes in enumerate(("a", "b", "c", ("b", "c"))):
            sharded = jax.lax.with_sharding_constraint(x * (number + 2), at(axes))
            total += jnp.cumsum(jax.lax.with_sharding_constraint(jnp.sin(sharded), at())).sum()
        return total

    x = jax.ShapeDtypeStruct((144 * 64, 8), jnp.float32, sharding=at())
    options = {**compiler_options(), **BY_DOMAIN}
    module = hlo.parse(jax.jit(gathered).lower(x).compile(options).as_text() or "")
    near = jaxoverlap.parse_cluster(pod).gpus_per_nvlink_domain
    marked = {c.groups: c.scale_up for c in collectives(module)}
    assert len(marked) >= 4
    assert marked == {g: domains(g, module.num_devices, near) == 1 for g in marked}
    assert set(marked.values()) == {True, False}


def scheduled(module: hlo.Module, computation: str, known) -> Iterator[tuple[str, str]]:
    """Yield starts, dones and whole collectives of a module in schedule order."""
    for i in module.body(computation):
        if i.name in known:
            yield "start" if known[i.name].asynchronous else "whole", i.name
        elif i.operands and i.operands[0] in known and i.opcode.endswith("-done"):
            if known[i.operands[0]].asynchronous:
                yield "done", i.operands[0]
        elif i.opcode in ("while", "call", "conditional"):
            for called in i.called:
                yield from scheduled(module, called, known)


# -- what must not meet ---------------------------------------------------------------------------


def started(groups: str, stream: int) -> tuple[Collective, ...]:
    return (
        Collective(
            name="c", computation="main", kind="all-reduce", bytes_moved=1, group_size=8, runs=1,
            source="", ring=None, asynchronous=True, matmuls=(), groups=groups, stream=stream,
        ),
    )  # fmt: skip


ROWS, COLUMNS, ALL = "[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", "[1,16]<=[16]"


def test_collectives_on_two_streams_that_share_more_than_one_device_stay_apart():
    near, far, over_all = started(ROWS, 3), started(COLUMNS, 0), started(ALL, 0)
    body = [near, (), far, over_all, near, (*far, *over_all), far]
    assert apart(body, 16) == {
        0: frozenset({3, 5}),
        3: frozenset({0, 4}),
        4: frozenset({3, 5}),
        5: frozenset({0, 4}),
    }
    on_one = [started(groups, 0) for groups in (ROWS, COLUMNS, ALL)]
    assert apart(on_one, 16) == {}


def test_they_stay_apart_in_the_order_of_the_scheduler_pass():
    """A weight that every device has: its gradient is summed over all, beside NVLink's hops."""
    mesh = jaxoverlap.pod_mesh(POD, AXES)

    def at(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def layer(x, weights):
        up, down, everywhere = weights
        x = jax.lax.with_sharding_constraint(x, at("data", "model", None))
        x = x + jax.nn.gelu(x @ everywhere)
        h = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ up), at("data", None, "model"))
        return x + jax.lax.with_sharding_constraint(h @ down, at("data", "model", None))

    def step(layers, x):
        def loss(layers):
            y = x
            for weights in layers:
                y = layer(y, weights)
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - 1e-3 * g, layers, jax.grad(loss)(layers))

    def struct(*shape: int, spec: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at(*spec))

    wide = 4096
    weights = (
        struct(wide, 4 * wide, spec=(None, "model")),
        struct(4 * wide, wide, spec=("model", None)),
        struct(wide, wide, spec=()),
    )
    args = [weights] * 4, struct(8, 2048, wide, spec=("data", "model", None))
    compiled = jaxoverlap.overlap(step, cluster=POD, never_slower=False).lower(*args).compile()
    assert any("a stream of their own" in note for note in compiled.plan.notes)
    assert compiled.schedule.orders  # it has another order than XLA's
    module = replace(hlo.parse(compiled.as_text()), num_devices=16)
    body = module.body(module.entry)
    known = {c.name: c for c in collectives(module) if c.computation == module.entry}
    separate = apart([(known[i.name],) if i.name in known else () for i in body], 16)
    assert separate  # there is something to keep apart
    flying: dict[str, int] = {}
    for position, i in enumerate(body):
        assert separate.get(position, frozenset()).isdisjoint(flying.values())
        if i.name in known and known[i.name].asynchronous:
            flying[i.name] = position
        elif i.operands:
            flying.pop(i.operands[0], None)


_TWO_HOPS = """HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY main {
  p = f32[1024] parameter(0)
  one = (f32[1024], f32[1024]) collective-permute-start(p), source_target_pairs={{0,1},{1,0}}
  other = (f32[1024], f32[1024]) collective-permute-start(p), source_target_pairs={{0,1},{1,0}}
  first = f32[1024] collective-permute-done(one)
  second = f32[1024] collective-permute-done(other)
  ROOT both = f32[1024] add(first, second)
}
"""


@pytest.mark.parametrize(
    "flags, asked, streams",
    [
        ("", None, [0, 0]),
        (f"--{MULTI_STREAMING}=true", None, [0, 1]),
        (f"--{MULTI_STREAMING}", None, [0, 1]),
        (f"--{MULTI_STREAMING}=true --{MULTI_STREAMING}=false", None, [0, 0]),
        (f"--{MULTI_STREAMING}=true", False, [0, 0]),
        ("", True, [0, 1]),
    ],
)
def test_two_streams_in_turns_where_xla_flags_or_the_caller_say_so(
    monkeypatch, flags, asked, streams
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = jaxoverlap.audit(_TWO_HOPS, multi_streaming=asked).collectives
    assert [c.stream for c in found] == streams
    step = jaxoverlap.simulate(_TWO_HOPS, "h100-sxm:1x8", multi_streaming=asked)
    assert [s.collective.stream for s in step.spent] == streams
