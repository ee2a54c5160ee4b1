"""What a step keeps is what is fastest within the memory, as compiled for GPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jaxoverlap
from benchmarks.plain_gpt import EVERYWHERE, Sizes, abstract_args, make_step
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._util.text import human_bytes
from jaxoverlap.hardware.pods import pod_mesh
from jaxoverlap.plan.edits import Keep, Offload, Recompute
from jaxoverlap.simulation.host_copies import FROM_HOST, TO_HOST
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

SIZES = Sizes(
    layers=8, hidden=1024, heads=8, mlp=4096, vocab=2048, batch=16, sequence=512, attention="cudnn"
)


def step_of():
    mesh = pod_mesh("h100-sxm:1x8", {"fsdp": 4, "tp": 2})
    return make_step(SIZES, mesh, EVERYWHERE), abstract_args(SIZES, mesh)


def overlap(step, **options):
    return jaxoverlap.overlap(step, layouts=None, halves=None, **options)


def kept_in(plan):
    return [edit for edit in plan.edits if isinstance(edit, Keep)]


@marked(pods)
def test_a_step_keeps_what_pays_and_says_so():
    step, args = step_of()
    without, plan = overlap(step).explain(*args), overlap(step, memory=0.9).explain(*args)
    assert not kept_in(without)
    (note, *lines) = (line for line in plan.notes if "keep" in line)
    assert re.match(r"memory=0.9 keeps \d+.* MB more: .* ms -> .* ms \(estimated\), about", note)
    assert [line.strip() for line in lines] == [f"{edit}." for edit in kept_in(plan)]
    assert len(kept_in(plan)) > 3 and "benchmarks/plain_gpt.py" in lines[0]
    assert plan.price and without.price and plan.price.saved_s["memory"] > 0
    assert plan.price.step_s < without.price.step_s
    followed = jaxoverlap.overlap(step, plan=plan).explain(*args)
    assert kept_in(followed) == kept_in(plan)


@marked(pods)
def test_the_user_decides_first():
    step, args = step_of()
    every = kept_in(overlap(step, memory=0.9).explain(*args))
    line = every[0].source
    barred = kept_in(overlap(step, memory=0.9, recompute=[line]).explain(*args))
    assert barred and line not in [edit.source for edit in barred]
    alone = kept_in(overlap(step, keep=[line]).explain(*args))
    assert {edit.source for edit in alone} == {line}
    forced = kept_in(overlap(step, memory="1MB", keep=[line]).explain(*args))
    assert {edit.source for edit in forced} == {line}, "and nothing else has room"


@marked(pods)
def test_few_partitions_are_made(monkeypatch):
    step, args = step_of()
    asked: list[str] = []
    real = jaxoverlap._jax.partitioner.ask

    def ask(*given):
        asked.append("one")
        return real(*given)

    monkeypatch.setattr("jaxoverlap._jax.partitioner.ask", ask)
    overlap(step).explain(*args)
    without = len(asked)
    overlap(step_of()[0], memory=0.9).explain(*args)
    assert len(asked) - without <= without + 6


def small(policy=None, *, scanned=True):
    """Return a step of four layers, and its arguments; it compiles in a second or two."""
    mesh = pod_mesh("h100-sxm:1x8", {"fsdp": 4, "tp": 2})

    def layer(x, w):
        up, down = w
        hidden = jax.nn.gelu(x @ up)
        x = x + jnp.sin(jax.nn.gelu(hidden * 2) @ down)
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("fsdp"))), None

    def loss(w, x):
        run = jax.checkpoint(layer, policy=policy)
        if scanned:
            return jnp.mean(jax.lax.scan(run, x, w)[0].astype(jnp.float32) ** 2)
        for number in range(4):
            x = run(x, jax.tree.map(lambda a, n=number: a[n], w))[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def given(*dims, spec):
        at = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=at)

    w = given(4, 512, 4096, spec=(None, "fsdp", "tp")), given(4, 4096, 512, spec=(None, "tp"))
    step = jax.jit(jax.grad(loss))
    return step, (w, given(16384, 512, spec=("fsdp",)))


def needs(step, args, options=None) -> int:
    return peak_bytes(step.lower(*args).compile(options).memory_analysis())


@marked(pods)
def test_the_compiled_step_needs_no_more_than_was_said():
    step, args = small()
    plain, most = needs(step, args), needs(overlap(step, memory=0.9), args)
    assert most > plain
    budget = int(plain + 0.5 * (most - plain))
    assert needs(overlap(step, memory=f"{budget / 1e6:.0f}MB"), args) <= budget + 1e6
    with pytest.raises(
        ValueError, match=r"a device needs .*, .* too many, although nothing is kept"
    ):
        overlap(step, memory=f"{plain / 2e6:.0f}MB").lower(*args).compile()


@marked(pods)
def test_values_without_room_wait_in_the_hosts_memory():
    step, args = step_of()
    plan = overlap(step, memory="350MB", never_slower=False).explain(*args)
    offloaded = [edit for edit in plan.edits if isinstance(edit, Offload)]
    moved = sum(edit.bytes_offloaded for edit in offloaded)
    assert len(offloaded) >= 2
    assert f"MB more and offloads {human_bytes(moved)} to the host: " in plan.notes[0]
    followed = jaxoverlap.overlap(step, plan=plan)
    assert followed.explain(*args).edits == plan.edits
    copies = jaxoverlap.audit(followed.lower(*args).compile()).host_coverage
    once = moved * (SIZES.layers - 1) // SIZES.layers  # the last value stays
    for direction in (FROM_HOST, TO_HOST):
        assert copies[direction].synchronous == 0
        assert once <= copies[direction].bytes_moved <= moved


@marked(pods)
def test_values_of_layers_written_one_after_the_other_wait_too():
    step, args = small(scanned=False)
    overlapped = overlap(step, memory="211MB", never_slower=False)
    edits = overlapped.explain(*args).edits
    moved = sum(edit.bytes_offloaded for edit in edits if isinstance(edit, Offload))
    compiled = overlapped.lower(*args).compile()
    copies = jaxoverlap.audit(compiled).host_coverage
    for direction in (FROM_HOST, TO_HOST):
        assert copies[direction].synchronous == 0
        assert copies[direction].bytes_moved == moved > 0
    assert peak_bytes(compiled.memory_analysis()) <= 211e6


@marked(pods)
def test_a_step_is_refused_without_a_comparison_too():
    step, args = small()
    lowered = overlap(step, memory="90MB", never_slower=False).lower(*args)
    with pytest.raises(ValueError, match=r"memory='90.0 MB': a device needs .* too many"):
        lowered.compile()


@marked(pods)
def test_a_step_that_does_not_fit_is_made_to_fit():
    step, args = small(policy=jax.checkpoint_policies.everything_saveable)
    budget = needs(step, args) / 1.3
    overlapped = overlap(step, memory=f"{budget / 1e6:.0f}MB")
    assert needs(overlapped, args) <= budget + 1e6
    plan = overlapped.explain(*args)
    assert isinstance(plan.edits[0], Recompute)
    (note,) = (line for line in plan.notes if "recomputes layers" in line)
    assert re.search(r"needs about .* MB of .* MB as written: .* MB less, .* ms -> .* ms", note)
    followed = jaxoverlap.overlap(step, plan=plan).explain(*args)
    assert followed.edits == plan.edits


@pytest.mark.parametrize("given", [0, -1, 1.5, "70", "x", "70 kB", True, [1], float("nan")])
def test_wrong_memory_is_an_error(given):
    with pytest.raises(ValueError, match=r"memory=.*: expected a share of the device's memory"):
        jaxoverlap.overlap(jax.jit(lambda x: x), memory=given)


@pytest.mark.parametrize("option", ["keep", "recompute"])
def test_wrong_names_are_errors(option):
    given: dict = {option: "attn_out"}
    with pytest.raises(ValueError, match=f"{option}='attn_out': expected checkpoint names"):
        jaxoverlap.overlap(jax.jit(lambda x: x), memory=0.9, **given)


def test_options_that_contradict_each_other_are_errors():
    step = jax.jit(lambda x: x)
    with pytest.raises(ValueError, match="keep= and recompute= both name 'a'"):
        jaxoverlap.overlap(step, memory=0.9, keep=["a"], recompute=["a"])
    for option in ({"memory": 0.9}, {"keep": ["a"]}):
        with pytest.raises(ValueError, match="tune= with memory= or keep="):
            jaxoverlap.overlap(step, tune=True, **option)
    with pytest.raises(ValueError, match="recompute= without memory="):
        jaxoverlap.overlap(step, recompute=["a"])


def sharded():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    at = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(jnp.ones((16, 8)), at)
    step = jax.jit(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x.T))(x).sum()))
    return step, x


def test_memory_without_prices_is_an_error():
    step, x = sharded()
    with pytest.raises(ValueError, match=r"memory=0.9: there is no cost model of the step's"):
        jaxoverlap.overlap(step, memory=0.9)(x)


def test_a_name_of_nothing_is_an_error():
    step, x = sharded()
    with pytest.raises(ValueError, match=r"keep='attn' names nothing .* computes again: .*\.py:"):
        jaxoverlap.overlap(step, keep=["attn"])(x)
