"""lost_named() says which hosts are gone; real hosts die in tests/benchmarks/lab/test_faults.py."""

from __future__ import annotations

import jax
import msgspec
import pytest

from jaxoverlap.hardware import lost
from jaxoverlap.hardware.lost import LostError, collective_of, lost_named

CLOSED = (
    "UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Read error [10.0.0.3]:99: Connection reset by "
    "peer"
)
TIMED_OUT = "UNKNOWN: Gloo AllGather failed: [unbound_buffer.cc:81] Timed out waiting 8000ms"


class FakeStore:
    """A store in which other processes have left what they have to say."""

    def __init__(self, hosts: int, reported: tuple[int, ...], broken: bool = False):
        self.values = {
            f"{lost._HOSTS}/{rank}": msgspec.json.encode(
                {"name": f"node{rank}", "address": f"10.0.0.{rank + 1}"}
            ).decode()
            for rank in range(1, hosts)
        }
        self.values |= {f"{lost._FAILED}/{rank}": "" for rank in reported}
        self.broken = broken

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.broken and key.startswith(lost._FAILED):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no route")
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody left it")
        return self.values[key]

    def key_value_dir_get(self, key):
        return [(k, v) for k, v in self.values.items() if k.startswith(key)]


def verdict(monkeypatch, said: str, store: FakeStore, hosts: int = 4, me: int = 0) -> LostError:
    monkeypatch.setattr(lost.jits, "started_processes", lambda: (me, hosts))
    monkeypatch.setattr(lost.jits, "key_value_store", lambda: store)
    monkeypatch.setattr(lost.socket, "gethostname", lambda: f"node{me}")
    monkeypatch.setattr(lost.socket, "gethostbyname", lambda name: f"10.0.0.{me + 1}")
    monkeypatch.setattr(lost, "_GRACE_S", 0.1)
    with pytest.raises(LostError) as caught, lost_named(within_s=0.4):
        raise jax.errors.JaxRuntimeError(said)
    return caught.value


def test_who_closed_the_connection_and_says_nothing_is_gone(monkeypatch):
    error = verdict(monkeypatch, CLOSED, FakeStore(4, reported=()))
    assert error.hosts == ("node2",)
    said = (
        "an all-reduce failed on node0 (process 0): it waited for node2 (process 2), which closed"
    )
    assert said in str(error) and "last checkpoint" in str(error)


def test_who_closed_it_because_another_is_gone_is_not(monkeypatch):
    error = verdict(monkeypatch, CLOSED, FakeStore(4, reported=(1, 2)))
    assert error.hosts == ("node3",)
    assert "did not say anything within 0.4 s" in str(error)


def test_where_time_was_up_all_that_are_silent_are_gone(monkeypatch):
    error = verdict(monkeypatch, TIMED_OUT, FakeStore(4, reported=(2,)))
    assert error.hosts == ("node1", "node3")
    assert "an all-gather failed" in str(error)


def test_where_all_are_there_a_link_was_slow(monkeypatch):
    error = verdict(monkeypatch, TIMED_OUT, FakeStore(3, reported=(1, 2)), hosts=3)
    assert error.hosts == ()
    assert "all processes are still there" in str(error)


def test_the_coordinators_host_is_named_without_asking_it(monkeypatch):
    store = FakeStore(4, reported=(), broken=True)
    store.values[f"{lost._HOSTS}/0"] = '{"name": "node0", "address": "10.0.0.1"}'
    said = CLOSED.replace("10.0.0.3", "10.0.0.1")
    assert verdict(monkeypatch, said, store, me=1).hosts == ("node0",)


def test_who_does_not_reach_the_coordinator_says_so(monkeypatch):
    error = verdict(monkeypatch, TIMED_OUT, FakeStore(4, reported=(), broken=True))
    assert "does not answer: UNAVAILABLE: no route" in str(error)


def test_a_process_that_never_came_is_named(monkeypatch):
    store = FakeStore(3, reported=())
    monkeypatch.setattr(lost.jits, "started_processes", lambda: (0, 4))
    monkeypatch.setattr(lost.jits, "key_value_store", lambda: store)
    with (
        pytest.raises(LostError, match=r"process 3 did not come to train within 0.2 s"),
        lost_named(within_s=0.2),
    ):
        pass


def test_other_errors_come_as_they_are(monkeypatch):
    monkeypatch.setattr(lost.jits, "started_processes", lambda: (0, 2))
    monkeypatch.setattr(lost.jits, "key_value_store", lambda: FakeStore(2, reported=()))
    for error in (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"), KeyError("x")):
        with pytest.raises(type(error)) as caught, lost_named():
            raise error
        assert caught.value is error


def test_one_process_is_left_alone():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"), lost_named():
        raise jax.errors.JaxRuntimeError(CLOSED)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (CLOSED, "all-reduce"),
        (TIMED_OUT, "all-gather"),
        ("UNKNOWN: Gloo ReduceScatter failed: x", "reduce-scatter"),
        ("UNKNOWN: Gloo collective permute failed: x", "collective-permute"),
        ("UNKNOWN: Gloo all-to-all failed: x", "all-to-all"),
        ("INTERNAL: NCCL operation ncclAllReduce(send_buffer) failed", "all-reduce"),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed", "collective"),
        ("RESOURCE_EXHAUSTED: all-reduce buffer", ""),
    ],
)
def test_errors_name_their_collective(said, name):
    assert collective_of(said) == name
