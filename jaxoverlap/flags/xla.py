"""XLA's flags for overlap, as data: what they mean, and which versions of jaxlib have them.

Meanings are in xla.toml. Each compiler's flags and their defaults are in xla.json, which
`python -m benchmarks.flag_table` writes anew from the compilers themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import msgspec

from jaxoverlap._util.files import packaged

Kind = Literal["bool", "int", "text", "enum", "list", "map"]


class Flag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An XLA flag, with its meaning and its default in each tested jaxlib.

    Attributes:
        name: as XLA_FLAGS and `jax.jit(compiler_options=)` have it.
        kind: the kind of its values: "enum" is one of some names, "list" several, with commas
            between, and "map" key=value, with commas between.
        meaning: in a few words.
        enum: which names, if it is one.
    """

    name: str
    kind: Kind
    meaning: str
    enum: Literal["", "memory", "pipelining", "unrolling"] = ""

    @property
    def short(self) -> Mapping[str, str]:
        """Map an enum's values from the form of compiler options to that of XLA_FLAGS."""
        return _all.values.get(self.enum, {})

    @property
    def defaults(self) -> Mapping[str, str]:
        """Return the default by version of jaxlib; "" where none is set."""
        return {v: a.defaults[self.name] for v, a in versions().items() if self.name in a.defaults}

    @property
    def since(self) -> str:
        """Return the first tested version of jaxlib that has the flag."""
        return next(iter(self.defaults), "")

    @property
    def until(self) -> str:
        """Return the last tested jaxlib that has the flag; empty if that is the newest."""
        last = [*self.defaults][-1]
        return "" if last == [*versions()][-1] else last

    def in_xla_flags(self, value: str) -> str:
        """Translate a value from the form of compiler options to that of XLA_FLAGS.

        Raises:
            ValueError: if it is an enum, and the value is not known here.
        """
        if self.kind == "bool":
            return value.lower()
        if self.kind != "enum":
            return value
        if value not in self.short:
            raise ValueError(f"{self.name}={value!r}: expected one of {', '.join(self.short)}")
        return self.short[value]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags that one version of jaxlib has, with their defaults.

    Attributes:
        defaults: the defaults of the flags in xla.toml that it has.
        dead: the names in dead.toml that it has.
        options: those flags that are compiler options; empty where only jaxlib was installed.
    """

    defaults: dict[str, str]
    dead: list[str]
    options: list[str] = []


@functools.cache
def versions() -> dict[str, Asked]:
    """Return the flags of the tested versions of jaxlib, oldest first."""
    return msgspec.json.decode(read("xla.json"), type=dict[str, Asked])


def read(name: str) -> bytes:
    """Return the contents of a file of this package."""
    return packaged("jaxoverlap.flags", name)


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of xla.toml."""

    flag: list[Flag]
    values: dict[str, dict[str, str]]


_all = msgspec.toml.decode(read("xla.toml"), type=_Described)
FLAGS: Mapping[str, Flag] = {f.name: f for f in _all.flag}


# -- flags of the past ----------------------------------------------------------------------------


class Dead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flag that XLA no longer reads, with its replacement.

    Attributes:
        name: its name.
        instead: what to do now.
        published: where it is still published.
    """

    name: str
    instead: str
    published: tuple[str, ...]

    @property
    def until(self) -> str:
        """Return the last tested version of jaxlib that has the flag; empty if none has it."""
        return next((v for v, a in reversed(versions().items()) if self.name in a.dead), "")


_dead = msgspec.toml.decode(read("dead.toml"), type=dict[str, list[Dead]])
DEAD: Mapping[str, Dead] = {d.name: d for d in _dead["flag"]}
