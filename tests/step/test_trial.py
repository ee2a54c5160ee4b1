"""Candidates are compiled in child processes, for pods without a GPU and for CPU devices."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import defaultdict

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import jobs
from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap._util import workers
from jaxoverlap.cost.find import cost_model
from jaxoverlap.passes.scheduling.scheduler import Scheduler, scheduler_pass_for
from jaxoverlap.step import trial
from jaxoverlap.step.trial import Request, attempt, refused
from tests.support.megatron import POD, megatron
from tests.support.pods import pytestmark as pods


@pytest.fixture(scope="module")
def request_() -> Request:
    step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
    cost = cost_model(POD)
    lowered = jaxoverlap.overlap(step, cluster=POD).lower(*args)
    assert lowered._ordering is not None
    return Request(jobs.job_of(lowered._lowered), cost, lowered._ordering)


def broken(request: Request) -> Request:
    return dataclasses.replace(request, job=dataclasses.replace(request.job, module=b"no module"))


@pytest.mark.anew  # a child compiles by itself, and leaves its kernels
class TestPods:
    pytestmark = pods

    def test_a_child_finds_what_this_process_does(self, request_, tmp_path):
        outcome = attempt(request_, tmp_path, 300)
        step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
        overlapped = jaxoverlap.overlap(step, cluster=POD, never_slower=False)
        here = overlapped.lower(*args).compile()
        times = outcome.simulated
        assert outcome.step_s == times.step_s
        assert outcome.step_s == pytest.approx(here.simulate().step_s)
        hops = here.audit().hops
        assert (times.hops, times.hops_covered) == (hops.count, hops.covered) == (14, 14)
        memory = here.memory_analysis()
        assert outcome.peak_bytes == (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        assert {w.ring for w in times.waited} == {
            "all_gather_matmul.0",
            "matmul_reduce_scatter.1",
        }
        text = trial.schedule_of(request_, tmp_path)
        assert jaxoverlap.simulate(text, POD).step_s == outcome.step_s

    def test_kernels_that_are_there_change_nothing(self, request_, tmp_path):
        kernels = KnownKernels()
        first, again = tmp_path / "first", tmp_path / "again"
        first.mkdir()
        again.mkdir()
        made = attempt(request_, first, 300, kernels)
        assert attempt(request_, again, 300, kernels) == made and not made.refusal
        with kernels.lent() as loan:
            assert b"fusion" in loan.file.read_bytes()
        text = trial.schedule_of(request_, again)
        assert text == trial.schedule_of(request_, first)

    def test_what_was_tried_is_not_tried_again(self, request_, tmp_path, monkeypatch):
        known = refused("known")
        (tmp_path / f"{request_.key}.json").write_bytes(msgspec.json.encode(known))
        monkeypatch.setattr(trial, "_in_child", None)
        assert attempt(request_, tmp_path, 300) == known

    def test_the_key_is_of_all_that_matters(self, request_):
        other = dataclasses.replace(
            request_, ordering=scheduler_pass_for("step", request_.cost, Scheduler(slack=0.5))
        )
        slower = dataclasses.replace(request_, cost=cost_model("h200:1x8"))
        keys = {r.key for r in (request_, other, slower, broken(request_))}
        assert len(keys) == 4 and request_.key in keys

    def test_a_damaged_result_is_made_anew(self, request_, tmp_path, monkeypatch):
        (tmp_path / f"{request_.key}.json").write_text('{"type": "done"')
        monkeypatch.setattr(trial, "_in_child", lambda *args: refused("anew"))
        assert attempt(request_, tmp_path, 300) == refused("anew")

    def test_a_child_that_fails_says_why(self, request_, tmp_path):
        outcome = attempt(broken(request_), tmp_path, 300)
        assert not outcome.again and not outcome.peak_bytes
        assert outcome.refusal.startswith("exit 1: ") and "MLIRError" in outcome.refusal

    def test_a_child_that_takes_too_long_may_be_tried_again(self, request_, tmp_path):
        outcome = attempt(request_, tmp_path, 0.5)
        assert outcome == refused("stopped after 0 s", again=True)
        assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("again", [False, True])
def test_what_fails_with_the_kernels_of_others_is_tried_without(monkeypatch, tmp_path, again: bool):
    job = jobs.Job(b"", b"", "cpu", (0,))
    named_twice, fine, lent = refused("two names", again=again), refused("no"), list[bool]()

    def in_child(request, schedule, file, timeout_s):
        lent.append(file.exists())
        return named_twice if file.exists() else fine

    monkeypatch.setattr(trial, "_in_child", in_child)
    kernels = KnownKernels()
    with kernels.lent() as loan:
        loan.file.write_bytes(b"kernels")
        loan.ended_well = True
    outcome = attempt(Request(job, cost_model(POD), None), tmp_path, 60, kernels)
    assert (outcome, lent) == ((named_twice, [True]) if again else (fine, [True, False]))


@pytest.mark.parametrize("ends", ["os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_child_that_is_killed_is_a_result(monkeypatch, tmp_path, ends: str):
    """A child is killed by a check that fails in the compiler, or by a machine out of memory."""
    job = jobs.Job(b"", b"", "cpu", (0,))
    request = Request(job, cost_model(POD), None)
    program = f"import os, signal, sys; print('F1121 the check', file=sys.stderr); {ends}"
    popen = subprocess.Popen
    monkeypatch.setattr(
        workers.subprocess,
        "Popen",
        lambda _, **given: popen([sys.executable, "-c", program], **given),
    )
    monkeypatch.setattr(workers, "_idle", defaultdict(list))
    outcome = attempt(request, tmp_path, 60)
    assert outcome.again == ("SIGKILL" in ends)
    assert outcome.refusal == f"{'SIGKILL' if outcome.again else 'SIGABRT'}: F1121 the check"


def test_children_end_with_their_parent(tmp_path):
    """A child waits for its parent's end on the pipe; here the parent is this process."""
    program = (
        "import threading, time; from jaxoverlap._util import workers;"
        "threading.Thread(target=workers.end_with_parent, daemon=True).start();"
        "print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout and child.stdout.readline() == b"ready\n"
    child.stdin.close()
    assert child.wait(timeout=30) == 1


def test_a_cpu_job_compiles_as_it_would_here(tmp_path):
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    at = NamedSharding(mesh, P("tp"))
    step = jax.jit(lambda x, w: x @ w, out_shardings=at)
    args = (jax.ShapeDtypeStruct((64, 64), np.float32, sharding=at),) * 2
    lowered = step.lower(*args)
    job = jobs.job_of(lowered)
    assert job.platform == "cpu" and len(job.positions) == 8
    done, here = jobs.compile_job(job, jax.devices(), tmp_path / "kernels"), lowered.compile()
    assert "all-gather" in done.text
    assert done.peak_bytes == jobs.peak_bytes(here.memory_analysis())


def test_a_step_that_calls_back_cannot_go_elsewhere():
    def step(x):
        jax.debug.callback(print, x.sum())
        return x * 2

    lowered = jax.jit(step).lower(jnp.ones(3))
    with pytest.raises(ValueError, match="calls back into Python"):
        jobs.job_of(lowered)
