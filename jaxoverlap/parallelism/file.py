"""Read the file of a configuration that trainers follow, placement and all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxoverlap.parallelism.configuration import AXES, Configuration

_PREDICTED = {"step_s", "terms", "memory", "error", "simulated_s", "simulated_bytes", "failed"}


@dataclass(frozen=True)
class Chosen:
    """A configuration as a file has it.

    Attributes:
        configuration: the split.
        order: its placement: the axes over the devices, slowest first.
        global_batch, cluster: what it was made for; None in a file that says nothing of it.
    """

    configuration: Configuration
    order: tuple[str, ...]
    global_batch: int | None = None
    cluster: str | None = None


def read_chosen(path: str | Path) -> Chosen:
    """Read the first configuration of a file of `jaxoverlap configure --json`, or one of its.

    Raises:
        ValueError: if the file cannot be read or is another one; it says what was expected.
    """
    try:
        data = msgspec.json.decode(Path(path).read_bytes(), type=dict)
        first = data.get("configurations", [data])[0]
        order = first.get("order", AXES)
    except (OSError, LookupError, AttributeError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"{type(error).__name__}: {error}: expected a file of `jaxoverlap configure --json`"
        ) from error
    if sorted(order) != sorted(AXES):
        raise ValueError(f"order={order}: expected each of {', '.join(AXES)} once, slowest first")
    return Chosen(
        load_configuration(first), tuple(order), data.get("global_batch"), data.get("cluster")
    )


def load_configuration(data: Mapping[str, Any]) -> Configuration:
    """Return a configuration from plain data, as `Configurations.to_builtins` has them.

    Raises:
        ValueError: for a field that is unknown, or of a value that no configuration has.
    """
    known = set(Configuration.__dataclass_fields__)
    if unknown := set(data) - known - _PREDICTED - {"order"}:
        raise ValueError(f"unknown fields {sorted(unknown)}: known are {', '.join(sorted(known))}")
    return Configuration(**{name: value for name, value in data.items() if name in known})


def plain(configuration: Configuration, order: tuple[str, ...]) -> dict[str, Any]:
    """Return a configuration as plain data: what `load_configuration` takes, and the placement."""
    return {**asdict(configuration), "order": list(order)}
