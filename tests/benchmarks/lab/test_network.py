"""The lab's namespaces, links and processes: what they do, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.lab import HostError, Lab, Network, network, why_not

NO_LAB = why_not()
pytestmark = pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")
ROOT = Path(__file__).parents[3]
FUNCTIONS = "tests.benchmarks.lab.on_hosts"


def left_behind(pid: int) -> list[str]:
    """List what a lab of a process has left on the machine."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in spaces.stdout.splitlines() if line.strip()]
    folders = (Path("/etc/netns"), Path("/run/jolab"))
    names += [path.name for folder in folders if folder.exists() for path in folder.iterdir()]
    return [name for name in names if name.startswith((f"jolab-{pid}-", f"{pid}-"))]


def interfaces() -> str:
    """Return the machine's own interfaces and their queues, without counters."""
    done = [
        subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
        for command in ("ip -o link show", "tc qdisc show")
    ]
    return "\n".join(done)


def test_hosts_have_names_addresses_and_links_of_their_own():
    before = interfaces()
    with Lab(Network(hosts=4, groups=2, uplink_mbit=50, rails=2, rate_mbit=200)) as lab:
        assert left_behind(os.getpid())
        rows = lab.run(f"{FUNCTIONS}:who")
        assert [row["name"] for row in rows] == ["host0", "host1", "host2", "host3"]
        assert [row["group"] for row in rows] == [0, 0, 1, 1]
        assert rows[2]["addresses"] == ["10.77.0.3", "10.77.1.3"]
        assert len({row["boot_id"] for row in rows}) == 4
        assert all(row["host1"] == "10.77.0.2" for row in rows)
        assert rows[0]["interfaces"] == ["lo", "rail0", "rail1"]
        folder = lab.folder
    assert not folder.exists()
    assert not left_behind(os.getpid())
    assert interfaces() == before


@pytest.mark.parametrize("peer, rail, rate_mbit", [(1, 0, 200), (1, 1, 200), (2, 0, 50)])
def test_links_have_their_rates_and_counters(peer, rail, rate_mbit):
    with Lab(Network(hosts=4, groups=2, uplink_mbit=50, rails=2, rate_mbit=200)) as lab:
        before = lab.counters()
        rows = lab.run(f"{FUNCTIONS}:stream", peer=peer, rail=rail, megabytes=4)
        sent, received = lab.counters()[0] - before[0], lab.counters()[peer] - before[peer]
        size = 4 * 2**20
        assert size < sent.sent_bytes < 1.1 * size
        assert size < received.received_bytes < 1.1 * size
        # No link is ever faster than its rate; how much slower depends on what else runs here.
        assert rows[peer]["seconds"] > 0.9 * (size - network._BURST_BYTES) * 8 / (rate_mbit * 1e6)


def test_a_rate_is_changed_while_processes_live():
    with Lab(Network(hosts=2, rate_mbit=None)) as lab, lab.processes() as hosts:
        stream = dict(peer=1, rail=0, megabytes=1)
        fast = hosts.call(f"{FUNCTIONS}:stream", **stream)[1]["seconds"]
        lab.shape(10)
        slow = hosts.call(f"{FUNCTIONS}:stream", **stream)[1]["seconds"]
        assert slow > 0.7 > fast
        assert hosts.call(f"{FUNCTIONS}:calls") == [3, 3], "one process through all calls"


def test_a_cut_host_is_alone_until_it_is_mended():
    with Lab(Network(hosts=3, rate_mbit=100)) as lab, lab.processes() as hosts:
        lab.cut(1)
        assert hosts.call(f"{FUNCTIONS}:reaches", peer=1, within_s=0.5) == [False, True, False]
        assert hosts.call(f"{FUNCTIONS}:reaches", peer=2, within_s=0.5) == [True, False, True]
        lab.mend(1)
        assert hosts.call(f"{FUNCTIONS}:reaches", peer=1, within_s=5.0) == [True] * 3


def test_a_host_that_fails_is_named():
    with Lab(Network(hosts=2)) as lab:
        with pytest.raises(HostError, match=r"host1, .*:fails: ValueError: not here(?s:.*)raise V"):
            lab.run(f"{FUNCTIONS}:fails", on=1)
        with pytest.raises(HostError, match=r"host0, .*:dies: its process ended with code 3"):
            lab.run(f"{FUNCTIONS}:dies", on=0)
        with pytest.raises(HostError, match=r"no answer within 0.5 s"):
            lab.run(f"{FUNCTIONS}:sleeps", seconds=30, timeout_s=0.5)
    assert not left_behind(os.getpid())


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(hosts=0), "hosts=0, rails=1: expected 1 to 250 hosts"),
        (dict(hosts=4, groups=3), "groups=3 of hosts=4: give a number of groups that divides"),
        (dict(uplink_mbit=5), "uplink_mbit=5 with one group: give groups=2 or more"),
        (dict(rate_mbit=-1), "rate_mbit=-1: expected 0.1 to 100,000 Mbit/s, or None"),
    ],
)
def test_networks_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        Network(**given)


OWNER = textwrap.dedent(
    f"""
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    from benchmarks.lab import Lab, Network
    with Lab(Network(hosts=2)) as lab, lab.processes() as hosts:
        print(hosts.pid(0), hosts.pid(1), flush=True)
        hosts.call("{FUNCTIONS}:sleeps", seconds=60)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_owner_ends(number):
    before = interfaces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert owner.stdout and owner.stderr
    hosts = owner.stdout.readline().split()
    assert len(hosts) == 2 and left_behind(owner.pid)
    owner.send_signal(number)
    owner.wait(timeout=20)
    if number == signal.SIGKILL:  # nobody was there to clean up: the next lab does
        assert left_behind(owner.pid)
        with Lab(Network(hosts=2)):
            pass
    assert not left_behind(owner.pid)
    end = time.monotonic() + 5
    while any(Path(f"/proc/{int(pid)}").exists() for pid in hosts):
        assert time.monotonic() < end, "a process of a host outlived the lab"
        time.sleep(0.05)
    assert interfaces() == before


def test_two_labs_at_once():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout
    try:
        owner.stdout.readline()
        with Lab(Network(hosts=2)) as lab:
            assert [row["name"] for row in lab.run(f"{FUNCTIONS}:who")] == ["host0", "host1"]
        assert left_behind(owner.pid), "the other's stays"
    finally:
        owner.terminate()
        owner.wait(timeout=20)
    assert not left_behind(owner.pid)
