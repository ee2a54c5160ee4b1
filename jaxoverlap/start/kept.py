"""Keep what the trials of a step decided, for the next run of the same step on the same devices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._util.files import opened, sealed, write_atomically
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import warn
from jaxoverlap.plan.plan import Plan
from jaxoverlap.start.record import PLAIN, Trials
from jaxoverlap.step.check_plan import made_for
from jaxoverlap.step.context import mesh_of
from jaxoverlap.step.options import Options
from jaxoverlap.tuning.tune import Tuning

_FORMAT = "jaxoverlap trials"


class KeptDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision in a file.

    Attributes:
        devices: how many the step ran on, and what they call themselves.
        plan: of the program that is kept; None for the original step.
        trials: how it was found.
    """

    devices: str
    plan: Plan | None
    trials: Trials

    @classmethod
    def from_bytes(cls, raw: bytes) -> KeptDecision:
        """Return the decision of a file's content.

        Raises:
            ValueError: if it is damaged, or was written by another version.
        """
        kept = msgspec.json.decode(opened(_FORMAT, raw), type=cls)
        if kept.plan is not None:
            kept.plan.checked()
        if (kept.plan is None) != (kept.trials.taken == PLAIN):
            raise ValueError("its plan is not that of the program that it says was kept")
        return kept


def identity(call: jits.Call, options: Options, tuning: Tuning | None = None) -> str:
    """Hash what all processes of a run have in common: step, mesh, devices, versions, options."""
    mesh = mesh_of(call)
    origin = made_for(call, mesh, options.cluster)
    devices = [(device.id, device.process_index) for device in mesh.devices.flat]
    given = sorted(dict(call.params["compiler_options_kvs"]).items())
    said = repr(options), tuning and tuning.budget_s
    depends = (msgspec.json.encode(origin), dict(mesh.shape), devices, said, given)
    return hashlib.sha256(repr((depends, source_hash())).encode()).hexdigest()


def key_of(identity: str) -> str:
    """Hash all that a decision depends on: the identity of a step, and XLA's and NCCL's settings.

    These are another process's own, and may name a file for each.
    """
    settings = {k: v for k, v in os.environ.items() if k == "XLA_FLAGS" or k.startswith("NCCL_")}
    return hashlib.sha256(repr((identity, sorted(settings.items()))).encode()).hexdigest()[:24]


def read(folder: Path, key: str) -> KeptDecision | None:
    """Return a decision; None if there is none, or, with a warning, if its file is damaged."""
    path = file_of(folder, key)
    try:
        return KeptDecision.from_bytes(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warn(f"{path} is ignored, and the decision made again: {error}")
        return None


def write(folder: Path, key: str, kept: KeptDecision) -> None:
    """Write a decision; where that is not possible, warn."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file_of(folder, key), sealed(_FORMAT, msgspec.json.encode(kept)))
    except OSError as error:
        warn(
            f"{folder} cannot be written, so the next run decides again: {error}. Name another "
            "folder in overlap(cache=) or JAXOVERLAP_CACHE"
        )


def file_of(folder: Path, key: str) -> Path:
    """Return the file of a decision."""
    return folder / f"{key}.json"


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the key and the file of each decision, the newest first."""
    found = sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)
    return ((path.stem, path) for path in found)
