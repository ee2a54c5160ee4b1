"""Presets of flags and variables for DGX systems, Google's A3 and A4, and AWS's P5.

XLA options are those that rings need (`flags.required`) and others on which sources agree;
variables are the network's, as its owner publishes them. Sources disagree, and most of their XLA
options are for steps without rings: a `Conflict` says who says what, and what was taken. All of it
is in presets.toml.

None of this was timed on a GPU here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from jaxoverlap.flags.required import BY_COPY, RINGS
from jaxoverlap.flags.setting import Claims, Conflict, Preset, Setting
from jaxoverlap.flags.variables import VARIABLES
from jaxoverlap.flags.xla import read
from jaxoverlap.hardware.cluster import parse_cluster


class _Network(msgspec.Struct, forbid_unknown_fields=True):
    """NCCL's variables for a network, and who publishes them."""

    variables: dict[str, str]
    source: str = ""


class _Machines(msgspec.Struct, forbid_unknown_fields=True):
    """A preset by the names of its parts; `thresholds` are the claims of that conflict."""

    name: str
    about: str
    chip: str
    conflicts: tuple[str, ...]
    thresholds: Claims
    network: str = ""
    source: str = ""


class _Presets(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of presets.toml."""

    sources: dict[str, str]
    dates: dict[str, str]
    settings: dict[str, Setting]
    networks: dict[str, _Network]
    conflicts: dict[str, Conflict]
    preset: tuple[_Machines, ...]

    def cited(self, source: str) -> str:
        """Return a source with the repository and file of each {name} in it."""
        return source.format_map(self.sources)

    def conflict(self, name: str, thresholds: Claims) -> Conflict:
        """Return a conflict, with its sources written out."""
        found = self.conflicts[name]
        said = thresholds if name == "thresholds" else found.said
        return replace(found, said=tuple((value, self.cited(source)) for value, source in said))

    def setting(self, name: str) -> Setting:
        """Return a setting, with its sources written out."""
        found = self.settings[name]
        return replace(found, source=self.cited(found.source))

    def variables(self, machines: _Machines) -> list[Setting]:
        """Return the variables of a network, each with its meaning as the reason."""
        if not machines.network:
            return []
        network = self.networks[machines.network]
        source = self.cited(machines.source or network.source)
        values = network.variables.items()
        return [Setting(name, value, VARIABLES[name].meaning, source) for name, value in values]

    def assembled(self, machines: _Machines) -> Preset:
        """Return a preset: what rings need, what all machines share, and its own."""
        blackwell = "b200" in machines.chip
        shared = ("cublas", "graphs" if blackwell else "one_queue", "memory", "launch_order")
        loops = ("pipelining", "double_buffering", "rematerialization")
        disputed = (*loops, "queues" if blackwell else "hopper_graphs", "memory")
        return Preset(
            machines.name,
            machines.about,
            machines.chip,
            (*RINGS, *map(self.setting, shared), *self.variables(machines)),
            tuple(self.conflict(c, machines.thresholds) for c in (*machines.conflicts, *disputed)),
        )


_all = msgspec.toml.decode(read("presets.toml"), type=_Presets)
DATES = _all.dates  # of each commit that was read
PRESETS: Mapping[str, Preset] = {m.name: _all.assembled(m) for m in _all.preset}
_OF_CHIP = {
    "a100-sxm-40": "dgx-a100",
    **{p.chip: p.name for p in PRESETS.values() if p.name.startswith(("dgx", "gb200"))},
}


def preset(pod: str) -> Preset:
    """Return the preset of a name in `PRESETS`, or of a cluster such as "h100-sxm:8x8".

    A cluster's network is taken to be that of NVIDIA's own systems of its chip. With one process a
    GPU no permute is a copy, and the option for copies is not set.

    Raises:
        ValueError: if it is neither.
    """
    if pod in PRESETS:
        return PRESETS[pod]
    if ":" not in pod:
        near = difflib.get_close_matches(pod.lower(), PRESETS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown preset {pod!r}: {hint}Known are {', '.join(PRESETS)}, and clusters such as "
            "'h100-sxm:8x8'"
        )
    cluster = parse_cluster(pod)
    chip_preset = PRESETS[_OF_CHIP[cluster.chip.name]]
    if cluster.gpus_per_process > 1:
        return chip_preset
    return replace(
        chip_preset, settings=tuple(s for s in chip_preset.settings if s.name != BY_COPY)
    )


def dated(source: str) -> str:
    """Return a source with the date of its commit, if it names one."""
    commit = source.partition("@")[2].partition(" ")[0]
    return f"{source} ({DATES[commit]})" if commit in DATES else source
