"""The terms by which all matmuls of a step are decided on.

Requests name matmuls by source line or module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.plan.decisions import Reason, Variant

Granularity = Variant | Mapping[str, Variant] | None


@dataclass(frozen=True)
class Requests:
    """The requests for single matmuls that `overlap` was given.

    Attributes:
        skip: source lines ("gpt.py:88") or modules ("mlp.up") whose matmuls are skipped; globs.
        granularity: how the pieces of every ring travel, or of those of some lines or modules.
        rejected: matmul id -> reason, for matmuls whose rings cost the step more than they hide.
    """

    skip: Collection[str] = ()
    granularity: Granularity = None
    rejected: Mapping[int, str] = field(default_factory=dict)

    def check(self, names: Mapping[int, Sequence[str]]) -> None:
        """Check that every named line or module has a matmul.

        Args:
            names: the line and the module of each matmul, by its id.

        Raises:
            ValueError: if one does not.
        """
        lines = self.granularity if isinstance(self.granularity, Mapping) else ()
        named = [("skip", line) for line in self.skip] + [("granularity", line) for line in lines]
        for option, pattern in named:
            if not any(_matches(pattern, one) for one in names.values()):
                known = ", ".join(_known(names)) or "none"
                raise UserError(
                    f"{option}={pattern!r} names no line and no module of a matmul; the step's "
                    f"matmuls are at: {known}"
                )

    def refusal(self, names: Sequence[str]) -> Reason | None:
        """Return why a matmul, by its line and its module, is skipped; None if it is not."""
        if any(_matches(pattern, names) for pattern in self.skip):
            return Reason("skipped", "by skip=")
        if (variant := self.variant(names)) is not None and variant.style == "plain":
            return Reason("not ringed", "by granularity=")
        return None

    @property
    def rejections(self) -> dict[int, Reason]:
        """The reason of the skip of each rejected matmul, by matmul id."""
        return {site: Reason("not ringed", why) for site, why in self.rejected.items()}

    def variant(self, names: Sequence[str]) -> Variant | None:
        """Return how a ring's pieces are to travel, by its line and module; None if unsaid."""
        if not isinstance(self.granularity, Mapping):
            return self.granularity
        return next((v for line, v in self.granularity.items() if _matches(line, names)), None)


@dataclass(frozen=True)
class Terms:
    """The facts and requests that all decisions on a step go by.

    Attributes:
        axis_sizes: devices along each mesh axis.
        requests: the requests for single matmuls.
        costs: the cost of a byte along each mesh axis, from `topology.axis_costs`; 1 by default.
        prices: the prices of rings on the cluster, if that is known.
        prefetch: whether the weights of a scan are gathered before any ring.
        rings: whether matmuls may become rings; if not, `prefetch` and `once` are all that is done.
        once: whether, without rings, what several matmuls of a body gather is gathered once.
        explicit: the mesh's axes whose shardings are a part of types.
        unread: why none of the shardings could be read; None if they could.
    """

    axis_sizes: Mapping[str, int]
    requests: Requests = field(default_factory=Requests)
    costs: Mapping[str, float] = field(default_factory=dict)
    prices: RingCosts | None = None
    prefetch: bool = False
    rings: bool = True
    once: bool = False
    explicit: Sequence[str] = ()
    unread: str | None = None


def _matches(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern names a line or a module; the front of either may be left out."""
    source, module = names
    return (
        fnmatchcase(source, pattern)
        or fnmatchcase(source, f"*/{pattern}")
        or pattern.endswith(f"/{source}")
        or (bool(module) and fnmatchcase(f".{module}", f"*.{pattern}"))
    )


def _known(names: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield each line once, with its modules."""
    modules: dict[str, dict[str, None]] = {}
    for source, module in names.values():
        modules.setdefault(source, {})[module] = None
    for source, names_of_line in modules.items():
        listed = ", ".join(filter(None, names_of_line))
        yield f"{source} ({listed})" if listed else source
