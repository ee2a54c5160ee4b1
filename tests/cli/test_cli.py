"""The `jaxoverlap` command prints its results, ends with an exit code and tells of errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxoverlap
from jaxoverlap.cli import app
from jaxoverlap.cli.shell.options import parse_axes
from jaxoverlap.flags import PRESETS, preset
from jaxoverlap.flags.presets import DATES
from jaxoverlap.plan.plan import Plan
from tests.support import build_step
from tests.support.command import python, run, run_json
from tests.support.pods import needs_plugin

POD = ("--pod", "h100-sxm:1x4", "--mesh", "tp=4")
pods = pytest.mark.pods


# -- flags and pods ---------------------------------------------------------------------------------


def test_a_preset_is_a_table_with_reasons_and_sources():
    shown = run("flags", "gcp-a3-mega")
    for s in PRESETS["gcp-a3-mega"].settings:
        assert s.name in shown
    assert "Google's" in shown
    assert "gpu-recipes@2e1fd5e src/helm-charts/a3mega/nccl-tests (2026-08-12)" in shown


def test_every_source_that_names_a_commit_has_its_date():
    cited = {s for p in PRESETS.values() for one in p.settings for s in one.source.split("; ")}
    cited |= {s for p in PRESETS.values() for c in p.conflicts for _, s in c.said}
    commits = {s.partition("@")[2].partition(" ")[0] for s in cited if "@" in s}
    assert commits and commits <= DATES.keys()


def test_a_preset_in_the_forms_that_machines_take():
    h200 = preset("h200:2x8")
    assert json.loads(run("flags", "h200:2x8", "--as", "options")) == h200.options
    assert run("flags", "h200:2x8", "--as", "xla-flags").strip() == h200.xla_flags
    assert run("flags", "h200:2x8", "--as", "env") == h200.env_file
    whole = run_json("flags", "h200:2x8")
    assert whole["name"] == "dgx-h200"
    assert {s["name"]: s["value"] for s in whole["settings"]} == h200.options | h200.variables
    assert whole["conflicts"][0]["said"]


def test_a_check_fails_if_a_flag_is_dead():
    shown = run("flags", "--check", "--xla_gpu_graph_level=0 --xla_gpu_autotune_level=3", code=1)
    assert "rejected" in shown and "1 rejected, 1 set" in shown
    assert "--xla_gpu_autotune_level" not in shown  # does what it says
    assert "1 renamed" in run("flags", "--check", "--xla_gpu_enable_pipelined_all_gather")
    done = CliRunner().invoke(app, ["flags", "--check", "--xla_gpu_graph_level=0", "--json"])
    assert done.exit_code == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["status"] == "rejected"


def test_pods_lists_chips_and_presets():
    shown = run("pods")
    assert "a100-sxm-80" in shown and "gcp-a3-high" in shown
    listed = run_json("pods")
    assert [c["name"] for c in listed["chips"]][2] == "h100-sxm"
    assert set(listed["presets"]) == set(PRESETS)


def test_pods_gives_meshes_that_fit():
    shown = run("pods", "h100-sxm:8x8")
    assert "--mesh data=8,model=8" in shown
    assert "model=16" not in shown  # would leave NVLink
    meshes = run_json("pods", "gb200:18x4")["meshes"]
    assert all(m["data"] * m["model"] == 72 for m in meshes)
    assert {"data": 1, "model": 72} in meshes
    assert "64 GPUs, 1 per process; an NVLink domain has 8, on 1 host." in run(
        "pods", "h100-sxm:8x8/8"
    )
    assert run_json("pods", "h100-sxm:8x8/2")["processes_per_host"] == 2


# -- steps ------------------------------------------------------------------------------------------


@needs_plugin
@pods
def test_explain_shows_the_plan():
    shown = run("explain", "tests.support.build_step", *POD)
    assert "2 matmuls: 2 ringed" in shown
    assert "estimated from XLA's partitioned program" in shown
    plan = run_json("explain", "tests.support.build_step:build", *POD)
    assert [e["type"] for e in plan["entries"]] == ["ring", "ring"]


@needs_plugin
@pods
def test_explain_writes_its_plan(tmp_path: Path):
    file = tmp_path / "plan.json"
    shown = run("explain", "tests.support.build_step", *POD, "--plan", str(file))
    assert f"written to {file}: jaxoverlap.overlap(step, plan={str(file)!r})" in shown
    step, args = build_step.build(jaxoverlap.pod_mesh("h100-sxm:1x4", {"tp": 4}))
    followed = jaxoverlap.overlap(step, plan=file).lower(*args).plan
    assert followed.edits == Plan.read(file).edits and followed.rings


@needs_plugin
@pods
def test_a_report_is_printed_even_where_its_files_cannot_be_written(tmp_path: Path, monkeypatch):
    def full(path: object, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("jaxoverlap.simulation.report.svg.write_atomically", full)
    svg = ("--svg", str(tmp_path / "a.svg"))
    shown = run("simulate", "tests.support.build_step:whole", *POD, *svg, code=4)  # by `full`
    assert "on h100-sxm:1x4: step " in shown and "No space left" in shown


@needs_plugin
@pods
def test_explain_says_no_where_nothing_is_to_hide():
    shown = run("explain", "tests.support.build_step:whole", *POD, code=1)
    assert "0 ringed" in shown
    assert "\nWarning: overlap() rewrites nothing" in f"\n{shown}"


@needs_plugin
@pods
def test_explain_takes_a_trainer():
    assert run_json("explain", "models.gpt", "--pod", "h100-sxm:1x8", "--mesh", "data=1,model=8")


@needs_plugin
@pods
def test_audit_counts_and_can_be_held_to_a_share():
    shown = run("audit", "tests.support.build_step", *POD, "--plain", "--at-least", "0.5")
    assert "6 of 6 covered" in shown and "the plain step's:  " in shown
    assert re.search(r"\nhidden: \d+\.\d% of \S+ ms of communication, by simulation\n", shown)
    assert re.search(r"\nplain \S+ ms -> overlapped \S+ ms, \S+ x\n", shown)
    got = run_json("audit", "tests.support.build_step:overlapped", *POD, "--keep-rings")[
        "overlapped"
    ]
    assert got["speedup"] is None
    assert got["hops"]["count"] == got["hops"]["covered"] == 6
    assert len(got["collectives"]) >= 6


@needs_plugin
@pods
def test_a_step_without_rings_is_held_to_what_is_hidden_of_its_communication():
    """Its hops are 0 of 0, which once passed for all covered."""
    for command in ("audit", "simulate"):
        arguments = (command, "tests.support.build_step:gathered", *POD)
        assert "hidden: " in run(*arguments, "--at-least", "0.95", code=1)
        run(*arguments, "--at-least", "0")


@needs_plugin
@pods
def test_simulate_gives_sums_that_add_up_and_draws(tmp_path: Path):
    files = {f"--{kind}": tmp_path / f"step.{kind}" for kind in ("html", "svg", "perfetto")}
    drawn = [word for name, path in files.items() for word in (name, str(path))]
    steps = run_json("simulate", "tests.support.build_step", *POD, "--plain", *drawn)
    assert set(steps) == {"overlapped", "plain"}
    for s in steps.values():
        assert s["step_s"] == pytest.approx(s["compute_s"] + s["slowdown_s"] + s["exposed_s"])
        assert s["exposed_s"] == pytest.approx(sum(c["exposed_s"] for c in s["spent"]))
    assert steps["overlapped"]["exposed_s"] < steps["plain"]["exposed_s"]
    said = steps["overlapped"]["speedup"]
    assert said["taken"] == "overlapped" and said["plain_s"] == steps["plain"]["step_s"]
    fewer = steps["overlapped"]["fewer_channels"]
    assert fewer is None or fewer["step_s"] < steps["overlapped"]["step_s"]
    assert "plain" in files["--svg"].read_text()
    assert "<html" in files["--html"].read_text()
    assert json.loads(files["--perfetto"].read_text())["traceEvents"]


@needs_plugin
@pods
def test_simulate_prints():
    shown = run("simulate", "tests.support.build_step:whole", *POD, "--keep-rings")
    assert "on h100-sxm:1x4: step " in shown and "longest exposed" in shown


@needs_plugin
@pods
def test_simulate_names_the_meshes_that_are_faster():
    step = ("simulate", "tests.support.build_step:gathered_over_tp", "--pod", "h100-sxm:1x4")
    shown = run(*step, "--mesh", "data=1,tp=4", "--meshes").splitlines()[-1]
    named = re.findall(r"(data=\d tp=\d) [\d.]+ ms", shown)
    assert named == ["data=4 tp=1", "data=2 tp=2", "data=1 tp=4"] and "(estimated)" in shown
    shown = run(*step, "--mesh", "data=4,tp=1", "--meshes").splitlines()[-1]
    assert shown.startswith(
        "no other mesh is faster for the step as it is (estimated): data=4 tp=1"
    )
    assert len(run_json(*step, "--mesh", "data=4,tp=1", "--meshes")["meshes"]) == 3


@needs_plugin
@pods
def test_processes_of_a_host_are_said_by_an_option_or_after_a_slash():
    shown = run("explain", "tests.support.build_step", *POD, "--processes-per-host", "4")
    assert "The cluster is taken to be h100-sxm:1x4/4 (hosts x GPUs / processes a host)" in shown
    mesh = ("--mesh", "tp=4")
    assert shown == run("explain", "tests.support.build_step", "--pod", "h100-sxm:1x4/4", *mesh)
    for command, *more in (("audit", "--keep-rings"), ("simulate", "--plain", "--keep-rings")):
        option = run_json(
            command, "tests.support.build_step", *POD, *more, "--processes-per-host", "4"
        )
        slash = run_json(
            command, "tests.support.build_step", "--pod", "h100-sxm:1x4/4", *mesh, *more
        )
        host = run_json(
            command, "tests.support.build_step", *POD, *more, "--processes-per-host", "1"
        )
        assert option == slash != host


# -- mistakes and failures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("flags",), "flags needs a pod"),
        (("flags", "h100-sxm:1x8", "--check", "--xla_a=1"), "flags needs a pod"),
        (("flags", "nope"), "unknown preset 'nope'"),
        (("flags", "--check", "nothing"), "no flags in 'nothing'"),
        (("pods", "h100:8"), "cannot read 'h100:8'"),
        (
            ("explain", "tests.support.build_step", "--pod", "h100-sxm:1x4", "--mesh", "tp"),
            "--mesh 'tp'",
        ),
        (
            ("explain", "tests.support.build_step", "--pod", "h100-sxm:1x4"),
            "Missing option '--mesh'",
        ),
        (("explain",), "Missing:\n  step: MODULE:FUNCTION"),
        (("explain", "x"), "Missing:\n  --pod: The GPUs, as in h100-sxm:8x8"),
        (("explain", "x"), "\n  --mesh: The mesh's axes"),
        (
            ("explain", "x", "--pod", "gcp-a3-mega", "--mesh", "data=8"),
            "machines have h100-sxm: write their chip, hosts and GPUs per host, as in --pod h100-sxm:8x8",
        ),
        (
            ("configure", "llama2-7b", "--pod", "aws-p5:2x8", "--global-batch", "8"),
            "--pod h100-sxm:2x8",
        ),
        (("explain", "x", "--pod", "v5p:8x8", "--mesh", "data=8"), "TPUs are not supported"),
        (("explain", "x", *POD, "--plan", "/no/such/folder/p.json"), "there is no folder"),
        (
            ("configure", "llama2-7b", "--pod", "h100-sxm:1x8", "--picture", "/no/such/x.svg"),
            "there is no folder",
        ),
        (("audit", "tests.support.build_step", *POD, "--at-least", "2"), "--at-least"),
        (("explain", "x", *POD, "--processes-per-host", "3"), "3 processes on a host of 4 GPUs"),
        (("audit", "x", *POD, "--processes-per-host", "0"), "--processes-per-host"),
        (
            (
                *("simulate", "x", "--pod", "h100-sxm:1x8/8", "--mesh", "tp=8"),
                *("--processes-per-host", "2"),
            ),
            "h100-sxm:1x8/8 has 8 processes on each host, and --processes-per-host says 2",
        ),
        (
            ("tune", "x", "--mesh", "tp=8", "--measure", "--processes-per-host", "8"),
            "--processes-per-host describes the hosts of a --pod",
        ),
        (("simulate", "x", *POD, "--html", "/no/such/folder/x.html"), "there is no folder"),
        (("simulate", "x", *POD, "--svg", "/proc/x.svg"), "cannot be written"),
        (("profile", ".", "--pod", "h100-sxm:1x8", "--perfetto", "/proc/x"), "cannot be written"),
    ],
)
def test_a_mistake_is_a_line_and_code_2(arguments: tuple[str, ...], says: str):
    shown = run(*arguments, code=2)
    assert says in shown
    assert "Traceback" not in shown


@needs_plugin
@pods
@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("tests.nothing_here", "no module 'tests.nothing_here'"),
        ("nowhere.at.all:build", "no module 'nowhere'"),
        ("tests.support.build_step:nope", "tests.support.build_step has no function 'nope'"),
        ("tests.support.build_step:no_pair", "expected (step, args)"),
    ],
)
def test_what_is_no_step_says_what_is(step: str, says: str):
    assert says in run("explain", step, *POD, code=2)


@needs_plugin
@pods
def test_plain_wants_the_step_as_it_was():
    shown = run("simulate", "tests.support.build_step:overlapped", *POD, "--plain", code=2)
    assert "as it was before overlap()" in shown


@needs_plugin
@pods
def test_a_targets_failure_is_a_line_and_code_4_and_a_trace_with_debug():
    shown = run("explain", "tests.support.build_step:broken", *POD, code=4)
    assert "Error: RuntimeError: no such checkpoint\n  at tests/support/build_step.py:" in shown
    assert "this trainer's axes are data, model" in run("explain", "models.gpt", *POD, code=4)
    done = CliRunner().invoke(app, ["explain", "tests.support.build_step:broken", *POD, "--debug"])
    assert isinstance(done.exception, RuntimeError)


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=2,data=4", "=4", "data=-2"])
def test_axes_that_are_none(text: str):
    with pytest.raises(ValueError, match="expected axes and their sizes"):
        parse_axes(text)


def test_axes_keep_their_order():
    assert list(parse_axes("data=8, model=4").items()) == [("data", 8), ("model", 4)]


# -- as a process -----------------------------------------------------------------------------------


def test_python_runs_the_package(tmp_path: Path):
    done = python("-m", "jaxoverlap", "flags", "aws-p5", "--as", "xla-flags", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == preset("aws-p5").xla_flags


@needs_plugin
@pods
def test_the_script_finds_a_module_beside_it(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from tests.support.build_step import broken as build\n")
    script = "from jaxoverlap.cli import main; main()"  # an installed `jaxoverlap` does this
    done = python("-P", "-c", script, "explain", "mine", *POD, cwd=tmp_path)
    assert done.returncode == 4
    assert "Error: RuntimeError: no such checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
