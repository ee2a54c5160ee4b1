"""Tell what a synchronisation sends, a row a layer."""

from __future__ import annotations

import io
import math
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.state import Control
from jaxoverlap.train.compression.sync import raw_bytes


def explained(averager: Averager, control: Control, params: Any) -> str:
    """Return a table of the layers, and what of them follows.

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
        sent, raw = averager.layer_bytes(number), raw_bytes(layer, workers) * layer.count
        shape = f"{layer.rows} x {layer.cols}" + (f" x {layer.stack}" if layer.stack else "")
        known = math.isfinite(errors[number])
        table.add_row(
            layer.name,
            shape,
            f"{averager.settings[number]:g}",
            f"{sent / 1e3:.1f}",
            f"1 / {raw / sent:.1f}",
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
    raw = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) * 2 * (workers - 1) / workers
    sent = averager.sent_bytes(params)
    rest = len(leaves) - len(averager.of_leaf)
    text = (
        f"A worker sends {sent / 1e3:.1f} kB a step, 1 / {raw / max(sent, 1):.1f} of "
        f"{raw / 1e3:.1f} kB; {rest} of {len(leaves)} leaves go raw, in one all-reduce."
    )
    if math.isfinite(error) and sync.by_error:
        text += f" Error {error:.4g} of a budget of {budget:.4g}."
    if int(control.guarded):
        text += " The guard 'never worse than uniform' kept the uniform settings."
    if not np.array_equal(control.pending, control.settings):
        text += " Other settings are chosen, and come into use soon."
    return text


def _at(control: Control, settings: np.ndarray) -> np.ndarray:
    return np.array([control.errors[n, s] for n, s in enumerate(settings.tolist())], np.float64)


def _name(averager: Averager) -> str:
    sync = averager.sync
    name = repr(sync.compressor)
    if sync.accordion:
        name = f"accordion({name})"
    if sync.by_error:
        return f"lgreco({name}, every={sync.every})"
    return name if sync.accordion else f"uniform({name})"
