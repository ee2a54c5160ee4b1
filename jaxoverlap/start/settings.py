"""Hold the settings of a start, and choose whether a call starts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from jaxoverlap._util.files import kept_folder
from jaxoverlap.flags import is_gpu
from jaxoverlap.start.record import Trials

StartMode = Literal["plain", "decided"]
TRIAL_STEPS = 60  # at most, for the original step and the best few
LEAST_TRIALS = 6  # of two programs: one that is not counted, and two that are


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a step starts.

    Attributes:
        mode: as `start` of `overlap`; None: "plain" on GPUs, "decided" on other devices.
        trials: the trial steps at most.
        cache: the folder of decisions; None for the user's.
        on_trials: is called with the record once the trials are over; None prints a line.
    """

    mode: StartMode | None = "decided"
    trials: int = TRIAL_STEPS
    cache: Path | None = None
    on_trials: Callable[[Trials], object] | None = field(default=None, compare=False)

    @property
    def folder(self) -> Path:
        """The folder of decisions."""
        return (self.cache or kept_folder()) / "starts"

    def is_plain(self, mesh: Mesh) -> bool:
        """Return whether a step on a mesh starts as it is."""
        return is_gpu(mesh) if self.mode is None else self.mode == "plain"
