"""Race local updates on hosts with slow links: samples a second against the links' rate.

    python -m benchmarks.local_updates.race --out race.jsonl      # in the lab; as root

Four hosts, one worker each, of one compute device and, for an average that hides, a second device.
`alone` takes the steps of a round without any average: the throughput without a network.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Out, add_rows, read_rows
from benchmarks.lab.timing import slowest, turn

HOSTS, EVERY, WIDTH, LAYERS = 4, 12, 256, 8
BYTES = 4 * LAYERS * WIDTH * WIDTH
METHODS = ("alone", "synchronous", "LocalSGD", "DiLoCo", "CO2")
RATES = (1000.0, 200.0, 100.0, 60.0, 40.0, 25.0)  # Mbit/s


def host_main(host: Any, *, method: str, rounds: int, rows: int) -> dict[str, Any]:
    """Time rounds of a method on one host; the programs live on between calls."""
    _start(host)
    return turn(host, runner(method, rows), rounds, barrier=_together)


@functools.cache
def _start(host: Any) -> None:
    """Start JAX, once a process."""
    host.start_jax(devices=2)


@functools.cache
def _mesh() -> Mesh:
    """Return a mesh of the first device of each process."""
    first = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    devices = np.array([first[process] for process in sorted(first)], dtype=object)
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def _together() -> None:
    """Wait for all hosts."""
    one = jnp.ones(())
    sharding = NamedSharding(_mesh(), P())
    total = jax.jit(lambda x: x + 1, out_shardings=sharding)(jax.device_put(one, sharding))
    jax.block_until_ready(total)


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    h = x
    for w in params:
        h = h + jnp.tanh(h @ w)
    return jnp.mean((h - jnp.sin(x)) ** 2)


OPTIMIZER = optax.sgd(1e-2)


@jax.jit
def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(state["params"], x)
    updates, inner = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return dict(params=optax.apply_updates(state["params"], updates), optimizer=inner), value


@functools.cache
def runner(method: str, rows: int, width: int = WIDTH, layers: int = LAYERS) -> Any:
    """Return run(rounds), which returns when they are done.

    Args:
        method: one of METHODS.
        rows: of a worker's batch.
        width, layers: of the model.
    """
    from jaxoverlap.train import LocalUpdates, co2, diloco, local_sgd

    mesh = _mesh()
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype("f") / width for _ in range(layers)]
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    start = dict(params=jax.device_put(params, replicated), optimizer=OPTIMIZER.init(params))
    own = rng.normal(size=(EVERY, rows, width)).astype("f")
    batches = jax.make_array_from_process_local_data(split, own)
    if method == "synchronous":

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(replicated, replicated))
        def several(state: Any, batches: Any) -> Any:
            return jax.lax.scan(train_step, state, batches)

        held = [start]

        def run(rounds: int) -> None:
            for _ in range(rounds):
                held[0], _ = several(held[0], batches)
            jax.block_until_ready(held[0])

        return run
    outer = dict(
        alone=co2(every=EVERY), LocalSGD=local_sgd(every=EVERY), DiLoCo=diloco(every=EVERY)
    )
    updates = LocalUpdates(
        train_step, mesh, outer=outer.get(method, co2(every=EVERY)), overlap=False
    )
    state = [updates.init(start)]
    if method == "alone":
        steps = jax.jit(functools.partial(updates._rounds(state[0]).steps, count=EVERY))
        worker = [state[0].worker]

        def run_alone(rounds: int) -> None:
            for _ in range(rounds):
                worker[0], _ = steps(worker[0], batches)
            jax.block_until_ready(worker[0])

        return run_alone

    def run_rounds(rounds: int) -> None:
        for _ in range(rounds):
            state[0], _ = updates.round(state[0], batches)
        jax.block_until_ready(state[0].worker)

    return run_rounds


def main(
    out: Out,
    rounds: int = 6,
    repeats: int = 3,
    rows: Annotated[int, typer.Option(help="Of a worker's batch: how long a step takes.")] = 768,
    rates: Annotated[list[float] | None, typer.Option("--rate", help="In Mbit/s.")] = None,
) -> None:
    from benchmarks.lab.lab import Lab
    from benchmarks.lab.network import Network

    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    with (
        Lab(Network(hosts=HOSTS, rate_mbit=1000.0), environment=environment) as lab,
        lab.processes() as processes,
    ):
        for rate in rates or RATES:
            lab.shape(rate)
            for repeat in range(repeats):
                for method in METHODS:  # interleaved, so that what else runs hurts all alike
                    taken = processes.call(
                        "benchmarks.local_updates.race:host_main",
                        method=method,
                        rounds=1 if method == "synchronous" else rounds,  # it has many all-reduces
                        rows=rows,
                    )
                    row = dict(rate_mbit=rate, method=method, repeat=repeat)
                    add_rows(out, row | slowest(taken))
    table(out)


def table(path: Path) -> None:
    """Print medians: samples a second against those of steps alone, at each rate."""
    rows = read_rows(path)
    sheet = Table("Mbit/s", *METHODS, "all-reduce / steps", title="share of `alone`")
    for rate in sorted({r["rate_mbit"] for r in rows}):
        at = [r for r in rows if r["rate_mbit"] == rate]
        taken = {m: [r["seconds"] for r in at if r["method"] == m] for m in METHODS}
        seconds = {m: float(np.median(times)) for m, times in taken.items()}
        ring_s = 2 * (HOSTS - 1) / HOSTS * BYTES * 8 / (rate * 1e6)
        shares = (f"{seconds['alone'] / seconds[m]:.3f}" for m in METHODS)
        sheet.add_row(f"{rate:g}", *shares, f"{ring_s / seconds['alone']:.2f}")
    Console().print(sheet)
    expected = 2 * (HOSTS - 1) / HOSTS * BYTES
    for method in METHODS[1:]:
        sent = np.median([r["sent_bytes"] for r in rows if r["method"] == method])
        times = EVERY if method == "synchronous" else 1
        print(f"{method}: {sent / (expected * times):.3f} of the closed form's bytes")


if __name__ == "__main__":
    typer.run(main)
