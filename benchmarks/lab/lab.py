"""Set a lab up, run functions and commands on its hosts, and take it down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.lab.hosts import COORDINATOR_PORT, Host
from benchmarks.lab.network import Counters, LabError, Network, Wires, why_not

_ROOT = Path(__file__).parents[2]  # of the checkout
_SHOWN = 3000  # characters of what a host said last
# Enter a host: a name and a boot id of its own (JAX tells hosts apart by boot ids), and death when
# the lab's process dies. Each command replaces the one before it, so that a host is one process.
_ENTER = (
    'echo "$1" > /proc/sys/kernel/hostname && '
    'mount --bind "$2" /proc/sys/kernel/random/boot_id && shift 2 && '
    'exec setpriv --pdeathsig KILL -- "$@"'
)


class HostError(LabError):
    """A host failed: it raised, died, or did not answer in time. The message names it."""


@dataclass(frozen=True)
class Outcome:
    """How a call or a command ended on one host.

    Attributes:
        host: its number.
        value: what the function returned.
        error: why there is none; empty if there is one.
        code: the exit code of its process; None while it lives.
        output: the end of what it wrote to stdout and stderr.
        seconds: from the start of the call to this end.
    """

    host: int
    value: Any
    error: str
    code: int | None
    output: str
    seconds: float


class Lab:
    """A cluster of hosts on this machine, up while the `with` block runs.

    Args:
        network: hosts and links.
        environment: variables for all processes on hosts, besides this process's own.
        folder: where logs go, and what hosts share; by default one that goes with the lab.

    Raises:
        LabError: if it cannot be set up here; the message says what else would serve.
    """

    def __init__(
        self,
        network: Network,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ):
        self.network, self.wires = network, Wires(network)
        self._environment = dict(environment or {})
        self._given = folder
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        if reason := why_not():
            raise LabError(f"no lab here: {reason}")
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(ended_by_signals())
        try:
            self.folder = self._given or Path(tempfile.mkdtemp(prefix="jaxoverlap-lab-"))
            self.folder.mkdir(parents=True, exist_ok=True)
            self.wires.up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def _down(self) -> None:
        with uninterrupted():
            for process in self._started:
                process.kill()
            for process in self._started:
                process.wait()
            self.wires.down()
            if self._given is None and hasattr(self, "folder"):
                shutil.rmtree(self.folder, ignore_errors=True)
        self._exit.close()

    # -- links ------------------------------------------------------------------------------------

    def shape(self, rate_mbit: float | None, *, host: int | None = None) -> None:
        """Give every link another rate in Mbit/s, or only one host's; uplinks keep theirs."""
        self.wires.shape(rate_mbit, host=host, uplink_mbit=self.network.uplink_mbit)

    def cut(self, host: int) -> None:
        """Take a host's cables out at the switch: its packets, and those to it, are lost."""
        self.wires.cut(host)

    def mend(self, host: int) -> None:
        """Put a host's cables back."""
        self.wires.cut(host, cut=False)

    def counters(self) -> list[Counters]:
        """Return the bytes that each host sent and received so far."""
        return [self.wires.counters(host) for host in range(self.network.hosts)]

    # -- processes --------------------------------------------------------------------------------

    def host(self, rank: int) -> Host:
        """Return the environment of a process on a host."""
        return Host(
            rank=rank,
            count=self.network.hosts,
            addresses=tuple(self.wires.address(rank, r) for r in range(self.network.rails)),
            group=self.network.group(rank),
            coordinator=f"{self.wires.address(0)}:{COORDINATOR_PORT}",
            folder=str(self.folder),
        )

    def spawn(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: str = "",
        **popen: Any,
    ) -> subprocess.Popen:
        """Start a command on a host; its output goes to a file of the lab's folder.

        It dies with the lab, and with this process however that ends.

        Args:
            log: the file's name; by default "hostN.log". It is added to.
            popen: more for subprocess.Popen.
        """
        boot_id = self.folder / f"boot_id{rank}"
        if not boot_id.exists():
            boot_id.write_text(f"{uuid.uuid4()}\n")
        enter = ("unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", f"host{rank}", boot_id)
        full = ("ip", "netns", "exec", self.wires.host(rank), *map(str, enter), *command)
        variables = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            **self.host(rank).environment(),
            **self._environment,
            **(environment or {}),
        }
        with (self.folder / (log or f"host{rank}.log")).open("ab") as file:
            process = subprocess.Popen(
                full,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                **{"cwd": _ROOT, "stdin": subprocess.DEVNULL, **popen},
            )
        self._started.append(process)
        return process

    def output(self, rank: int, log: str = "") -> str:
        """Return the end of what a host's processes wrote."""
        path = self.folder / (log or f"host{rank}.log")
        return path.read_text(errors="replace")[-_SHOWN:] if path.exists() else ""

    @contextlib.contextmanager
    def processes(
        self, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> Iterator[Processes]:
        """Start a process on every host, which lives through many calls; end them at the end.

        Args:
            python: the interpreter; the lab's own files need the standard library of 3.10 alone.
            environment: variables for these processes.
        """
        processes = Processes(self, python, environment or {})
        try:
            yield processes
        finally:
            processes.close()

    def run(
        self,
        function: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        **arguments: Any,
    ) -> list[Any]:
        """Call a function on every host, in processes of their own, and return what each returned.

        Args:
            function: "module:name", of a function of a `Host` and the arguments.
            python, environment: as `processes`.
            timeout_s: how long it may take.

        Raises:
            HostError: if a host fails; the others are ended.
        """
        with self.processes(python=python, environment=environment) as processes:
            return processes.call(function, timeout_s=timeout_s, **arguments)


class Processes:
    """A process on every host, each of which calls functions on request."""

    def __init__(self, lab: Lab, python: str, environment: Mapping[str, str]):
        self._lab = lab
        self._lines: list[_Line] = []
        try:
            for rank in range(lab.network.hosts):
                self._lines.append(_Line(lab, rank, python, environment))
        except BaseException:
            self.close()
            raise

    def call(self, function: str, *, timeout_s: float = 600.0, **arguments: Any) -> list[Any]:
        """Call a function on every host at once, and return what each returned.

        Raises:
            HostError: as soon as one fails; do not call again after it.
        """
        outcomes = self.outcomes(function, timeout_s=timeout_s, stop_at_first=True, **arguments)
        if failed := [outcome for outcome in outcomes if outcome.error]:
            first = min(failed, key=lambda outcome: (outcome.seconds, outcome.host))
            raise HostError(
                f"host{first.host}, {function}: {first.error}\n"
                f"-- the end of what it wrote --\n{first.output}"
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: str,
        *,
        timeout_s: float = 600.0,
        stop_at_first: bool = False,
        **arguments: Any,
    ) -> list[Outcome]:
        """Call a function on every host, and return how it ended on each, also if it failed.

        Args:
            stop_at_first: return when one has failed, without the hosts that still run.
        """
        began, outcomes = time.monotonic(), {}
        for line in self._lines:
            line.ask({"function": function, "arguments": arguments})
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line.results, selectors.EVENT_READ, line)
            while len(outcomes) < len(self._lines):
                left_s = began + timeout_s - time.monotonic()
                ready = selector.select(max(left_s, 0.0))
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    outcomes[key.data.rank] = key.data.outcome(time.monotonic() - began)
                if stop_at_first and any(outcome.error for outcome in outcomes.values()):
                    return list(outcomes.values())
        for line in self._lines:
            if line.rank not in outcomes:
                error = f"no answer within {timeout_s:g} s"
                output = self._lab.output(line.rank)
                outcomes[line.rank] = Outcome(line.rank, None, error, None, output, timeout_s)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def pid(self, rank: int) -> int:
        """Return the process id of a host's process, as this machine sees it."""
        return self._lines[rank].process.pid

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            line.close()


class _Line:
    """The lab's end of one host's process."""

    def __init__(self, lab: Lab, rank: int, python: str, environment: Mapping[str, str]):
        self.rank, self._lab = rank, lab
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        ends = (theirs_in, theirs_out)
        command = (python, "-m", "benchmarks.lab.hosts", *map(str, ends))
        self.process = lab.spawn(rank, command, environment=environment, pass_fds=ends)
        for end in ends:
            os.close(end)
        self._requests, self.results = os.fdopen(ours_out, "w"), os.fdopen(ours_in)

    def ask(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `outcome` tells
            print(json.dumps(request), file=self._requests, flush=True)

    def outcome(self, seconds: float) -> Outcome:
        """Read the answer, or learn how the process died."""
        text = self.results.readline()
        if text.endswith("\n"):
            answer = json.loads(text)
            error, trace = answer.get("error", ""), answer.get("trace", "")
            output = trace or self._lab.output(self.rank)
            return Outcome(self.rank, answer.get("value"), error, None, output, seconds)
        code = self.process.wait()
        error = f"its process ended with code {code}"
        return Outcome(self.rank, None, error, code, self._lab.output(self.rank), seconds)

    def close(self) -> None:
        for end in (self._requests, self.results):
            with contextlib.suppress(BrokenPipeError):
                end.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, so that the lab is taken down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = [signal.signal(one, end) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back while the lab is taken down."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
