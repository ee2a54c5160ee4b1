"""The measurements on one GPU, rehearsed on CPU devices; and processes and MPS end, always."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from benchmarks.frame import read_rows
from benchmarks.gpu import curve, hang, jobs, kernels, machine, race, systems
from benchmarks.gpu.__main__ import app
from benchmarks.gpu.machine import MissingError, mps, nccl, processes_with
from benchmarks.gpu.place import Place
from benchmarks.gpu.processes import FailedError, Start, messages
from benchmarks.gpu.race import COLUMNS, table, verdicts
from benchmarks.gpu.wires import WIRES
from jaxoverlap._jax import jits
from jaxoverlap._jax.key_value_store import DisagreementError
from jaxoverlap.step.processes import Agreement, handed, meet

ROOT = Path(__file__).parents[2]
MARK = "BENCHMARKS_GPU_TEST"


# -- what processes do in these tests -------------------------------------------------------------


def sends(here, *, word: str) -> None:
    for number in range(3):
        here.send("said", word=word, number=number, rank=here.rank)


def gives(here, *, word: str) -> None:
    if word == "bad":
        raise ValueError("a bad word")
    here.send("row", row=word, word=word)


def fails(here) -> None:
    here.send("said", word="", rank=here.rank)
    if here.rank == 1:
        raise ValueError("no such thing")
    time.sleep(60)


def dies(here) -> None:
    if here.rank == 1:
        print("a last word", flush=True)
        os._exit(7)
    time.sleep(60)


def hangs(here) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    here.send("said", word="started", rank=here.rank)
    time.sleep(60)


def _start(tmp_path: Path, mark: str, silent_s: float = 60.0) -> Start:
    return Start(2, 0, lambda _: {MARK: mark}, tmp_path, silent_s, jax=False)


def _heard(tmp_path: Path, name: str, mark: str, until_s: float = 60.0, silent_s=60.0, **arguments):
    function = f"tests.benchmarks.test_gpu:{name}"
    until = time.monotonic() + until_s
    return list(messages(_start(tmp_path, mark, silent_s), function, arguments, until=until))


def test_messages_come_number_by_number(tmp_path):
    heard = _heard(tmp_path, "sends", "sends", word="a")
    assert [[m["rank"] for m in together] for together in heard] == [[0, 1]] * 3
    assert [together[0]["number"] for together in heard] == [0, 1, 2]
    assert not processes_with(MARK, "sends")


@pytest.mark.parametrize(
    ("name", "why", "times"),
    [
        ("fails", "process 1: ValueError: no such thing", {}),
        ("dies", "process 1 ended with code 7: .*a last word", {}),
        ("hangs", "time is up", dict(until_s=6.0)),
        ("hangs", "no word for 4 s", dict(silent_s=4.0)),
    ],
)
def test_processes_end_with_all_that_they_started(tmp_path, name: str, why: str, times: dict):
    began = time.monotonic()
    with pytest.raises(FailedError, match=why):
        _heard(tmp_path, name, name, **times)
    assert time.monotonic() - began < 40
    assert not processes_with(MARK, name)


# -- this machine ---------------------------------------------------------------------------------


def _program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


DAEMON = 'if [ "$1" = -d ]; then setsid sleep 60 & fi'


@pytest.mark.parametrize("quits", ["read line", "exit 3", "sleep 60"])
def test_mps_ends_whether_or_not_it_obeys(path: Path, quits: str, monkeypatch):
    monkeypatch.setattr(machine, "_ANSWER_S", 3.0)
    _program(path, "nvidia-cuda-mps-control", f"{DAEMON}; if [ $# = 0 ]; then {quits}; fi")
    with pytest.raises(KeyError, match="inside"), mps() as variables:
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir() and processes_with("CUDA_MPS_PIPE_DIRECTORY", str(folder))
        raise KeyError("inside")
    assert not folder.exists()
    assert not processes_with("CUDA_MPS_PIPE_DIRECTORY", str(folder))


def test_an_mps_that_does_not_start_is_named(path: Path):
    _program(path, "nvidia-cuda-mps-control", "echo no such driver; exit 1")
    with pytest.raises(MissingError, match="-d` failed: no such driver"), mps():
        pass


def test_the_gpu_is_found_or_what_is_needed_is_said(path: Path):
    _program(path, "nvidia-smi", "echo 'NVIDIA H200, 580.159.04'")
    assert machine.gpu("needs one") == machine.Gpu("NVIDIA H200", "580.159.04")
    _program(path, "nvidia-smi", "echo No devices were found; exit 6")
    with pytest.raises(MissingError, match=r"needs one; here .* no GPU .No devices were found"):
        machine.gpu("needs one")


def test_nccl_is_asked_for_its_version(tmp_path, monkeypatch):
    library = tmp_path / "libnccl.so.2"
    with pytest.raises(MissingError, match=r"2\.30\.3 or later .*is no such library"):
        nccl(library)
    library.write_text("no library")
    with pytest.raises(MissingError, match="does not load"):
        nccl(library)
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *v) { *v = VERSION; return 0; }")
    for version, refused in ((23007, False), (22907, True)):
        command = [
            "cc",
            "-shared",
            "-fPIC",
            f"-DVERSION={version}",
            str(source),
            "-o",
            str(library),
        ]
        subprocess.run(command, check=True)
        if refused:
            with pytest.raises(MissingError, match=r"is 2\.29\.7"):
                nccl(library)
        else:
            assert str(nccl(library)) == "2.30.7"


def test_each_wire_has_its_settings():
    copies, sockets, both = (
        WIRES[name] for name in ("copies, 2 CTAs", "sockets", "copies in pairs, sockets between")
    )
    assert copies.environment(0, 4)["NCCL_MAX_CTAS"] == "2"
    assert "NCCL_HOSTID" not in copies.environment(0, 4)
    assert sockets.environment(3, 4)["NCCL_HOSTID"] == "host3"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in sockets.environment(0, 4)
    assert [both.environment(rank, 4)["NCCL_HOSTID"][-1] for rank in range(4)] == list("0011")
    assert [wire.hosts(4) for wire in (copies, sockets, both)] == [1, 1, 2]


# -- the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["race", "kernels", "curve", "systems", "deadlocks"])
def test_without_a_gpu_a_command_says_in_one_line_what_it_needs(command: str, path: Path, tmp_path):
    _program(path, "nvidia-smi", "exit 9")
    done = CliRunner().invoke(app, [command, "--out", str(tmp_path / "rows.jsonl")])
    assert done.exit_code == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("needs one NVIDIA GPU") and "--rehearse" in line
    assert not (tmp_path / "rows.jsonl").exists()


def _command(tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments, "--rehearse", "--out", str(out),
         "--logs", str(tmp_path / "logs")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, MARK: str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not processes_with(MARK, str(tmp_path))
    return read_rows(out)


def test_the_race_is_rehearsed(tmp_path):
    wire = "copies in pairs, sockets between"
    rows = _command(
        tmp_path,
        "race",
        "--wire",
        wire,
        "--step",
        "both",
        "--candidate",
        "default",
        "--rounds",
        "2",
    )
    assert {row["candidate"] for row in rows} == {"plain", "default"}
    for row in rows:
        assert len(row["seconds"]) == 2 and row["step_s"] > 0 and row["simulated"]["step_s"] > 0
        assert row["difference"] < 1e-5 and row["devices"] == 4 and "error" not in row
        assert row["jax"] and row["device"] == "cpu"
    cells = table(rows)
    assert {len(line) for line in cells} == {len(COLUMNS)}
    assert verdicts(rows)[0].startswith(f"both, {wire}: default ")


def test_timing_kernels_is_rehearsed(tmp_path):
    rows = _command(tmp_path, "kernels")
    assert [row["row"] for row in rows] == list(kernels.ROWS)
    for row in rows:
        kinds = {kind: (count, *seconds) for kind, count, *seconds in row["kinds"]}
        assert kinds["matmul"][0] > 0 and min(kinds["matmul"]) > 0
        assert row["measured_s"] > 0 and row["simulated_s"] > 0 and row["peak_bytes"] > 0
    assert {len(line) for line in kernels.table(rows)} == {len(kernels.COLUMNS)}
    assert kernels.verdicts(rows)[0].startswith("plain: compute ")


def test_the_curve_is_rehearsed(tmp_path):
    (row,) = _command(tmp_path, "curve", "--ctas", "2")
    assert row["wire"] == "copies, 2 CTAs" and row["predicted"] >= 1 and 0 <= row["taken"] <= 1
    assert min(row["gather_s"], row["matmuls_s"], row["both_s"]) > 0
    assert [len(line) for line in curve.table([row])] == [len(curve.COLUMNS)]


@pytest.mark.parametrize(
    "system",
    [
        systems.ROUNDS,
        systems.VARLEN,
        pytest.param(systems.COMPRESSED, marks=pytest.mark.nightly),
        pytest.param(systems.ZEROTH, marks=pytest.mark.nightly),
    ],
)
def test_training_systems_are_rehearsed(tmp_path, system: str):
    rows = _command(tmp_path, "systems", "--system", system, "--rounds", "2")
    assert len(rows) >= 2 and all(len(row["seconds"]) == 2 for row in rows), rows
    cells = systems.table(rows)
    assert {len(line) for line in cells} == {len(systems.COLUMNS)}
    assert cells[0][5] == "1.000"


@pytest.mark.nightly
def test_looking_for_deadlocks_is_rehearsed(tmp_path):
    graphs, no_graphs, death = _command(tmp_path, "deadlocks")
    assert len(graphs["seconds"]) == len(no_graphs["seconds"]) == hang.REHEARSED_STEPS
    assert "code -9" in death["error"] and "seconds" not in death
    assert {len(line) for line in hang.table([graphs, death])} == {len(hang.COLUMNS)}


@pytest.mark.nightly
def test_all_is_rehearsed_within_its_time(tmp_path):
    began = time.monotonic()
    command = ["all", "--rehearse", "--minutes", "4", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *command, "--logs", str(tmp_path / "logs")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, MARK: "all"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert time.monotonic() - began < 270
    assert not processes_with(MARK, "all")
    assert read_rows(tmp_path / "race.jsonl") and read_rows(tmp_path / "kernels.jsonl")


def test_a_job_that_fails_has_a_row_and_the_next_one_runs(tmp_path):
    function = "tests.benchmarks.test_gpu:gives"
    asked = [
        jobs.Job("step", name, function, dict(word=name), devices=1) for name in ("bad", "good")
    ]
    said = list[str]()
    out = tmp_path / "rows.jsonl"
    until = time.monotonic() + 120
    jobs.run(asked, Place(None, None, tmp_path / "logs"), out, until, said.append)
    bad, good = read_rows(out)
    assert bad["row"] == "bad" and "ValueError: a bad word" in bad["error"]
    assert good["word"] == "good" and "error" not in good and good["commit"]
    jobs.run(asked, Place(None, None, tmp_path / "logs"), out, time.monotonic(), said.append)
    assert said[-1] == "step, good: not measured, time is up" and len(read_rows(out)) == 2


def test_the_store_of_mocked_processes_waits_for_nobody(monkeypatch):
    """One process decides for all: they meet in a store that is its own."""
    monkeypatch.setattr(jits, "mocks_processes", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 64)
    agreement = Agreement("step", tuple(range(64)), {"module": "a hash"})
    assert meet(agreement, 1.0)
    assert handed(lambda: "a plan", "plan", tuple(range(64)), within_s=1.0) == "a plan"
    monkeypatch.setattr(jits, "mocks_processes", lambda: False)
    with pytest.raises(DisagreementError, match="not initialized"):
        meet(agreement, 1.0)


def _hears(monkeypatch, *sessions):
    """Let each start of processes send these messages, the last of them an error."""
    left = list(sessions)

    def messages(start, function, arguments, *, until):
        asked.append({step: list(names) for step, names in arguments["jobs"].items()})
        for message in left.pop(0):
            if isinstance(message, Exception):
                raise message
            yield [message]

    asked = list[dict]()
    monkeypatch.setattr(race, "messages", messages)
    return asked


def _compiled(candidate):
    found = dict(compile_s=1.0, taken="", simulated={"step_s": 1.0})
    return dict(kind="compiled", step="both", candidate=candidate, **found)


def test_a_candidate_that_hangs_is_left_out_and_the_others_are_raced(monkeypatch, tmp_path):
    device = dict(kind="device", device="cpu", platform="cpu", devices=4, processes=2)
    hangs = dict(kind="doing", step="both", candidate="rings", what="racing")
    seconds = {"plain": {"seconds": [1.0, 3.0, 2.0], "sent_bytes": [0, 0, 0]}}
    asked = _hears(
        monkeypatch,
        [device, _compiled("plain"), _compiled("rings"), hangs, FailedError("no word for 300 s")],
        [device, _compiled("plain"), dict(kind="raced", step="both", rows=seconds),
         dict(kind="compared", step="both", candidate="plain", difference=0.0)],
    )  # fmt: skip
    out, said = tmp_path / "rows.jsonl", list[str]()
    until = time.monotonic() + 60
    one = race.Race(Place(None, None, tmp_path), out, 3, until, said.append)
    one.run([WIRES["sockets"]], ["both"], ["rings"])
    assert asked == [{"both": ["plain", "rings"]}, {"both": ["plain"]}]
    rows = {row["candidate"]: row for row in read_rows(out)}
    assert rows["rings"]["error"] == "racing: no word for 300 s" and "step_s" not in rows["rings"]
    assert rows["plain"]["step_s"] == 2.0 and rows["plain"]["difference"] == 0.0


def test_what_was_begun_when_time_is_up_says_so(monkeypatch, tmp_path):
    doing = dict(kind="doing", step="both", candidate="rings", what="compiling")
    _hears(monkeypatch, [_compiled("plain"), doing, FailedError("time is up")])
    out = tmp_path / "rows.jsonl"
    one = race.Race(Place(None, None, tmp_path), out, 3, time.monotonic() + 60, lambda _: None)
    one.run([WIRES["sockets"]], ["both", "Muon"], ["rings"])
    rows = {(row["step"], row["candidate"]): row["error"] for row in read_rows(out)}
    why = "compiling: time is up"
    assert rows == {("both", "plain"): why, ("Muon", "plain"): why}


def test_a_candidate_that_fails_has_a_row_with_its_reason():
    common = {"step": "tensor", "wire": "sockets"}
    rows = [
        common | {"candidate": "plain", "step_s": 2.0, "seconds": [2.0, 1.9],
                  "simulated": {"step_s": 1.0}},
        common | {"candidate": "rings", "error": "compiling: process 1 ended | code 6"},
    ]  # fmt: skip
    plain, failed = table(json.loads(json.dumps(rows)))
    assert plain[3:9] == ("2000.00", "1900.00", "2000.00", "1.000", "1000.00", "0.50")
    assert failed[3:6] == ("", "", "") and failed[-1] == "compiling: process 1 ended / code 6"
