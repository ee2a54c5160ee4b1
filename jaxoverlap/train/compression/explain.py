"""List what a synchronisation sends per layer, and what it costs on a cluster."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.model import CostModel
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.compressors.compressor import NoCompression
from jaxoverlap.train.compression.state import Control
from jaxoverlap.train.compression.sync import MIN_FACTOR, RAW, raw_bytes
from jaxoverlap.train.compression.wire import sent_bytes

_HLO_KINDS = {"mean": "all-reduce", "gather": "all-gather", "exchange": "all-to-all"}


def explained(averager: Averager, control: Control, params: Any) -> str:
    """Return a table of the layers with their settings, bytes and errors, and a summary below.

    Args:
        averager: at the settings in use.
        control: what they were chosen by.
        params: arrays or shapes.
    """
    workers = averager.workers
    table = Table(box=None, header_style="", pad_edge=False)
    table.add_column("layer", overflow="fold")
    for title in ("shape", "setting", "kB", "of raw", "error", "of budget"):
        table.add_column(title, justify="right")
    errors = _at(control, control.settings)
    budget = float(np.sum(_at(control, control.reference)))
    for number, layer in enumerate(averager.layers):
        sent, uncompressed = averager.layer_bytes(number), raw_bytes(layer, workers) * layer.count
        shape = f"{layer.rows} x {layer.cols}" + (f" x {layer.stack}" if layer.stack else "")
        known = math.isfinite(errors[number])
        table.add_row(
            layer.name,
            shape,
            "raw" if (setting := averager.settings[number]) is None else f"{setting:g}",
            f"{sent / 1e3:.1f}",
            f"1 / {uncompressed / sent:.1f}",
            f"{errors[number]:.3g}" if known else "-",
            f"{errors[number] / budget:.1%}" if known and budget > 0 else "-",
        )
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    console.print(f"{_name(averager)}, {workers} workers, after {int(control.count)} steps")
    console.print(table)
    console.print(_summary(averager, control, params, float(np.sum(errors)), budget))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _summary(averager: Averager, control: Control, params: Any, error: float, budget: float) -> str:
    sync, workers = averager.sync, averager.workers
    leaves = jax.tree.leaves(params)
    uncompressed = _num_bytes(leaves) * 2 * (workers - 1) / workers
    sent = averager.sent_bytes(params)
    left = len(leaves) - len(averager.of_leaf)
    text = (
        f"A worker sends {sent / 1e3:.1f} kB a step, 1 / {uncompressed / max(sent, 1):.1f} of "
        f"{uncompressed / 1e3:.1f} kB; {left} of {len(leaves)} leaves go raw, in one all-reduce."
    )
    if math.isfinite(error) and sync.by_error:
        text += f" Error {error:.4g} of a budget of {budget:.4g}."
    if averager.left_raw:
        text += f" Matrices among them{_left_raw(averager)}."
    if averager.fixed:
        text += " The default setting is every layer's largest candidate: nothing is measured."
    if int(control.guarded):
        text += " The guard 'never worse than uniform' kept the uniform settings."
    if not np.array_equal(control.pending, control.settings):
        text += " Other settings are chosen, and come into use soon."
    return text


@dataclass(frozen=True)
class AveragePrice:
    """Seconds of one average on a cluster, by the cost model, without concurrent work.

    Attributes:
        raw_s: of all gradients in one all-reduce.
        wire_s: of the compressed average's collectives.
        arithmetic_s: of compressing and putting together: the matrices' passes through memory.
    """

    raw_s: float
    wire_s: float
    arithmetic_s: float

    @property
    def pays(self) -> bool:
        """Return whether the compressed average takes less."""
        return self.wire_s + self.arithmetic_s < self.raw_s

    def __str__(self) -> str:
        verdict = "compression pays" if self.pays else "compression does not pay"
        return (
            f"By price {verdict}: {self.wire_s * 1e3:.3g} ms of collectives and "
            f"{self.arithmetic_s * 1e3:.3g} ms of arithmetic for {self.raw_s * 1e3:.3g} ms raw."
        )


def price(averager: Averager, params: Any, cost: CostModel, group: Group) -> AveragePrice:
    """Estimate an average: seconds of its collectives and of its compute.

    Args:
        averager: at the settings in use.
        params: arrays or shapes; what is sharded over other axes counts by its shard.
        cost: the cluster's.
        group: of the workers' axis.
    """
    leaves = jax.tree.leaves(params)
    shares = [_share(leaf) for leaf in leaves]
    sums = dict[tuple[int, str], float]()  # requests of a kind that are made together are one
    arithmetic_s = 0.0
    for number, layer in enumerate(averager.layers):
        compressor, setting = averager.method(number)
        requests = compressor.requests(layer, setting, averager.workers)
        passes = compressor.memory_passes * 4 * layer.size * shares[layer.leaf]
        for turn, (kind, size) in enumerate(requests):
            at = (turn, kind)
            sums[at] = sums.get(at, 0) + size * layer.count * shares[layer.leaf]
        arithmetic_s += layer.count * cost.memory_s(passes)
    sizes = [_num_bytes([leaf]) * s for leaf, s in zip(leaves, shares, strict=True)]
    uncompressed = sum(size for n, size in enumerate(sizes) if n not in averager.of_leaf)
    sums[0, "mean"] = sums.get((0, "mean"), 0) + uncompressed

    def seconds(kind: Any, size: float) -> float:
        moved = round(sent_bytes(kind, size, averager.workers))
        return cost.collective_s(_HLO_KINDS[kind], moved, group)

    wire_s = sum(seconds(kind, size) for (_, kind), size in sums.items())
    return AveragePrice(seconds("mean", sum(sizes)), wire_s, arithmetic_s)


def _num_bytes(leaves: Sequence[Any]) -> int:
    """Return the bytes of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _share(leaf: Any) -> float:
    """Return the part of a leaf that a device has."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not leaf.size:
        return 1.0
    return math.prod(sharding.shard_shape(leaf.shape)) / leaf.size


def in_vain(averager: Averager, params: Any) -> str:
    """Return why a synchronisation does little or nothing to these parameters; empty if it does.

    Args:
        averager: at the default settings.
        params: arrays or shapes.
    """
    sync, workers = averager.sync, averager.workers
    if workers == 1 or isinstance(sync.compressor, NoCompression):
        return ""
    leaves = jax.tree.leaves(params)
    total = _num_bytes(leaves)
    if sync.raw:  # what goes raw by name is meant to
        named = {layer.leaf for layer in (*averager.layers, *averager.left_raw)}
        total = _num_bytes([leaves[n] for n in named])
    compressed = _num_bytes([leaves[n] for n in averager.of_leaf])
    if compressed < total / 2:
        return (
            f"{sync.compressor!r} compresses {len(averager.layers)} of "
            f"{len(averager.layers) + len(averager.left_raw)} matrices, {compressed / 1e3:.1f} of "
            f"{total / 1e3:.1f} kB of parameters, and the rest goes raw{_left_raw(averager)}. Take "
            "a setting of fewer bytes, or leave compression out"
        )
    if averager.fixed:
        return (
            f"{_name(averager)} has nothing to choose: the default setting is the largest "
            "candidate of all layers that are compressed, so none can take over another's error. "
            "Nothing is measured; take a smaller default, or uniform(...)"
        )
    return ""


def _left_raw(averager: Averager) -> str:
    """Return the layers that the default setting does not halve, with what it divides them by."""
    sync, workers = averager.sync, averager.workers
    named = [
        f"{layer.name} by {sync.factor(layer, workers):.3g}" for layer in averager.left_raw[:3]
    ]
    more = len(averager.left_raw) - len(named)
    if not named:
        return " (no other leaf is a matrix of 1024 elements or more)"
    others = f" and {more} more" if more else ""
    return (
        f": with {workers} workers the default setting divides the bytes of {', '.join(named)}"
        f"{others}, and a layer has to reach {MIN_FACTOR:g}"
    )


def _at(control: Control, settings: np.ndarray) -> np.ndarray:
    indices = enumerate(settings.tolist())
    return np.array([0.0 if s == RAW else control.errors[n, s] for n, s in indices], np.float64)


def _name(averager: Averager) -> str:
    sync = averager.sync
    name = repr(sync.compressor)
    if sync.accordion:
        name = f"accordion({name})"
    if sync.by_error:
        return f"lgreco({name}, every={sync.every})"
    return name if sync.accordion else f"uniform({name})"
