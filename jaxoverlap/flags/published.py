"""Sets of XLA options that others publish for training on GPUs.

Unlike `presets.py`, which has what a cluster needs, these are complete sets that claim to make a
plain step fast: `overlap()` compiles some of them too, and takes what is fastest. What the
installed XLA rejects is left out of each (see `accepted`). Environment variables (NCCL's, the
allocator's) change no schedule. Flags that have been renamed have their new names. All of it is in
published.toml.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxoverlap._jax import jits
from jaxoverlap.flags.xla import read


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published set of XLA options, with its source."""

    source: str
    options: dict[str, str]


PUBLISHED = msgspec.toml.decode(read("published.toml"), type=dict[str, Published])
# Those that `overlap()` holds a step against. The other one is slower than XLA's defaults in all of
# the ten steps of benchmarks.pods that XLA compiles with it.
COMPARED: tuple[Literal["O1", "gpu-recipes"], ...] = ("O1", "gpu-recipes")


def accepted(name: str, device: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a set's options that a device's XLA accepts, and the names of those it rejects."""
    options = PUBLISHED[name].options
    known = jits.accepted_options(options, device)
    return known, tuple(n for n in options if n not in known)
