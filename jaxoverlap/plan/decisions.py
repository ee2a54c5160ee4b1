"""Record what becomes of each matmul of a step, and of each collective, as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

Style = Literal["one_way", "two_way", "direct", "sliced", "plain"]


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the pieces of a decomposed collective travel.

    Attributes:
        style: "one_way": a ring, every hop to the next device. "two_way": two rings at once, one a
            direction, each half as long (Wang et al., ASPLOS '23). "direct": each piece straight to
            where it is needed, so that no hop waits for another (CommFuse, arXiv 2604.24013).
            "sliced": no ring; the collective in slices, each under another slice's matmul.
            "plain": the matmul is not rewritten, for where a hop costs more than its chunk hides.
        slices: pieces of each chunk of a ring, each with a hop and a matmul of its own; for
            "sliced" the slices of the collective, at least 2.
    """

    style: Style = "one_way"
    slices: int = 1

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(f"style {self.style!r}: expected one of {', '.join(get_args(Style))}")
        least = 2 if self.style == "sliced" else 1
        counts = isinstance(self.slices, int) and not isinstance(self.slices, bool)
        if not counts or self.slices < least:
            raise ValueError(
                f"{self.slices!r} slices of style {self.style}: expected a whole number, "
                f"{least} or more"
            )

    def __str__(self) -> str:
        return self.style if self.slices == 1 else f"{self.style} x {self.slices}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant that `str` wrote, as in "one_way" or "two_way x 2".

        Raises:
            ValueError: if `text` is not one; it says what was expected.
        """
        style, times, slices = (part.strip() for part in text.partition(" x "))
        if style not in get_args(Style) or (times and not slices.isdecimal()):
            raise ValueError(
                f"variant {text!r}: expected a style ({', '.join(get_args(Style))}), alone or with "
                'slices, as in "two_way x 2"'
            )
        return cls(style, int(slices) if times else 1)  # type: ignore[arg-type]


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="ring", forbid_unknown_fields=True):
    """One matmul that becomes a ring.

    Attributes:
        site: the matmul's id: its index among the step's `dot_general`s.
        ring: the id that its ring is named after: its own, or that of the first matmul in it.
        source: "file:line" of the code that wrote it, outside of JAX and of libraries of layers.
        module: the named scopes around it, as in "GPT.layers_0.mlp.up": flax's linen names one for
            each module; "" if there is none.
        einsum: its letters, as in "abc,cd->abd".
        kind: the pass that decomposes it, as in "all_gather_matmul".
        axis: the mesh axis of the ring.
        letter: the dim that is split into chunks.
        variant: how the pieces of the collective travel.
        num_chunks: pieces that the matmul is split into; 1 if it only reads an operand that is
            gathered ahead.
        bytes_moved: bytes that each device sends for it in one step; 0 where the first matmul of
            its ring has them.
        runs: how often one step runs it.
        others: collectives of this matmul on other axes, which stay XLA's, with their bytes.
        why: the reason for this axis, if there was a choice.
    """

    site: int
    ring: int
    source: str
    module: str = ""
    einsum: str
    kind: str
    axis: str
    letter: str
    num_chunks: int
    bytes_moved: int
    runs: int
    variant: Variant = Variant()
    others: tuple[str, ...] = ()
    why: str = ""


Code = Literal["no collective", "no ring", "not ringed", "skipped"]


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a matmul is not rewritten.

    Attributes:
        code: "no collective": there is nothing to overlap. "no ring": no ring does what it waits
            for. "not ringed": a ring is possible, and not worth it or not chosen. "skipped": by
            request.
        detail: the rest, in words.
    """

    code: Code
    detail: str = ""

    def __str__(self) -> str:
        if self.code == "no ring" and self.detail:
            return self.detail
        return f"{self.code}: {self.detail}" if self.detail else self.code


NO_RINGS = Reason("not ringed", "this plan has no rings")


class Skip(msgspec.Struct, frozen=True, kw_only=True, tag="skip", forbid_unknown_fields=True):
    """One matmul that is not rewritten, and why.

    Attributes:
        site, source, module, einsum, runs: as in `Decision`.
        why: the reason.
    """

    site: int
    source: str
    module: str = ""
    einsum: str
    runs: int
    why: Reason

    @property
    def reason(self) -> str:
        """Why, in words."""
        return str(self.why)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to overlap."""
        return self.why.code == "no collective"

    @property
    def chosen(self) -> bool:
        """Whether it is skipped by choice: by request, or as a ring costs more than it hides."""
        return self.why.code in ("skipped", "not ringed")

    @property
    def left_plain(self) -> bool:
        """Whether it could have a ring, which was not worth it or not chosen."""
        return self.why.code == "not ringed"


def without_rings(entries: Iterable[Decision | Skip], why: Reason) -> tuple[Skip, ...]:
    """Return the entries of a step without rings; skipped matmuls keep their reasons."""

    def skip(entry: Decision) -> Skip:
        return Skip(
            site=entry.site,
            source=entry.source,
            module=entry.module,
            einsum=entry.einsum,
            runs=entry.runs,
            why=why,
        )

    return tuple(skip(e) if isinstance(e, Decision) else e for e in entries)


class Remaining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one source line that stay XLA's.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        axes: the mesh axes whose devices take part.
        source: "file:line" of the code that computes the value that moves.
        runs: how many of them one step runs.
        bytes_moved: bytes that each device sends in them in one step.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    runs: int
    bytes_moved: int
