"""Find the GPU, NCCL and NVIDIA's MPS on this machine; start MPS, and end it whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

LEAST_NCCL = (2, 30, 3)  # the first with several ranks on one GPU
_MPS, _SMI = "nvidia-cuda-mps-control", "nvidia-smi"
_PIPE, _LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_ANSWER_S = 15.0  # that a command of NVIDIA's may take


class MissingError(Exception):
    """This machine lacks something; the message says in one line what a benchmark needs."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU that nvidia-smi lists.

    Attributes:
        name: as the driver calls it.
        driver: its version.
    """

    name: str
    driver: str


def gpu(needs: str) -> Gpu:
    """Return the GPU, without starting JAX.

    Args:
        needs: what the benchmark needs, for the error.

    Raises:
        MissingError: if there is none.
    """
    command = [_SMI, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{needs}; here {_SMI} does not run ({error})") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stdout + done.stderr).strip().splitlines()[:1]
        raise MissingError(f"{needs}; here {_SMI} lists no GPU ({' '.join(said)})")
    name, _, driver = lines[0].partition(",")
    return Gpu(name.strip(), driver.strip())


# -- NCCL -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nccl:
    """A library of NCCL's and its version."""

    file: Path
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


def nccl(given: Path | None) -> Nccl:
    """Return the given NCCL, or that of the Python environment.

    Raises:
        MissingError: if there is none, it does not load, or it is older than LEAST_NCCL.
    """
    needs = f"NCCL {'.'.join(map(str, LEAST_NCCL))} or later (--nccl FILE, or nvidia-nccl-cu13)"
    file = given or _installed_nccl()
    if file is None or not file.is_file():
        raise MissingError(f"{needs}; {given or 'the environment'} is no such library")
    version = _version(file, needs)
    if version < LEAST_NCCL:
        raise MissingError(f"{needs}; {file} is {'.'.join(map(str, version))}")
    return Nccl(file.resolve(), version)


def _installed_nccl() -> Path | None:
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = (Path(folder) / "lib" / "libnccl.so.2" for folder in folders)
    return next((file for file in found if file.is_file()), None)


def _version(file: Path, needs: str) -> tuple[int, int, int]:
    """Ask a library for its version, in a process of its own."""
    script = (
        "import ctypes, sys; number = ctypes.c_int(); "
        "assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)) == 0; "
        "print(number.value)"
    )
    command = [sys.executable, "-c", script, str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"{needs}; {file} did not load within 60 s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MissingError(f"{needs}; {file} does not load ({last})")
    number = int(done.stdout)
    return number // 10000, number // 100 % 100, number % 100


# -- MPS ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run MPS with a pipe folder of its own; give the variables by which processes find it.

    At the end it is told to quit, and every process that has this folder in its environment is
    killed: its daemon, its servers, and clients that still run.

    Raises:
        MissingError: if there is no MPS, or it does not start.
    """
    needs = f"processes share a GPU by MPS ({_MPS}, which the driver brings)"
    if shutil.which(_MPS) is None:
        raise MissingError(f"{needs}; it is not on the PATH")
    folder = Path(tempfile.mkdtemp(prefix="mps-"))  # short: it holds sockets
    variables = {_PIPE: str(folder / "pipe"), _LOG: str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir()
    try:
        _control(["-d"], variables, needs)
        yield variables
    finally:
        with contextlib.suppress(MissingError):  # it may have died; what is left is killed
            _control([], variables, needs, "quit -t 5\n")
        _kill_all_with(_PIPE, variables[_PIPE])
        shutil.rmtree(folder, ignore_errors=True)


def _control(arguments: list[str], variables: dict[str, str], needs: str, text: str = "") -> None:
    # Its daemon keeps what it inherits open, so output goes to a file and not to a pipe.
    log = Path(variables[_LOG]) / "control.txt"
    with log.open("ab") as file:
        try:
            done = subprocess.run(
                [_MPS, *arguments],
                env=os.environ | variables,
                input=text.encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_ANSWER_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingError(f"{needs}; `{_MPS} {' '.join(arguments)}`: {error}") from error
    if done.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise MissingError(f"{needs}; `{_MPS} {' '.join(arguments)}` failed: {last}")


def _kill_all_with(name: str, value: str) -> None:
    """Kill every process whose environment has this value, until there is none."""
    end = time.monotonic() + _ANSWER_S
    while left := processes_with(name, value):
        if time.monotonic() > end:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    if left:
        raise RuntimeError(f"processes {left} with {name}={value} do not end: kill them by hand")


def processes_with(name: str, value: str) -> list[int]:
    """List living processes, other than this one, that were started with a variable's value."""
    wanted, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended, or is another user's
            continue
        if wanted in environment and state != "Z":
            found.append(int(folder.name))
    return found
