"""Work in forks gives a row, whether it returns, raises, aborts or does not end."""

import os
import signal
import sys
import time

import pytest

from benchmarks.children import import_first, in_fork


@pytest.fixture(scope="module", autouse=True)
def server():
    import_first(["tests.benchmarks.test_children"])


def returns(number: int) -> dict[str, object]:
    return {"twice": 2 * number, "fork": os.getpid()}


def tells_its_flags() -> dict[str, object]:
    return {"flags": os.environ["XLA_FLAGS"]}


def raises() -> dict[str, object]:
    raise ValueError("no such pod")


def aborts() -> dict[str, object]:
    os.write(2, b"F0101 10:00:00 1 all_reduce.cc:10] no such thing\nE0101 more\n")
    os.abort()


def is_killed() -> dict[str, object]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves() -> dict[str, object]:
    sys.exit(3)


def does_not_end() -> dict[str, object]:
    time.sleep(600)
    return {}


def test_what_a_fork_returns():
    returned = in_fork(returns, 21, timeout_s=60, xla_flags="")
    assert returned["twice"] == 42
    assert returned["fork"] != os.getpid()


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (raises, "exit 1: ValueError: no such pod"),
        (aborts, "SIGABRT: F0101 10:00:00 1 all_reduce.cc:10] no such thing"),
        (is_killed, "SIGKILL: it said nothing"),
        (leaves, "exit 3: it said nothing"),
    ],
)
def test_a_fork_that_dies_is_a_row(work, error: str):
    assert in_fork(work, timeout_s=60, xla_flags="") == {"error": error}


def test_a_fork_that_does_not_end_is_a_row():
    began = time.monotonic()
    assert in_fork(does_not_end, timeout_s=1, xla_flags="") == {"error": "stopped after 1 s"}
    assert time.monotonic() - began < 60


def test_a_fork_has_flags_in_front_of_those_of_the_environment():
    of_the_server = in_fork(tells_its_flags, timeout_s=60, xla_flags="")["flags"]
    flags = in_fork(tells_its_flags, timeout_s=60, xla_flags="--a=b")["flags"]
    assert flags == f"--a=b {of_the_server}".strip()
