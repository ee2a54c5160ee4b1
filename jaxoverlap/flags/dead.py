"""Flags that XLA no longer has, or reads no more, as others still publish them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxoverlap.flags.xla import read, versions


class Dead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flag of the past.

    Attributes:
        name: its name.
        instead: what to do now.
        published: where it still stands.
    """

    name: str
    instead: str
    published: tuple[str, ...]

    @property
    def until(self) -> str:
        """The last version of jaxlib that takes it; empty: none of those that were asked."""
        return next((v for v, a in reversed(versions().items()) if self.name in a.dead), "")


_all = msgspec.toml.decode(read("dead.toml"), type=dict[str, list[Dead]])
DEAD: Mapping[str, Dead] = {d.name: d for d in _all["flag"]}
