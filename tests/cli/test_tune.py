"""`jaxoverlap tune` and `jaxoverlap plan` print, write and refuse what they should."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import jaxoverlap
from jaxoverlap.cli import app
from jaxoverlap.cli.differences import differences
from jaxoverlap.cli.tune import conditions
from jaxoverlap.flags import FLAGS
from jaxoverlap.flags.nccl_tuner import ChannelRow, tuner_csv
from jaxoverlap.plan.evaluation import Evaluation, Times
from jaxoverlap.plan.plan import Plan, Reason, Skip
from jaxoverlap.plan.trail import Proposed
from tests.support import build_step
from tests.support.command import python, run, run_json
from tests.support.plans import TUNED
from tests.support.pods import needs_plugin

TP = ("--mesh", "tp=8")
POD = ("--pod", "h100-sxm:1x8", *TP)


# -- tune -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Any, Path]:
    """Tune with time for nothing but the step as it is and the rules."""
    folder = tmp_path_factory.mktemp("tuned")
    where = ("--out", str(folder / "mine.json"), "--cache", str(folder))
    done = CliRunner().invoke(
        app, ["tune", "tests.support.build_step", *POD, "--budget", "0.1", *where]
    )
    return done, folder


@needs_plugin
@pytest.mark.pods
class TestPods:
    def test_the_plan_is_written_and_summed_up(self, tuned):
        done, folder = tuned
        plan = Plan.read(folder / "mine.json")
        assert done.exit_code == int(plan.plain), done.output
        assert plan.summary in done.stdout
        assert f"written to {folder}/mine.json" in done.stdout
        assert [row.stage for row in plan.tried] == ["plain", "rules"]
        for row in plan.tried:
            assert f"{row.evaluation.step_s * 1e3:.1f}" in done.stderr

    def test_processes_of_a_host_are_part_of_the_plan(self, tmp_path):
        where = ("--out", str(tmp_path / "plan.json"), "--cache", str(tmp_path))
        layout = ("--pod", "h100-sxm:1x4", "--mesh", "tp=4", "--processes-per-host", "4")
        command = ["tune", "tests.support.build_step", *layout, "--budget", "0.1", *where]
        CliRunner().invoke(app, command)
        plan = Plan.read(tmp_path / "plan.json")
        assert plan.made_for.cluster == "h100-sxm:1x4/4"
        (rules,) = (row.evaluation for row in plan.tried if row.stage == "rules")
        mesh = jaxoverlap.pod_mesh("h100-sxm:1x4/4", {"tp": 4})
        step, args = build_step.build(mesh)
        compiled = jaxoverlap.overlap(step, never_slower=False).lower(*args).compile()
        assert rules.step_s == compiled.simulate().step_s

    def test_the_one_taken_is_the_fastest_and_the_plans_own(self, tuned):
        plan = Plan.read(tuned[1] / "mine.json")
        (taken,) = (a for a in plan.tried if a.taken)
        assert taken.evaluation.step_s == min(row.evaluation.seconds for row in plan.tried)
        assert plan.plain == (taken.stage == "plain")
        assert not plan.nccl.channels and plan.predictions.step_s == taken.evaluation.step_s

    def test_as_json_from_the_cache(self, tuned, monkeypatch):
        """The second time nothing is tried, and the first time's table is shown."""
        done, folder = tuned
        monkeypatch.setattr("jaxoverlap.step.program.run_passes", None)
        where = ("--out", str(folder / "again.json"), "--cache", str(folder), "--json")
        again = CliRunner().invoke(
            app, ["tune", "tests.support.build_step", *POD, "--budget", "0.1", *where]
        )
        *progress, table = done.stderr.strip().split("tuning for")[1:]
        assert again.exit_code == done.exit_code
        assert again.stderr.strip() == f"tuning for{table}"
        assert len(progress) == 1, "it says at once what it begins with"
        first, *tried = progress[0].splitlines()
        assert first == " 0 s; the original step and overlap()'s own choice take what they need"
        assert [line.partition(": ")[2].partition(";")[0] for line in tried if line] == [
            "plain",
            "rules",
        ]
        plan, printed = Plan.read(folder / "mine.json"), json.loads(again.stdout)
        assert Plan.read(folder / "again.json") == plan
        assert printed["plan"] == f"{folder}/again.json"
        assert printed["predictions"] == msgspec.to_builtins(plan.predictions)
        assert printed["tried"] == json.loads(msgspec.json.encode(plan.tried))

    def test_the_file_is_followed(self, tuned):
        step, args = build_step.build(jaxoverlap.pod_mesh("h100-sxm:1x8", {"tp": 8}))
        lowered = jaxoverlap.overlap(step, plan=tuned[1] / "mine.json").lower(*args)
        assert lowered.plan.predictions == Plan.read(tuned[1] / "mine.json").predictions


def test_by_the_clock_where_nothing_is_known(tmp_path: Path):
    where = ("--out", str(tmp_path / "plan.json"), "--cache", str(tmp_path))
    command = ["tune", "tests.support.build_step:small", *TP, "--measure", *where]
    done = CliRunner().invoke(app, command)
    plan = Plan.read(tmp_path / "plan.json")
    assert done.exit_code == int(plan.plain), done.output
    assert plan.made_for and plan.made_for.cluster is None and plan.predictions is None
    assert plan.measured.step_s == min(
        row.evaluation.step_s for row in plan.tried if row.evaluation.by == "measured"
    )
    assert "measured ms" in done.stderr and "Measured: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tests.support.build_step", *TP), "tune needs --pod"),
        (
            ("tests.support.build_step", *TP, "--measure", "--budget", "-1"),
            "budget_s=-1.0: expected seconds",
        ),
        (
            ("tests.support.build_step", "--mesh", "tp=3", "--measure"),
            "has 3 devices, and JAX sees 8",
        ),
        (
            ("tests.support.build_step", *POD, "--out", "/no/such/folder/p.json"),
            "there is no folder",
        ),
        (("tests.support.build_step", *POD, "--out", "/proc/p.json"), "cannot be written"),
        (("tests.support.build_step", "--pod", "h100-sxm:1x8"), "Missing option '--mesh'"),
    ],
)
def test_what_tune_refuses(arguments: tuple[str, ...], says: str):
    shown = run("tune", *arguments, code=2)
    assert says in shown and "Traceback" not in shown


# -- plan show --------------------------------------------------------------------------------------


def compiled(step_s: float) -> Evaluation:
    times = Times(step_s=step_s, compute_s=0.7, communication_s=0.3, exposed_s=0.2, bound_s=0.7)
    return Evaluation(step_s=step_s, peak_bytes=9_100_000_000, by="compiled", times=times)


FELL = "SIGABRT: F0000 it fell over"
TRIED = (
    Proposed(stage="plain", evaluation=compiled(0.9073)),
    Proposed(stage="all rings", evaluation=Evaluation(refusal=FELL, by="compiled"), why_not=FELL),
)
FULL = msgspec.structs.replace(TUNED, trail=TRIED)


@pytest.fixture
def file(tmp_path: Path) -> str:
    FULL.write(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_a_plan_is_shown_with_all_that_it_says(file: str):
    shown = run("plan", "show", file)
    assert str(FULL) in shown
    for said in (*FULL.xla_options, *FULL.nccl.env, "all_gather", "ring, simple"):
        assert said in shown
    made_for = FULL.made_for
    for said in (made_for.step[:12], made_for.cluster, *made_for.versions.values()):
        assert said in shown
    assert "data: Auto over 2 NVLink domains; model: Auto" in shown
    assert "907.3" in shown and "SIGABRT: F0000 it fell over" in shown
    assert run("plan", "show", file, "--json").strip() == FULL.to_json()


def test_a_plan_in_the_forms_that_machines_take(file: str):
    options = json.loads(run("plan", "show", file, "--as", "options"))
    assert options == FULL.xla_options and options.keys() <= FLAGS.keys()
    line = run("plan", "show", file, "--as", "xla-flags").strip()
    assert line == "--xla_gpu_enable_latency_hiding_scheduler=true"
    assert run("plan", "show", file, "--as", "csv") == tuner_csv(FULL.nccl.channels)
    env = run("plan", "show", file, "--as", "env").splitlines()
    assert env[0] == "export NCCL_MAX_NCHANNELS=8"
    assert any(f"plan show {file} --as csv > tuner.csv" in line for line in env)
    assert all(shlex.split(line, comments=True)[:1] in ([], ["export"]) for line in env)


def test_a_plan_without_channels_has_no_tuner_file(tmp_path: Path):
    msgspec.structs.replace(FULL, nccl=jaxoverlap.Nccl()).write(tmp_path / "p.json")
    shown = run("plan", "show", str(tmp_path / "p.json"), "--as", "csv", code=2)
    assert "leaves all channels to NCCL" in shown
    assert run("plan", "show", str(tmp_path / "p.json"), "--as", "env").startswith("#")


def test_what_is_no_plan_is_refused(tmp_path: Path, file: str):
    Path(file).write_bytes(Path(file).read_bytes()[:-40])
    assert "truncated" in run("plan", "show", file, code=2)
    assert "truncated" in run("plan", "diff", file, file, code=2)
    assert "does not exist" in run("plan", "show", str(tmp_path / "none.json"), code=2)


def test_a_step_time_that_needs_nccls_plugin_says_so_and_what_it_is_without(file: str):
    assert FULL.nccl.channels and FULL.predictions
    taken = Proposed(stage="rules", evaluation=compiled(0.8))
    (said,) = conditions(msgspec.structs.replace(FULL, trail=(taken,)), Path(file))
    assert f"{FULL.predictions.step_s * 1e3:.1f} ms needs NCCL's tuner plugin" in said
    assert "without it the step takes 800.0 ms" in said and f"plan show {file} --as csv" in said
    without = msgspec.structs.replace(FULL, nccl=jaxoverlap.Nccl(), trail=(taken,))
    assert not list(conditions(without, Path(file)))


# -- plan diff --------------------------------------------------------------------------------------


def test_a_plan_does_not_differ_from_itself(file: str, tmp_path: Path):
    moved = msgspec.structs.replace(FULL.entries[3], source="gpt.py:99", why="another word")
    entries = (*FULL.entries[:3], moved, *FULL.entries[4:])
    again = msgspec.structs.replace(FULL, entries=entries, trail=())
    again.write(tmp_path / "again.json")
    shown = run("plan", "diff", file, str(tmp_path / "again.json"))
    assert "the same decisions" in shown
    assert run_json("plan", "diff", file, str(tmp_path / "again.json")) == []


def other() -> Plan:
    ring = FULL.entries[3]
    skip = Skip(
        site=3,
        source=ring.source,
        einsum=ring.einsum,
        runs=ring.runs,
        why=Reason("no ring", "left"),
    )
    row = msgspec.structs.replace(FULL.nccl.channels[0], channels=2)
    versions = {**FULL.made_for.versions, "jaxlib": "0.12.1"}
    return msgspec.structs.replace(
        FULL,
        entries=(*FULL.entries[:3], skip, *FULL.entries[4:]),
        schedule=None,
        xla_options={},
        nccl=msgspec.structs.replace(FULL.nccl, channels=(row,)),
        predictions=msgspec.structs.replace(FULL.predictions, step_s=0.8),
        made_for=msgspec.structs.replace(FULL.made_for, versions=versions),
    )


def test_each_thing_that_differs_is_named_with_both_sides():
    sides = {(d.part, d.name): (d.a, d.b) for d in differences(FULL, other())}
    assert sides.pop(("matmul", "3")) == (
        "abc,cd->abd, 4 times: all_gather_matmul over model, one_way, 8 chunks",
        "abc,cd->abd, 4 times: skipped",
    )
    assert sides.pop(("compile", "schedule")) == ({"slack": 0.05, "in_flight": 8}, None)
    option = "xla_gpu_enable_latency_hiding_scheduler"
    assert sides.pop(("option", option)) == ("True", None)
    rows = sides.pop(("nccl", "all_gather 0 to 1048576 bytes, 16 GPUs on 2 hosts"))
    assert [row["channels"] for row in rows] == [4, 2]
    assert sides.pop(("predicted", "step_s")) == (0.7575, 0.8)
    assert sides.pop(("made for", "versions jaxlib")) == ("0.12.0", "0.12.1")
    assert not sides


def test_a_difference_is_code_1(file: str, tmp_path: Path):
    other().write(tmp_path / "other.json")
    shown = run("plan", "diff", file, str(tmp_path / "other.json"), code=1)
    assert "skipped" in shown and "0.7575" in shown
    done = CliRunner().invoke(app, ["plan", "diff", file, str(tmp_path / "other.json"), "--json"])
    assert done.exit_code == 1 and len(json.loads(done.stdout)) == 6


def test_what_only_one_plan_says_differs():
    row = ChannelRow(kind="all_reduce", min_bytes=0, max_bytes=9, channels=None)
    bare = msgspec.structs.replace(FULL, predictions=None, nccl=jaxoverlap.Nccl(channels=(row,)))
    differing = {(d.part, d.name): d for d in differences(bare, FULL)}
    assert differing["nccl", "NCCL_MAX_NCHANNELS"].a is None
    assert differing["predicted", "step_s"].b == 0.7575
    assert differing["nccl", "all_reduce 0 to 9 bytes, any GPUs on any hosts"].b is None


def test_plans_of_different_steps_are_said_to_be_and_not_listed_matmul_by_matmul(
    file: str, tmp_path: Path
):
    made_for = msgspec.structs.replace(FULL.made_for, step="6a" * 32, arguments=("float32[4]",))
    another = msgspec.structs.replace(other(), entries=FULL.entries[:2], made_for=made_for)
    another.write(tmp_path / "other.json")
    shown = run("plan", "diff", file, str(tmp_path / "other.json"), code=1)
    first = shown.splitlines()[0]
    assert first.startswith("The plans are for different steps: train_step on data 2 x model 8, 6 ")
    assert "; train_step on data 2 x model 8, 2 matmuls. Their matmuls and edits" in first
    parts = {(d.part, d.name) for d in differences(FULL, another)}
    assert ("made for", "step") in parts and ("predicted", "step_s") in parts
    assert not [one for one in parts if one[0] in ("matmul", "edit") or "arguments" in one[1]]


def test_as_a_process(tmp_path: Path):
    FULL.write(tmp_path / "a.json")
    done = python("-m", "jaxoverlap", "plan", "diff", "a.json", "a.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "a.json and a.json have the same decisions, predictions and origin\n"
