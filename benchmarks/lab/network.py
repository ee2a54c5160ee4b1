"""Network namespaces as hosts, bridges as switches, and `tc tbf` as the rate of every link.

No interface is ever made in the machine's own namespace: hosts and switches each have one of their
own, and veth pairs join these. So what a lab made goes with its namespaces. Their names hold the
process that owns them, and a lock that it holds tells the next lab whether it still lives.

A host's packets leave through its rails, one interface each, shaped to the rate of the link:

    host0 rail0 --- switch of group 0, rail 0 --- core switch of rail 0 --- switch of group 1 ...
          rail1 --- switch of group 0, rail 1 --- core switch of rail 1 ---

Each group has its switches; the uplink between those and the core is shaped both ways. With one
group there is no core.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PREFIX = "jolab"
_LOCKS = Path("/run") / PREFIX
_NETNS_FILES = Path("/etc/netns")
_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-\w+")
# The bucket holds two of the packets of 64 KiB that the kernel joins: from one of 64 KiB or less it
# has to cut them up, and an all-reduce at 1 Gbit/s then takes thrice as long as the rate allows
# (measured; with 128 KiB 3% longer). The queue holds 100 ms.
_BURST_BYTES, _QUEUE_MS = 128 * 1024, 100
_TOOLS = ("ip", "tc", "unshare", "setpriv", "mount")

ELSEWHERE = (
    "Run it as root, in a container with --privileged, or in "
    "a user namespace of your own: unshare --user --map-root-user --net --mount sh -c "
    "'mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /etc/netns && make lab' "
    "(/etc/netns has to exist)"
)


class LabError(RuntimeError):
    """The lab cannot be set up, or a host of it failed; the message says why and what to do."""


@dataclass(frozen=True)
class Network:
    """The links of a lab.

    Attributes:
        hosts: how many.
        rate_mbit: rate of each host's egress, on each rail, in Mbit/s; None leaves it unshaped.
        rails: interfaces of each host; rail r of host h has the address 10.77.r.(h + 1).
        groups: into how many groups hosts are split evenly, host 0 in the first.
        uplink_mbit: rate of each group's link to the others, per rail and in each direction.
    """

    hosts: int = 4
    rate_mbit: float | None = 1000.0
    rails: int = 1
    groups: int = 1
    uplink_mbit: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250 or not 1 <= self.rails <= 8:
            raise ValueError(
                f"hosts={self.hosts}, rails={self.rails}: expected 1 to 250 hosts, 1 to 8 rails"
            )
        if self.groups < 1 or self.hosts % self.groups:
            raise ValueError(
                f"groups={self.groups} of hosts={self.hosts}: give a number of groups that divides "
                "the hosts"
            )
        if self.uplink_mbit is not None and self.groups == 1:
            raise ValueError(
                f"uplink_mbit={self.uplink_mbit:g} with one group: give groups=2 or more"
            )
        for name in ("rate_mbit", "uplink_mbit"):
            rate = getattr(self, name)
            if rate is not None and not 0.1 <= rate <= 1e5:
                raise ValueError(f"{name}={rate}: expected 0.1 to 100,000 Mbit/s, or None")

    def group(self, host: int) -> int:
        """Return the group of a host."""
        return host // (self.hosts // self.groups)


@dataclass(frozen=True)
class Counters:
    """Bytes that went through a host's interfaces since it came up, with headers of Ethernet."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.sent_bytes - other.sent_bytes, self.received_bytes - other.received_bytes
        )


def why_not() -> str:
    """Say why no lab can be set up here; empty if one can."""
    if os.geteuid() != 0:
        return f"it makes network namespaces, and this is not root. {ELSEWHERE}"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    probe = Wires(Network(hosts=2, rate_mbit=1000.0), name="probe")
    try:
        probe.up()
    except (LabError, OSError) as error:
        return f"the kernel does not let it ({error}). {ELSEWHERE}"
    finally:
        probe.down()
    return ""


class Wires:
    """The namespaces and links of one network; `up` makes them and `down` leaves nothing."""

    def __init__(self, network: Network, name: str = ""):
        self.network, self._lock = network, None
        self.owner = f"{PREFIX}-{os.getpid()}"
        self._name = name

    def host(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self.owner}-{self._name}h{host}"

    def address(self, host: int, rail: int = 0) -> str:
        """Return an IPv4 address of a host."""
        return f"10.77.{rail}.{host + 1}"

    def up(self) -> None:
        """Make everything, after what labs left whose owners are dead is gone.

        Raises:
            LabError: if a command fails; what was made by then is still there.
        """
        sweep()
        self._lock = _own(f"{os.getpid()}-{self._name}")
        network, cores = self.network, self.network.groups > 1
        for rail in range(network.rails):
            if cores:
                _switch(self._core(rail))
            for group in range(network.groups):
                _switch(self._switch(group, rail))
                if cores:
                    self._join(group, rail)
        for host in range(network.hosts):
            self._attach(host)
        self.shape(network.rate_mbit, uplink_mbit=network.uplink_mbit)

    def shape(
        self,
        rate_mbit: float | None,
        *,
        host: int | None = None,
        uplink_mbit: float | None = None,
    ) -> None:
        """Give links another rate: every host's, or one's. None takes the shaping away."""
        hosts = range(self.network.hosts) if host is None else [host]
        for one in hosts:
            for rail in range(self.network.rails):
                _shape(self.host(one), f"rail{rail}", rate_mbit)
        if host is None and self.network.groups > 1:
            for rail in range(self.network.rails):
                for group in range(self.network.groups):
                    _shape(self._switch(group, rail), "uplink", uplink_mbit)
                    _shape(self._core(rail), f"g{group}", uplink_mbit)

    def cut(self, host: int, *, cut: bool = True) -> None:
        """Take a host's cables out at the switch, or put them back; the host sees no change."""
        state = "nomaster" if cut else "master"
        for rail in range(self.network.rails):
            switch = self._switch(self.network.group(host), rail)
            _run("ip", "-n", switch, "link", "set", f"h{host}", state, *(() if cut else ("sw",)))

    def counters(self, host: int) -> Counters:
        """Return the bytes that a host sent and received on all its rails."""
        rows = json.loads(_run("ip", "-n", self.host(host), "-s", "-j", "link", "show"))
        rows = [row["stats64"] for row in rows if row["ifname"].startswith("rail")]
        return Counters(
            sum(row["tx"]["bytes"] for row in rows), sum(row["rx"]["bytes"] for row in rows)
        )

    def down(self) -> None:
        """End what runs on the hosts and take everything away; fine if nothing was made."""
        _remove(f"{self.owner}-{self._name}")
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            for folder in (_LOCKS, _NETNS_FILES):
                with contextlib.suppress(OSError):  # another lab's are in it, or it is gone
                    folder.rmdir()

    # -- pieces -----------------------------------------------------------------------------------

    def _switch(self, group: int, rail: int) -> str:
        return f"{self.owner}-{self._name}s{group}r{rail}"

    def _core(self, rail: int) -> str:
        return f"{self.owner}-{self._name}core{rail}"

    def _join(self, group: int, rail: int) -> None:
        below, above, port = self._switch(group, rail), self._core(rail), f"g{group}"
        _pair((below, "uplink"), (above, port))
        _run("ip", "-n", below, "link", "set", "uplink", "master", "sw", "up")
        _run("ip", "-n", above, "link", "set", port, "master", "sw", "up")

    def _attach(self, host: int) -> None:
        name = self.host(host)
        _run("ip", "netns", "add", name)
        files = _NETNS_FILES / name
        files.mkdir(parents=True)
        names = (f"{self.address(h)} host{h}" for h in range(self.network.hosts))
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        _run("ip", "-n", name, "link", "set", "lo", "up")
        for rail in range(self.network.rails):
            switch = self._switch(self.network.group(host), rail)
            _pair((name, f"rail{rail}"), (switch, f"h{host}"))
            _run("ip", "-n", switch, "link", "set", f"h{host}", "master", "sw", "up")
            address = f"{self.address(host, rail)}/24"
            _run("ip", "-n", name, "address", "add", address, "dev", f"rail{rail}")
            _run("ip", "-n", name, "link", "set", f"rail{rail}", "up")


def _switch(name: str) -> None:
    _run("ip", "netns", "add", name)
    # Ports forward at once; nobody asks who is interested in which multicast.
    bridge = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
    _run("ip", "-n", name, "link", "add", "name", "sw", *bridge)
    _run("ip", "-n", name, "link", "set", "sw", "up")


def _pair(one: tuple[str, str], other: tuple[str, str]) -> None:
    peer = ("peer", "name", other[1], "netns", other[0])
    _run("ip", "-n", one[0], "link", "add", "name", one[1], "type", "veth", *peer)


def _shape(namespace: str, interface: str, rate_mbit: float | None) -> None:
    if rate_mbit is None:
        found = _run("tc", "-n", namespace, "-j", "qdisc", "show", "dev", interface)
        if any(row["kind"] == "tbf" for row in json.loads(found)):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root")
        return
    rate = ("rate", f"{round(rate_mbit * 1000)}kbit", "burst", str(_BURST_BYTES))
    tbf = ("tbf", *rate, "latency", f"{_QUEUE_MS}ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *tbf)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise LabError(f"`{' '.join(command)}` ended with {done.returncode}: {message}")
    return done.stdout


# -- what is left of others -----------------------------------------------------------------------


def sweep() -> None:
    """Take away what labs left whose owners are dead; those of living owners stay."""
    owners = {match["pid"] for name in _namespaces() if (match := _NAME.fullmatch(name))}
    owners |= {match["pid"] for p in _files() if (match := _NAME.fullmatch(p.name))}
    for pid in sorted(owners):
        if not _lives(pid):
            _remove(f"{PREFIX}-{pid}-")
    for lock in _LOCKS.glob("*") if _LOCKS.exists() else ():
        if not _held(lock):
            lock.unlink(missing_ok=True)


def _own(name: str) -> IO[str]:
    """Take the lock that shows this process to live; the kernel drops it when it dies."""
    path = _LOCKS / name
    while True:
        _LOCKS.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
            lock.close()  # a sweep took the file away before it was locked
        except FileNotFoundError:  # or the folder
            continue
        except BlockingIOError as error:
            raise LabError(
                "this process has a lab already: leave it first, or give both their own process"
            ) from error


def _lives(pid: str) -> bool:
    return any(_held(lock) for lock in _LOCKS.glob(f"{pid}-*"))


def _held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _files() -> Iterator[Path]:
    return _NETNS_FILES.glob(f"{PREFIX}-*")


def _remove(start: str) -> None:
    """Kill what runs in the namespaces whose names start so, then delete them and their files."""
    for name in _namespaces():
        if name.startswith(start):
            for pid in _run("ip", "netns", "pids", name).split():
                _kill(int(pid))
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for folder in _files():
        if folder.name.startswith(start):
            shutil.rmtree(folder, ignore_errors=True)


def _kill(pid: int, within_s: float = 5.0) -> None:
    """Kill a process, and wait until it is gone or only its parent has to learn of it."""
    end = time.monotonic() + within_s
    try:
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() < end:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX":
                return
            time.sleep(0.01)
    except (ProcessLookupError, FileNotFoundError):
        return
