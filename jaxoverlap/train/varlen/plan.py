"""A plan of one batch: which sequence is on which ring, its times, its arrays, its picture."""

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
from jaxoverlap.train.varlen.rings import Bounds, Nodes, beside_s, hidden_s

_COLOURS = {"inter-node": "#c44e52", "intra-node": "#dd8452", "local": "#4c72b0"}
_LINEAR = "#b0b0b0"


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
        local = self.ring_seconds.get(1, np.zeros(self.nodes.total))
        total = sum(self.ring_seconds.values(), np.zeros(self.nodes.total))
        return total - hidden_s(local, self.bounds, self.nodes, self.costs)

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
        """Return the index in the batch of the token in each device's slot between attentions.

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
        """Gather values of tokens, [tokens, ...], into the devices' slots between attentions.

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
        """Draw a lane a device, its rings one after the other, and the time of the slowest.

        Args:
            path: of the file, whose ending says its kind (.png, .svg).

        Raises:
            ImportError: if matplotlib is not installed.
        """
        import matplotlib.figure

        figure = matplotlib.figure.Figure(
            figsize=(9, 1.6 + 0.22 * min(self.nodes.total, 64)), layout="constrained"
        )
        self._draw_lanes(figure.subplots())
        metadata = {"Date": None} if str(path).endswith("svg") else None
        figure.savefig(path, dpi=110, metadata=metadata)

    def _draw_lanes(self, axes: Any) -> None:
        from matplotlib.patches import Patch

        total, nodes = self.nodes.total, self.nodes
        lanes, left = np.arange(total), np.zeros(total)
        linear = self.bounds.tokens * self.costs.linear_s * 1e3
        whole = linear > 0 and not self.bounds.sent  # devices do not wait between the two
        slowest = self.layer_seconds if whole else self.seconds
        for size in sorted(self.ring_seconds, reverse=True):
            milliseconds = self.ring_seconds[size] * 1e3
            colour = _COLOURS[nodes.zone(size)]
            axes.barh(lanes, milliseconds, left=left, color=colour, height=0.8, edgecolor="white")
            for ring in range(total // size if size > 1 else 0):
                middle = ring * size + (size - 1) // 2  # a lane, not the gap between two
                if milliseconds[ring * size] > 0.08 * slowest * 1e3:
                    center = left[ring * size] + milliseconds[ring * size] / 2
                    count = int(((self.size == size) & (self.ring == ring)).sum())
                    axes.text(center, middle, f"ring of {size}: {count}", ha="center",
                              va="center", fontsize=7, color="white")  # fmt: skip
            left += milliseconds
        if whole:
            axes.barh(lanes, linear, left=left, color=_LINEAR, height=0.8, edgecolor="white")
        axes.axvline(slowest * 1e3, color="black", lw=1, ls="--")
        for edge in range(nodes.devices, total, nodes.devices):
            axes.axhline(edge - 0.5, color="grey", lw=0.6)
        axes.invert_yaxis()
        axes.set(
            xlabel=f"estimated ms per {'layer' if whole else 'attention'}, forward and backward",
            ylabel=f"device ({nodes.devices} per node)",
            title=f"{len(self.lengths)} sequences, {self.tokens:,} tokens, the longest "
            f"{self.lengths.max():,}; attention's balance {self.balance:.2f}",
        )
        used = {nodes.zone(g) for g in self.ring_seconds if self.ring_seconds[g].any()}
        patches = [Patch(color=c, label=name) for name, c in _COLOURS.items() if name in used]
        patches += [Patch(color=_LINEAR, label="linear layers")] if whole else []
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)

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
