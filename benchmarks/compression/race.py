"""Race compressed gradients on hosts with slow links, against PyTorch's DDP with powerSGD_hook.

    python -m benchmarks.compression.race --out race.jsonl                       # as root
    python -m benchmarks.compression.race --out race.jsonl --rate 100 --runs 3   # a part of it
    python -m benchmarks.compression.race --table race.jsonl

Four hosts of one CPU device, a stack of residual layers of one matrix each, SGD. All methods train
at once in one process a host, a step in turn. `alone` is the step without any average. PyTorch runs
in an environment of its own under out/lab/torch, which is made where it is missing (about 1 GB; pip
installs torch there; without python3.11 it is left out, and that is printed).
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import MaybeOut, Shown, add_rows, read_rows, shown_or_out
from benchmarks.lab.timing import interleaved, timed

HOSTS, WIDTH, LAYERS, ROWS, RANK = 4, 512, 8, 256, 4
SHAPE = dict(width=WIDTH, layers=LAYERS, rows=ROWS)
RATES = (1000.0, 300.0, 100.0, 30.0, 10.0)  # Mbit/s
WARM, EVERY = 42, 400  # L-GreCo's settings of step 40 are in use from 42 on
RAW_BYTES = 4 * LAYERS * WIDTH * WIDTH


def syncs() -> dict[str, Any]:
    from jaxoverlap.train import compression as c

    found: dict[str, Any] = {"none": c.uniform(c.none())}
    for name, compressor in dict(
        PowerSGD=c.power_sgd(RANK), QSGD=c.qsgd(4), TopK=c.top_k(0.01)
    ).items():
        found[name] = c.uniform(compressor)
        found[f"L-GreCo, {name}"] = c.lgreco(compressor, every=40, accumulate=5, beside=2)
    return found


def jax_host(host: Any, *, runs: int, start: bool = False) -> dict[str, Any]:
    """Set up, or time a step of each method in turn; programs and states live on between calls."""
    contenders, states, sync = set_up(host)
    if start:
        for _ in range(WARM + 1):  # the last one takes L-GreCo's settings into use
            for step in contenders.values():
                step()
        return {name: method.sent_bytes(states[name], also=4) for name, method in sync.items()}
    return interleaved(contenders, runs=runs, barrier=_together, sent_bytes=host.sent_bytes)


@functools.cache
def set_up(
    host: Any, width: int = WIDTH, rows: int = ROWS, names: tuple[str, ...] | None = None
) -> Any:
    """Return a step of each method, which keeps its state, the states and the methods, by name.

    Args:
        host: the lab's.
        width, rows: of a layer, and of a host's batch.
        names: of the methods; None: all.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxoverlap.train import compression

    host.start_jax()
    mesh = host.mesh(data=host.count)
    rng = np.random.default_rng(0)
    # Layers differ in how fast their gradients' spectra fall, as a model's do.
    params = [
        (rng.normal(size=(width, width)) * (0.3 + 0.2 * i) / width**0.5).astype("f")
        for i in range(LAYERS)
    ]
    x = np.random.default_rng(host.rank).normal(size=(rows, width)).astype("f")
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), x)

    def loss(params: Any, x: Any) -> Any:
        h = x
        for w in params:
            h = h + jnp.tanh(h @ w)
        return jnp.mean((h - jnp.sin(x)) ** 2)

    states, contenders, methods = {}, {}, {}
    for name, sync in syncs().items():
        if names and name not in names:
            continue
        method = compression.data_parallel(
            jax.value_and_grad(loss), optax.sgd(1e-3), mesh, sync=sync
        )
        replicated = jax.device_put(params, NamedSharding(mesh, P()))
        states[name], methods[name] = method.init(replicated), method

        def step(name: str = name, method: Any = method) -> None:
            state = states[name]
            if int(np.asarray(state.control.count)) >= WARM:  # the settings stay from here on
                control = jax.tree.map(np.asarray, state.control)
                control = dataclasses.replace(control, count=np.asarray(WARM, np.int32))
                state = dataclasses.replace(state, control=control)
            states[name], _ = method(state, batch)
            jax.block_until_ready(states[name].params)

        contenders[name] = step
    alone = jax.jit(lambda p, x: jax.tree.map(lambda a, g: a - 1e-3 * g, p, jax.grad(loss)(p, x)))
    own = [jnp.asarray(p) for p in params]
    contenders["alone"] = lambda: jax.block_until_ready(alone(own, x))
    return contenders, states, methods


def _together() -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("turn")


def main(
    out: MaybeOut = None,
    rate: Annotated[list[float] | None, typer.Option(help="Of links, in Mbit/s.")] = None,
    runs: int = 7,
    torch: Annotated[Path, typer.Option(help="PyTorch's environment.")] = Path("out/lab/torch"),
    peer: Annotated[bool, typer.Option(help="Race PyTorch too.")] = True,
    only: Annotated[str | None, typer.Option(help="JAX or PyTorch alone.")] = None,
    shown: Shown = None,
) -> None:
    out = shown_or_out(shown, out, show)
    from benchmarks.lab.lab import Lab
    from benchmarks.lab.network import Network
    from benchmarks.lab.peer import torch_python

    python, missing = torch_python(torch) if peer else ("", "not asked for")
    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}
    with Lab(Network(hosts=HOSTS, rate_mbit=None), environment=environment) as lab:
        # PyTorch's Python lacks what this module imports.
        sides = [("JAX", "benchmarks.compression.race:jax_host", {})]
        if python:
            torch_host = "benchmarks.compression.torch_peer:torch_host"
            sides.append(("PyTorch", torch_host, dict(python=python)))
        for framework, function, options in (s for s in sides if only in (None, s[0])):
            with lab.processes(**options) as hosts:
                lab.shape(1000.0)
                start = None if framework == "JAX" else dict(SHAPE, rank_of=RANK)
                forms = hosts.call(function, runs=0, start=start or True)[0]
                for mbit in rate or RATES:
                    lab.shape(mbit)
                    taken = timed(hosts.call(function, runs=runs))
                    for method, one in taken.items():
                        row = dict(rate_mbit=mbit, framework=framework, method=method)
                        row |= dict(step_s=one.median_s, seconds=list(one.seconds))
                        row |= dict(sent_bytes=one.sent_bytes, form_bytes=forms.get(method))
                        add_rows(out, row)
    if not python:
        print(f"PyTorch was not raced: {missing}")
    show(out)


def show(path: Path) -> None:
    """Print seconds of a step by rate, as times of none's, and bytes against the closed form."""
    rows = read_rows(path)
    rates = sorted({r["rate_mbit"] for r in rows}, reverse=True)
    found = {(r["framework"], r["method"], r["rate_mbit"]): r for r in rows}  # the last one counts
    sheet = Table("", *(f"{rate:g} Mbit/s" for rate in rates), "bytes", "of form")
    for framework, method in dict.fromkeys((r["framework"], r["method"]) for r in rows):
        cells = []
        for rate in rates:
            row = found.get((framework, method, rate))
            base = found.get((framework, "none", rate))
            times = f"{base['step_s'] / row['step_s']:.2f} x" if row and base else ""
            cells.append(f"{row['step_s'] * 1e3:.0f} ms {times}" if row else "")
        last = next(
            r for r in reversed(rows) if (r["framework"], r["method"]) == (framework, method)
        )
        form = last["form_bytes"]
        share = f"{last['sent_bytes'] / form:.3f}" if form else ""
        sheet.add_row(f"{framework}: {method}", *cells, f"{last['sent_bytes'] / 1e3:.0f} kB", share)
    Console(width=130).print(sheet)


if __name__ == "__main__":
    typer.run(main)
