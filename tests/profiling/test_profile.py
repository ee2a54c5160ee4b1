"""A profile is added up, set beside the simulation of the same step, and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import jaxoverlap
from jaxoverlap.calibrate import calibrate
from jaxoverlap.cost.find import cost_model
from jaxoverlap.profiling.profile import Profile, read
from tests.profiling import synthetic
from tests.profiling.synthetic import Ran
from tests.support.command import run, run_json

POD = "h100-sxm:1x2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two GPUs that ran a step three times; GPU 1 is late for its gather."""
    path = tmp_path_factory.mktemp("profile")
    synthetic.write(path / "a.xplane.pb", synthetic.two_gpus(), synthetic.MODULES)
    return path


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return read(folder, POD)


def test_the_step_is_the_mean_over_devices(profile: Profile):
    """By hand, from `synthetic.step`: 12 us less are exposed on the GPU that came late, and idle."""
    us = {
        name: pytest.approx(value * 1e-6) for name, value in dict(step_s=112, compute_s=74).items()
    }
    assert {name: getattr(profile.sums, name) for name in us} == us
    assert profile.sums.communication_s == pytest.approx((68 + 38) / 2 * 1e-6)
    assert profile.sums.exposed_s == pytest.approx((30 + 18) / 2 * 1e-6)
    assert profile.sums.idle_s == pytest.approx((8 + 20) / 2 * 1e-6)
    assert profile.devices["GPU 1"].exposed_s == pytest.approx(18e-6)
    assert (len(profile.steps_s), profile.incomplete) == (3, 0)


def test_rows_have_rings_lines_waits_and_what_ran_beside(profile: Profile):
    gather, hop = profile.rows
    assert (gather.kind, gather.source, gather.devices) == ("all-gather", "model/mlp.py:11", 2)
    assert gather.seconds == pytest.approx((48 + 18) / 2 * 1e-6)
    assert gather.waited_s == pytest.approx(15e-6)  # GPU 0 alone waited, 30
    assert gather.overlapped_with == ("matmul",)
    assert (hop.ring, hop.runs, hop.exposed_s) == ("all_gather_matmul.7", 2, 0)
    assert hop.bytes_moved == 2 * 512 * 512 * 2
    assert hop.overlapped_with == ("inner",)
    assert [(one.device, one.times) for one in profile.stragglers] == [("GPU 1", 1), ("GPU 0", 2)]
    lines = {row.source: row for row in profile.lines}
    assert lines["model/mlp.py:12"].compute_s == pytest.approx(40e-6)
    assert lines["model/mlp.py:11"].exposed_s == pytest.approx(24e-6)
    streams = {row.stream: row.busy_s for row in profile.streams}
    assert streams == {"Stream #14": pytest.approx(74e-6), "Stream #22": pytest.approx(68e-6)}
    starts = [run.start_s for run in profile.collectives]
    assert starts == pytest.approx([12e-6, 60e-6, 90e-6])


def test_each_class_has_its_ratio(profile: Profile):
    assert profile.simulation
    by_name = {e.name: e for e in profile.simulation.events}
    ratios = {r.kind: r for r in profile.ratios}
    assert set(ratios) == {"matmul", "memory", "all-gather", "collective-permute"}
    matmul_s = by_name["matmul"].seconds + 2 * (by_name["inner"].end_s - by_name["inner"].start_s)
    assert ratios["matmul"].ratio == pytest.approx(60e-6 / matmul_s, rel=1e-6)
    # What GPU 0 waited for GPU 1 is no part of what the gather takes.
    assert ratios["all-gather"].measured_s == pytest.approx(18e-6)


def test_a_loop_whose_trips_are_unknown_counts_as_often_as_it_ran(folder: Path, profile: Profile):
    known = ', backend_config={"known_trip_count":{"n":"2"}}'
    assert known in synthetic.MODULE
    unknown = read(folder, POD, compiled=synthetic.MODULE.replace(known, ""))
    assert {r.kind: pytest.approx(r.ratio) for r in profile.ratios} == {
        r.kind: r.ratio for r in unknown.ratios
    }


def test_a_profile_corrects_the_prices(folder: Path, profile: Profile, tmp_path: Path):
    out = tmp_path / "prices.json"
    calibrate.main(["--from-profile", str(folder), "--pod", POD, "--out", str(out)])
    again = read(folder, cost_model(table=out))
    assert str(again.simulation.cluster) == POD  # type: ignore[union-attr] # the file names it
    assert {r.kind: pytest.approx(1, rel=0.01) for r in again.ratios} == {
        r.kind: r.ratio for r in again.ratios
    }
    assert any(abs(r.ratio - 1) > 0.3 for r in profile.ratios)
    jaxoverlap.overlap(lambda x: x, prices=out)


def test_a_profile_without_what_was_predicted_corrects_nothing(tmp_path: Path):
    lines = {"Stream #1(Compute)": [synthetic.kernel("fusion", "other", 0, 9)]}
    synthetic.write(tmp_path / "a.xplane.pb", {"/device:GPU:0": lines}, synthetic.MODULES)
    with pytest.raises(ValueError, match="shows no kernel that was predicted"):
        calibrate.main(
            ["--from-profile", str(tmp_path), "--pod", POD, "--out", str(tmp_path / "p.json")]
        )


def test_pictures_show_measured_below_simulated(profile: Profile, tmp_path: Path):
    profile.to_html(page := tmp_path / "step.html")
    data = json.loads(
        re.search(r'id="data" type="application/json">(.*?)</script>', page.read_text())[1]  # type: ignore[index]
    )
    assert [s["headline"].split(":")[0] for s in data["steps"]] == ["simulated", "measured"]
    assert data["lanes"][:1] == ["compute"] and "NVLink" in data["lanes"]
    assert data["steps"][1]["step_s"] == pytest.approx(112e-6)
    profile.to_svg(svg := tmp_path / "step.svg")
    assert svg.read_text().index("simulated: step") < svg.read_text().index("measured: step")
    profile.to_perfetto(trace := tmp_path / "step.json")
    drawn = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    kinds = [e["cat"] for e in drawn if e["pid"] == 1]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "matmul": 3, "memory": 3, "collective": 3, "wait": 1
    }  # fmt: skip


def test_a_graph_is_named_and_counts_as_compute(tmp_path: Path):
    graph = Ran("CudaGraphExec:5", 0, 40, {"cuda_graph_exec_id": 5})
    lines = {"Stream #1(CudaGraph)": [graph, Ran("ncclDevKernel_AllGather_RING_LL()", 20, 40)]}
    synthetic.write(tmp_path / "a.xplane.pb", {"/device:GPU:0": lines})
    profile = read(tmp_path)
    assert profile.graph_s == pytest.approx(40e-6)
    assert profile.sums.exposed_s == pytest.approx(20e-6)
    assert "CUDA graphs, each one event" in str(profile)
    assert "--xla_gpu_enable_command_buffer=" in str(profile)


def test_a_kernel_that_no_rule_knows_is_named(tmp_path: Path):
    lines = {"Stream #1(Compute)": [Ran("mystery_7", 0, 40)]}
    synthetic.write(tmp_path / "a.xplane.pb", {"/device:GPU:0": lines})
    assert "not known, counted as compute: mystery_7" in str(read(tmp_path))


def test_nothing_is_predicted_without_hlo(tmp_path: Path):
    path = synthetic.write(tmp_path / "a.xplane.pb", synthetic.two_gpus())
    with pytest.raises(ValueError, match="does not carry the HLO of jit_step"):
        read(path, POD)
    profile = read(path, POD, compiled=synthetic.MODULE)
    assert {r.kind for r in profile.ratios} >= {"matmul", "all-gather"}
    other = synthetic.MODULE.replace("HloModule jit_step", "HloModule jit_eval")
    with pytest.raises(ValueError, match=r"the given HLO is of 'jit_eval', but .* has jit_step"):
        read(path, compiled=other)
    with pytest.raises(ValueError, match="compiled for 2 devices, but cluster"):
        read(path, "h100-sxm:1x8", compiled=synthetic.MODULE)


def test_the_command(folder: Path, tmp_path: Path):
    page = tmp_path / "step.html"
    text = run("profile", str(folder), "--pod", POD, "--html", str(page), "--verbose")
    assert "jit_step on 2 GPUs (NVIDIA H100 80GB HBM3): step 0.112 ms" in text
    assert "simulated on h100-sxm:1x2" in text
    assert "collectives of GPU" in text
    assert page.exists()
    facts = run_json("profile", str(folder), "--pod", POD)
    assert facts["sums"]["exposed_s"] == pytest.approx(24e-6)
    assert facts["collectives"][0]["collective"]["kind"] == "all-gather"
    assert facts["ratios"][0]["ratio"] > 0 and facts["simulated"]["step_s"] > 0
    run("profile", str(folder), "--at-least", "0.99", code=1)
    said = run("profile", str(tmp_path / "nothing"), code=2)
    assert "there is no profile" in said
    run("profile", str(folder), "--html", "/no/such/x.html", code=2)
    run("profile", str(folder), "--hlo", "/no/such.hlo", code=2)
    run("profile", str(folder), "--processes-per-host", "2", code=2)
