"""Define presets and their parts, and write them in the forms that XLA and shells take."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from jaxoverlap.flags.variables import VARIABLES
from jaxoverlap.flags.xla import FLAGS


@dataclass(frozen=True)
class Setting:
    """An XLA option or an environment variable, with its value, reason and source.

    Attributes:
        name: in `flags.FLAGS` or `flags.VARIABLES`.
        value: as compiler options or the environment have it.
        reason: why it is set.
        source: who publishes it, or where it was tried; several with "; " between.
    """

    name: str
    value: str
    reason: str
    source: str

    @property
    def is_variable(self) -> bool:
        """Return whether the setting is an environment variable, and not an XLA option."""
        return self.name in VARIABLES


Claims = tuple[tuple[str, str], ...]  # a value, and the sources that give it


@dataclass(frozen=True)
class Conflict:
    """An option or variable to which published sources give different values.

    Attributes:
        name: the flag or variable.
        said: (value, source) for each published value; sources as in `Setting`.
        ours: the value taken; empty: it is not set.
        why: the reason for `ours`.
    """

    name: str
    said: Claims
    ours: str
    why: str


@dataclass(frozen=True)
class Preset:
    """The options and variables that an overlapped step needs on a kind of cluster.

    Attributes:
        name: as `preset` takes it.
        about: the machines, in a few words.
        chip: theirs, as `parse_cluster` takes it.
        settings: options, then variables.
        conflicts: where sources disagree, with each other or with what rings need.
    """

    name: str
    about: str
    chip: str
    settings: tuple[Setting, ...]
    conflicts: tuple[Conflict, ...]

    @property
    def options(self) -> dict[str, str]:
        """Return the options as `jax.jit(compiler_options=...)` takes them."""
        return {s.name: s.value for s in self.settings if not s.is_variable}

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables, without XLA_FLAGS."""
        return {s.name: s.value for s in self.settings if s.is_variable}

    @property
    def xla_flags(self) -> str:
        """Return the options as a line for XLA_FLAGS."""
        return " ".join(f"--{n}={FLAGS[n].in_xla_flags(v)}" for n, v in self.options.items())

    @property
    def environment(self) -> dict[str, str]:
        """Return XLA_FLAGS and the variables."""
        return {"XLA_FLAGS": self.xla_flags, **self.variables}

    @property
    def env_file(self) -> str:
        """Return a shell script that exports XLA_FLAGS and the variables."""
        lines = self.environment
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in lines.items())
