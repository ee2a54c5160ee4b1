"""Environment variables of NCCL, of networks' plugins for it, of CUDA and of JAX, as data.

They are in variables.toml. All names that NCCL's source reads are in nccl.json, as NCCL says
nothing of a variable that it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import msgspec

from jaxoverlap.flags.xla import read

NCCL_VERSION = "2.30.7"  # of NVIDIA/nccl@5067397c, whose source was read

# Variables that a plugin reads, and not NCCL; the beginnings of their names.
PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHIMNET_", "NCCL_TUNER_CONFIG_")


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment variable, with its meaning and the program that reads it.

    Attributes:
        name: its name.
        kind: the kind of its values; "list" is several with commas between.
        meaning: in a few words.
        default: what holds where it is not set; empty: that depends, or nothing.
        since: the first version of its reader that reads it; empty: not looked up.
        reader: who reads it.
    """

    name: str
    kind: Literal["bool", "int", "float", "text", "list"]
    meaning: str
    default: str = ""
    since: str = ""
    reader: str = "NCCL"


_all = msgspec.toml.decode(read("variables.toml"), type=dict[str, list[Variable]])
VARIABLES: Mapping[str, Variable] = {v.name: v for v in _all["variable"]}


class _Names(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    names: frozenset[str]


@functools.cache
def nccl_names() -> frozenset[str]:
    """Return the names of the variables that NCCL's source reads."""
    return msgspec.json.decode(read("nccl.json"), type=_Names).names
