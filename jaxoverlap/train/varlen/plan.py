"""A plan of one batch: which sequence is on which ring, what that takes, and its arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.train.varlen.arrays import Pieces, PlanArrays, layouts, pieces_of, slots_of
from jaxoverlap.train.varlen.costs import AttentionCosts, Floats
from jaxoverlap.train.varlen.remap import even_tokens
from jaxoverlap.train.varlen.rings import Bounds, Nodes, beside_s


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The plan of one batch. Make one by a `Planner`.

    Attributes:
        lengths: i[sequences], tokens of each.
        size: i[sequences], devices of each sequence's ring.
        ring: i[sequences], which of the rings of that size.
        ring_seconds: by ring size, each device's seconds of attention, forward and backward.
        flow: i[devices, devices], tokens that each device sends to each for the linear layers.
        nodes, costs, bounds: what it was made for.
    """

    lengths: np.ndarray
    size: np.ndarray
    ring: np.ndarray
    ring_seconds: dict[int, Floats]
    flow: np.ndarray
    nodes: Nodes
    costs: AttentionCosts
    bounds: Bounds

    @property
    def tokens(self) -> int:
        """Return the tokens of the batch."""
        return int(self.lengths.sum())

    @property
    def device_seconds(self) -> Floats:
        """Return each device's seconds of one layer's attention, forward and backward."""
        return sum(self.ring_seconds.values(), np.zeros(self.nodes.total))

    @property
    def seconds(self) -> float:
        """Return the seconds of the slowest device."""
        return float(self.device_seconds.max())

    @property
    def balance(self) -> float:
        """Return the mean of the devices' seconds over those of the slowest; 1 is even."""
        return float(self.device_seconds.mean() / self.seconds) if self.seconds else 1.0

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The chunks of sequences on each device."""
        return pieces_of(self.lengths, self.size, self.ring, self.nodes, self.bounds)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """The sequence and the position of each slot in attention, i32[devices, slots, 2]."""
        return slots_of(self.pieces, self.nodes, self.bounds)

    @functools.cached_property
    def _laid_out(self) -> tuple[np.ndarray, PlanArrays]:
        before = np.cumsum(self.lengths) - self.lengths
        sequence, position = self.slots[..., 0], self.slots[..., 1]
        first = np.append(before, 0)[sequence]
        held = np.where(sequence >= 0, first + position, -1)
        linear, to_attention, to_linear = layouts(held, self.flow, self.bounds)
        return linear, PlanArrays(sequence, position, to_attention, to_linear)

    @property
    def arrays(self) -> PlanArrays:
        """Return what a compiled step reads."""
        return self._laid_out[1]

    @property
    def linear(self) -> np.ndarray:
        """Return which token of the batch, sequence after sequence, lies where between attentions.

        i[devices, bounds.tokens]; -1 has none.
        """
        return self._laid_out[0]

    @functools.cached_property
    def linear_positions(self) -> np.ndarray:
        """The position in its sequence of each token between attentions; zero where none is."""
        before = np.cumsum(self.lengths) - self.lengths
        at = np.searchsorted(before, np.maximum(self.linear, 0), side="right") - 1
        return np.where(self.linear >= 0, self.linear - before[at], 0).astype(np.int32)

    def laid_out(self, tokens: np.ndarray, fill: Any = 0) -> np.ndarray:
        """Lay values of tokens, [tokens, ...], out as they lie between attentions.

        Raises:
            ValueError: if there are not as many as the batch has.
        """
        if len(tokens) != self.tokens:
            raise ValueError(f"{len(tokens)} tokens for a plan of {self.tokens}: expected as many")
        rows = tokens[np.maximum(self.linear, 0)]
        missing = (self.linear < 0).reshape(*self.linear.shape, *(1,) * (rows.ndim - 2))
        return np.where(missing, np.asarray(fill, rows.dtype), rows)

    @property
    def tokens_of_devices(self) -> np.ndarray:
        """Return the tokens of each device between attentions."""
        held = np.zeros(self.nodes.total, int)
        np.add.at(held, self.pieces.device, self.pieces.length)
        return held - self.flow.sum(axis=1) + self.flow.sum(axis=0)

    @property
    def layer_seconds(self) -> float:
        """Return the seconds of a layer, forward and backward, at the program's static sizes."""
        return self.seconds + beside_s(self.bounds, self.nodes, self.costs)

    @property
    def remap_tokens(self) -> int:
        """Return the tokens that change device for the linear layers."""
        return int(self.flow.sum())

    def draw(self, path: str | Path) -> None:
        """Draw a lane a device, as the ending of the file's name says; needs matplotlib."""
        from jaxoverlap.train.varlen.picture import draw

        draw(self, path)

    def __str__(self) -> str:
        even = even_tokens(self.tokens, self.nodes.total).max()
        table = Table("zone", "devices", "", "sequences", "tokens", "longest", "ms")
        for g in sorted(self.ring_seconds, reverse=True):
            on = self.lengths[self.size == g]
            if on.size:
                slowest = self.ring_seconds[g].max() * 1e3
                name = self.nodes.zone(g)
                sums = f"{on.size}", f"{on.sum()}", f"{on.max()}", f"{slowest:.3f}"
                how = "exchange" if g in self.costs.exchanged else "ring" if g > 1 else ""
                table.add_row(name, f"{g}", how, *sums)
        console = Console(width=80, color_system=None)
        with console.capture() as text:
            console.print(table)
        return (
            f"{len(self.lengths)} sequences, {self.tokens} tokens on {self.nodes.count} x "
            f"{self.nodes.devices} devices: attention takes {self.seconds * 1e3:.3f} ms a layer, "
            f"forward and backward, balance {self.balance:.2f}\n{text.get()}"
            f"{self.remap_tokens} tokens move for the linear layers; then a device has "
            f"{self.tokens_of_devices.max()} at most, and an even share is {even}"
        )
