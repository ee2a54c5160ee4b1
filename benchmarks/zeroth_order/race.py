"""Race zeroth-order steps with first-order ones on hosts with slow links, over models' sizes.

    python -m benchmarks.zeroth_order.race --out race.jsonl      # in the lab; as root

Four hosts of one device: a pair, twice (2D), against data parallelism that all-reduces gradients.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Out, add_rows, read_rows
from benchmarks.lab.timing import slowest, turn
from jaxoverlap.train import zeroth_order as zo

HOSTS, LAYERS, ROWS = 4, 4, 32
WIDTHS = (64, 128, 192)
METHODS = ("zeroth-order", "first-order")
RATES = (1000.0, 1.0)  # Mbit/s


def host_main(host: Any, *, method: str, width: int, steps: int) -> dict[str, Any]:
    """Time steps of a method on one host; the programs live on between calls."""
    _start(host)
    return turn(host, _runner(method, width), steps)


@functools.cache
def _start(host: Any) -> None:
    """Start JAX, once a process."""
    host.start_jax()


def _mesh() -> Mesh:
    devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index), dtype=object)
    return Mesh(devices.reshape(2, 2), ("pair", "data"), axis_types=(AxisType.Auto,) * 2)


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    h = x
    for w in params:
        h = h + jnp.tanh(h @ w)
    return jnp.mean((h - jnp.sin(x)) ** 2)


@functools.cache
def _runner(method: str, width: int) -> Any:
    """Return run(steps), which returns when they are done."""
    mesh, rng = _mesh(), np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype("f") / width for _ in range(LAYERS)]
    zeroth = method == "zeroth-order"
    sharding = NamedSharding(mesh, P("data") if zeroth else P(("pair", "data")))
    rows = rng.normal(size=(ROWS, width)).astype("f")
    batch = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    if zeroth:
        made = zo.step(
            loss, zo.mezo(eps=1e-3, lr=1e-5), mesh, perturb="pair", data="data", check=False
        )
        step: Any = made
        held: list[Any] = [made.init(params)]
    else:
        replicated = NamedSharding(mesh, P())

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(replicated, replicated))
        def first_order(params: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients), value

        step, held = first_order, [jax.device_put(params, replicated)]

    def run(steps: int) -> None:
        for _ in range(steps):
            held[0], metrics = step(held[0], batch)
            jax.block_until_ready((held[0], metrics))

    return run


def main(
    out: Out,
    repeats: int = 3,
    rates: list[float] | None = None,
    widths: list[int] | None = None,
) -> None:
    from benchmarks.lab.lab import Lab
    from benchmarks.lab.network import Network

    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    with (
        Lab(Network(hosts=HOSTS, rate_mbit=1000.0), environment=environment) as lab,
        lab.processes() as processes,
    ):
        for rate in rates or RATES:
            for width in widths or WIDTHS:
                for method in METHODS:  # compiled where links are fast
                    lab.shape(1000.0)
                    call = functools.partial(
                        processes.call,
                        "benchmarks.zeroth_order.race:host_main",
                        method=method,
                        width=width,
                    )
                    call(steps=1)
                for repeat in range(repeats):
                    for method in METHODS:  # interleaved, so that what else runs hurts both alike
                        lab.shape(rate)
                        steps = 20 if method == "zeroth-order" or rate > 100 else 1
                        taken = processes.call(
                            "benchmarks.zeroth_order.race:host_main",
                            method=method,
                            width=width,
                            steps=steps,
                        )
                        row = dict(rate_mbit=rate, width=width, method=method, repeat=repeat)
                        row |= dict(parameter_bytes=4 * LAYERS * width**2)
                        add_rows(out, row | slowest(taken))
    table(out)


def table(path: Path) -> None:
    """Print medians: seconds and bytes a host sends, a step."""
    rows = read_rows(path)
    sheet = Table("Mbit/s", "parameters", *(f"{m}: {w}" for m in METHODS for w in ("ms", "bytes")))
    for rate, width in sorted({(r["rate_mbit"], r["width"]) for r in rows}):
        cells = []
        for method in METHODS:
            at = [
                r
                for r in rows
                if (r["rate_mbit"], r["width"], r["method"]) == (rate, width, method)
            ]
            cells.append(f"{1e3 * np.median([r['seconds'] for r in at]):.1f}")
            cells.append(f"{np.median([r['sent_bytes'] for r in at]):,.0f}")
        sheet.add_row(f"{rate:g}", f"{4 * LAYERS * width**2:,} B", *cells)
    Console().print(sheet)


if __name__ == "__main__":
    typer.run(main)
