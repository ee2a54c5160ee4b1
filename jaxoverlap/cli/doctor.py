"""The command that checks a machine: versions, plugins, devices, hosts and flags."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json, show_table

_PACKAGES = ("jaxoverlap", "jax", "jaxlib", "numpy", "flax", "optax")
_SCHEDULERS = ("SLURM_JOB_NUM_NODES", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Fact:
    """A fact about this machine.

    Attributes:
        what: what was checked; found: what it is.
        problem: what is wrong and what to do; empty if nothing is.
    """

    what: str
    found: str
    problem: str = ""


@command
def doctor(*, json: Json = False) -> int:
    """Check this machine: versions, plugins that clash, devices, hosts, flags that are dead.

    Exit code 1 if something is wrong.
    """
    with working("checking this machine"):
        findings = [*versions(), *plugins(installed()), *_flags()]
        if any(f.what == "XLA_FLAGS" and f.problem for f in findings):
            # XLA ends a process with flags like these when it looks for devices.
            findings.append(Fact("devices", "not checked: XLA ends a process with these XLA_FLAGS"))
        else:
            findings += [*_devices(), *_hosts()]
    if json:
        show_json(findings)
    else:
        rows = [(f.what, f.found, f.problem or "ok") for f in findings]
        show_table("this machine", ("", "found", ""), rows)
        problems = sum(bool(f.problem) for f in findings)
        say(f"{problems or 'no'} problem{'s' * (problems != 1)} found")
    return NO if any(f.problem for f in findings) else OK


def installed() -> dict[str, str]:
    """Return the versions of JAX's packages that are installed, by name."""
    found = ((d.metadata["Name"], d.version) for d in metadata.distributions())
    return {name: version for name, version in found if name and name.startswith("jax")}


def versions() -> Iterator[Fact]:
    """Check the interpreter and the packages."""
    yield Fact("Python", sys.version.split()[0])
    for name in _PACKAGES:
        try:
            yield Fact(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Fact(name, "not installed")


def plugins(packages: dict[str, str]) -> Iterator[Fact]:
    """Check that JAX's GPU plugins are for one CUDA version, and of JAX's own version.

    Args:
        packages: the versions of JAX's packages, by name.
    """
    found = {n: v for n, v in packages.items() if n.endswith(("-plugin", "-pjrt"))}
    if not found:
        install = "pip install '.[pods]' in the checkout, or 'FILE.whl[pods]'"
        hint = f"to compile for GPUs that are not there: {install}"
        yield Fact("GPU plugin", f"none ({hint})")
    cudas = sorted({name.split("-")[1] for name in found})
    if len(cudas) > 1:
        what = f"plugins for {' and '.join(cudas)} clash: uninstall those of one"
        yield Fact("GPU plugins", ", ".join(found), what)
    for name, version in found.items():
        jax = packages.get("jax", "")
        wrong = f"jax is {jax}: pip install '{name}=={jax}'" if version != jax else ""
        yield Fact(name, version, wrong)


def _devices() -> Iterator[Fact]:
    import jax

    from jaxoverlap._jax.compat import PLUGIN_LOGGER
    from jaxoverlap.hardware.cluster import chips

    failures = PluginFailures()
    plugins = logging.getLogger(PLUGIN_LOGGER)
    plugins.addFilter(failures)
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        yield Fact("devices", "none", f"JAX finds no backend: {error}")
        return
    finally:
        plugins.removeFilter(failures)
    for why in failures.found:
        problem = why if _has_gpu() else ""
        yield Fact("GPU plugin", f"compiles for pods, cannot run here: {why}", problem)
    kinds = sorted({d.device_kind for d in devices})
    yield Fact("devices", f"{len(devices)} x {', '.join(kinds)}")
    wanted = os.environ.get("JAX_PLATFORMS")
    hint = " (on a machine without a GPU, JAX_PLATFORMS=cpu keeps JAX from looking for one)"
    yield Fact("JAX_PLATFORMS", wanted or f"not set{hint * (devices[0].platform == 'cpu')}")
    known = {chip.device_name for chip in chips()}
    for kind in kinds:
        if devices[0].platform != "cpu" and kind not in known:
            what = "no cost table: trial steps choose, or no rings are made (docs/add-a-chip.md)"
            yield Fact("chip", kind, what)


class PluginFailures(logging.Filter):
    """Records the errors that a logger would show as tracebacks.

    Attributes:
        found: the errors, a line each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is no error that was raised."""
        error = record.exc_info and record.exc_info[1]
        if not error:
            return True
        self.found.append(" ".join(str(error).split()))
        return False


def _has_gpu() -> bool:
    """Return whether NVIDIA's driver shows a GPU on this machine."""
    return os.path.exists("/dev/nvidia0")


def _hosts() -> Iterator[Fact]:
    import jax

    seen = jax.process_count()
    variables = {name: os.environ[name] for name in _SCHEDULERS if name in os.environ}
    wanted = max((int(n) for n in variables.values() if n.isdecimal()), default=1)
    problem = ""
    if wanted > seen and "JOB_COMPLETION_INDEX" not in variables:
        problem = "a job of several processes, and JAX sees one: jax.distributed.initialize() first"
    names = "".join(f", {name}={value}" for name, value in variables.items())
    yield Fact("processes", f"{seen}{names}", problem)


def _flags() -> Iterator[Fact]:
    from jaxoverlap.flags import check

    line = os.environ.get("XLA_FLAGS", "")
    if not line.strip():
        yield Fact("XLA_FLAGS", "not set")
        return
    for finding in check(line):
        wrong = f"{finding.status}: {finding.note}".rstrip(": ") if finding.dead else ""
        yield Fact("XLA_FLAGS", finding.text, wrong)
