"""A plan is read whole from its file, or refused with what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap._util.files import opened, sealed, write_atomically
from jaxoverlap.plan.plan import (
    SCHEMA,
    Plan,
)
from tests.support.plans import PLAN, TUNED, _plans


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("written") / "plan.json"
    TUNED.write(path)
    return path.read_bytes()


def read(folder: Path, raw: bytes) -> Plan:
    path = folder / "plan.json"
    path.write_bytes(raw)
    return Plan.read(path)


# -- round trips ----------------------------------------------------------------------------------


def test_a_plan_comes_back_from_its_file(tmp_path):
    for path in (tmp_path / "plan.json", str(tmp_path / "again.json")):
        TUNED.write(path)
        assert Plan.read(path) == TUNED
    assert list(Plan.read(path).mesh) == ["data", "model"]


@settings(max_examples=50, deadline=None)
@given(_plans)
def test_every_plan_comes_back(plan: Plan):
    content = msgspec.json.encode(plan)
    assert opened("plan", sealed("plan", content).encode()) == content


def test_the_file_is_for_people_too(written):
    lines = written.decode().splitlines()
    assert lines[1] == '  "format": "jaxoverlap plan",'
    assert '      "model": 8' in lines
    assert written.endswith(b"}\n")


def test_another_layout_of_the_same_json_is_the_same_plan(tmp_path, written):
    assert read(tmp_path, msgspec.json.format(written, indent=0)) == TUNED
    assert read(tmp_path, written + b"\n\n") == TUNED


# -- refusals -------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(tmp_path, written):
    """A cut may be at every byte but the last, which ends the last line."""
    for end in range(len(written) - 1):
        with pytest.raises(ValueError, match="truncated, after" if end else "is empty"):
            opened("jaxoverlap plan", written[:end])
    with pytest.raises(ValueError, match=r"plan\.json: the file is truncated.*Tune again"):
        read(tmp_path, written[: len(written) // 2])


@settings(max_examples=60, deadline=None)
@given(plan=_plans, data=st.data())
def test_any_plan_cut_anywhere_is_refused(plan: Plan, data):
    raw = sealed("jaxoverlap plan", msgspec.json.encode(plan)).encode().rstrip()
    end = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ValueError):
        opened("jaxoverlap plan", raw[:end])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(written, data):
    """Spaces between words, and the like, change nothing."""
    at = data.draw(st.integers(0, len(written) - 1))
    byte = data.draw(st.integers(0, 255))
    raw = written[:at] + bytes([byte]) + written[at + 1 :]
    try:
        got = Plan.from_json(opened("jaxoverlap plan", raw))
    except ValueError:
        assert raw != written
    else:
        assert got == TUNED


def test_an_edited_file_is_refused(tmp_path, written):
    for old, new in (
        (b'"axis": "model"', b'"axis": "data"'),
        (b'"slices": 2', b'"slices": 4'),
        (b'"step_s": 0.7575', b'"step_s": 0.5'),
        (f'"schema": {SCHEMA}'.encode(), f'"schema": {SCHEMA + 1}'.encode()),
        (b'"style": "two_way"', b'"style": "two_ways"'),
    ):
        assert old in written
        with pytest.raises(ValueError, match=r"edited or damaged since.*has sha256.*says sha256"):
            read(tmp_path, written.replace(old, new, 1))
    for old, new in ((b'"checksum"', b'"chucksum"'), (b'"content"', b'"more": 1, "content"')):
        with pytest.raises(ValueError, match="edited since it was written"):
            read(tmp_path, written.replace(old, new, 1))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"step = overlap(step)", "not JSON, as a jaxoverlap plan is"),
        (b"\x80\x04\x95", "not JSON"),
        (b"[1, 2]", 'JSON, but no jaxoverlap plan: there is no "format"'),
        (b'{"jit_step": {"flops": 3}}', "JSON, but no jaxoverlap plan"),
        (b'{"format": "jaxoverlap state"}', "JSON, but no jaxoverlap plan"),
        (TUNED.to_json().encode(), "JSON, but no jaxoverlap plan"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, raw, problem):
    with pytest.raises(ValueError, match=rf"plan\.json: .*{problem}.*Tune again"):
        read(tmp_path, raw)


@pytest.mark.parametrize(
    ("schema", "age"), [(SCHEMA + 1, "a newer"), (SCHEMA - 1, "an older or no"), ("a", "an older")]
)
def test_another_schema_is_refused_though_the_file_is_whole(tmp_path, schema, age):
    """A file of another schema may have words that this one does not know."""
    content = msgspec.json.encode({"schema": schema, "rings": []})
    with pytest.raises(
        ValueError, match=rf"schema {schema!r}, written by {age}.*reads schema {SCHEMA}"
    ):
        read(tmp_path, sealed("jaxoverlap plan", content).encode())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        Plan.read(tmp_path / "none.json")


# -- writing --------------------------------------------------------------------------------------


def test_what_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.write(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(OSError, match="No space left"):
                TUNED.write(path)
        assert Plan.read(path) == PLAN
    assert os.listdir(tmp_path) == ["plan.json"], "nothing is left behind"


# The program kills itself with SIGKILL in the middle of writing, at each call that it makes.
KILLED = """
import os, pathlib, signal, sys
from jaxoverlap._util import files as _files
from tests.support.plans import PLAN
from tests.support.plans import TUNED

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def write(self, text): self.file.write(text[: len(text) // 2]); self.file.flush(); killed()

for name in ("before", "half", "fsync", "replace", "after"):
    path = pathlib.Path(sys.argv[1]) / f"{name}.json"
    PLAN.write(path)
    child = os.fork()
    if not child:
        if name == "before":
            _files.open = killed
        elif name == "half":
            _files.open = lambda *a, **k: Half(open(*a, **k))
        elif name == "after":
            _files._sync_folder = killed
        else:
            setattr(os, name, killed)
        TUNED.write(path)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, name
"""


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    }
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("before", "half", "fsync", "replace"):
        assert Plan.read(tmp_path / f"{name}.json") == PLAN
    assert Plan.read(tmp_path / "after.json") == TUNED
    beside = [p.name for p in tmp_path.iterdir() if p.suffix != ".json"]
    assert len(beside) == 3, "half, fsync and replace leave what they had"
    assert all(name.startswith(".") and name.endswith(".tmp") for name in beside)


def test_the_file_is_as_readable_as_any(tmp_path):
    """Processes on other hosts may run as someone else."""
    write_atomically(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


# -- how it reads ---------------------------------------------------------------------------------


def test_what_goes_with_the_matmuls_has_a_line_each():
    assert TUNED.summary.startswith(PLAN.summary)
    assert TUNED.summary in str(TUNED)
    assert TUNED.summary.splitlines()[-3:] == [
        "  Compiled with 1 XLA option and the scheduler pass (slack 0.05, 8 in flight).",
        "  NCCL is to be started with NCCL_MAX_NCHANNELS=8, 1 row of channels by collective and size.",
        "  Simulated: 757.5 ms a step, plain 907.3; exposed 54.3; the bound 702.2; 8.3 GB, plain 9.1 GB.",
    ]


def test_the_rings_are_those_of_the_edits():
    assert {r.site: str(r.variant) for r in TUNED.rings} == {3: "one_way", 5: "two_way x 2"}
