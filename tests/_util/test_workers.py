"""Child processes answer requests one after the other, and their end is an answer too."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxoverlap._util import workers
from jaxoverlap._util.workers import WorkerEndedError, ask


def answered(request: bytes) -> bytes:
    """Answer in a child: its process id, or what the request wants."""
    if request == b"abort":
        os.write(2, b"F1121 the check\n")
        os.kill(os.getpid(), signal.SIGABRT)
    if request == b"sleep":
        time.sleep(60)
    if request.startswith(b"once "):
        told = Path(request.removeprefix(b"once ").decode())
        if told.exists():
            return b"the second child"
        told.touch()
        os._exit(0)
    if request == b"print":
        os.write(1, b"what a compiler prints is no answer\n")
    return b"%d" % os.getpid()


@pytest.fixture(autouse=True)
def own_workers(monkeypatch):
    monkeypatch.setattr(workers, "_idle", defaultdict(list))
    yield
    workers._end_idle()


def asked(request: bytes = b"", timeout_s: float = 120.0, **more: str) -> bytes:
    return ask(answered, request, {**os.environ, **more}, timeout_s)


def test_a_child_answers_several_requests():
    first = asked()
    assert asked(b"print") == asked() == first != b"%d" % os.getpid()
    assert asked(ANOTHER="environment") != first


def test_two_requests_at_a_time_have_two_children():
    with ThreadPoolExecutor(2) as pool:
        assert len({*pool.map(lambda _: asked(), range(2))}) <= 2
    (idle,) = workers._idle.values()
    assert 1 <= len(idle) <= 2


def test_a_child_that_aborts_is_replaced():
    first = asked()
    with pytest.raises(WorkerEndedError) as ended:
        asked(b"abort")
    assert (ended.value.code, ended.value.stopped) == (-signal.SIGABRT, False)
    assert "F1121 the check" in ended.value.said
    assert asked() != first


def test_a_child_whose_time_is_up_is_stopped():
    asked()
    with pytest.raises(WorkerEndedError) as ended:
        asked(b"sleep", timeout_s=0.2)
    assert ended.value.stopped and ended.value.code == -signal.SIGKILL


def test_a_child_that_ends_as_it_was_idle_is_replaced(tmp_path):
    """One that ends by itself was idle for too long; the request goes to another."""
    asked()
    told = tmp_path / "told"
    assert asked(b"once " + str(told).encode()) == b"the second child"
    assert told.exists()


def test_a_large_request_arrives_whole():
    assert int(asked(b"x" * 5_000_000))
