"""Record what becomes of each matmul of a step, and of what stands beside it, as data."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Style = Literal["one_way", "two_way", "direct", "sliced", "plain"]


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way in which the pieces of a decomposed collective travel.

    Attributes:
        style: "one_way": a ring, every hop to the next device. "two_way": two rings at once, one a
            direction, each half as long (Wang et al., ASPLOS '23). "direct": each piece straight to
            where it is needed, so that no hop waits for another (CommFuse, arXiv 2604.24013).
            "sliced": no ring; the whole collective in slices, each under another slice's matmul.
            "plain": the matmul is left alone, for where a hop costs more than the chunk over it.
        slices: pieces that each chunk of a ring is cut into, each with a hop and a matmul of its
            own; for "sliced" the slices of the whole collective, at least 2.
    """

    style: Style = "one_way"
    slices: int = 1

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(f"style {self.style!r}: expected one of {', '.join(get_args(Style))}")
        least = 2 if self.style == "sliced" else 1
        whole = isinstance(self.slices, int) and not isinstance(self.slices, bool)
        if not whole or self.slices < least:
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
        site: the matmul's place among the step's `dot_general`s.
        ring: the site that its ring is named after: its own, or that of the first matmul in it.
        source: "file:line" of the code that wrote it.
        einsum: its letters, as in "abc,cd->abd".
        kind: the pass that decomposes it, as in "all_gather_matmul".
        axis: the mesh axis of the ring.
        letter: the dim that is cut into chunks.
        variant: how the pieces of the collective travel.
        num_chunks: pieces that the matmul is cut into.
        bytes_moved: bytes that each device sends for it in one step; 0 where the first matmul of
            its ring has them.
        runs: how often one step runs it.
        others: collectives of this matmul on other axes, which stay XLA's, with their bytes.
        why: the reason for this axis, if there was a choice.
    """

    site: int
    ring: int
    source: str
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


LEFT_PLAIN = "left plain: "  # begins the reason of a matmul whose ring was not made


class Skip(msgspec.Struct, frozen=True, kw_only=True, tag="skip", forbid_unknown_fields=True):
    """One matmul that is left alone, and why.

    Attributes:
        site, source, einsum, runs: as in `Decision`.
        reason: why; it starts with "no collective" where there is nothing to overlap, and with
            "left" where a ring could be and is not wanted.
    """

    site: int
    source: str
    einsum: str
    runs: int
    reason: str

    @property
    def chosen(self) -> bool:
        """Return whether it was left alone by choice: as asked, or as not worth a ring."""
        return self.reason.startswith("left ")

    @property
    def left_plain(self) -> bool:
        """Return whether it could have a ring, which was not worth it or not chosen."""
        return self.reason.startswith(LEFT_PLAIN)


class Remaining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one source line that stay XLA's.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        axes: the mesh axes whose devices take part.
        source: "file:line" of the code that wrote the value that moves.
        runs: how many of them one step runs.
        bytes_moved: bytes that each device sends in them in one step.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    runs: int
    bytes_moved: int


class Scattered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gradient of an embedding lookup, scattered where XLA would all-reduce it.

    Attributes:
        source: "file:line" of the lookup.
        axes: the mesh axes that it is scattered over, in order.
        bytes_moved: bytes that each device sends in one run.
    """

    source: str
    axes: tuple[str, ...]
    bytes_moved: int


class ScatteredSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sum of activations that stays scattered up to the next matmuls, which gather it.

    Attributes:
        site: the matmul that gives it.
        dim: the dim of its result that is scattered.
        axes: the mesh axes on that dim then, major to minor; the last is the one summed over.
    """

    site: int
    dim: int
    axes: tuple[str, ...]
