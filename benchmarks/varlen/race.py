"""Race routing and planning on hosts of two rails each, in the lab (root).

    python -m benchmarks.varlen.race run                 # all races, medians of 7 runs
    python -m benchmarks.varlen.race run --rate 100 --runs 3
    python -m benchmarks.varlen.race run --hosts 3 --only round --megabytes 64

Each host has two JAX processes of one CPU device, and each process sends over a rail of its own:
gloo sends from the address that its host's name has, so each process has a name of its own. What
stays in a host goes over its loopback, which no rate bounds: that is the host's NVLink.

`round`: a hop of a ring of all devices; between the hosts over one rail, and over both. With two
hosts a rail's two processes send to each other; with three, each sends to one and receives from
another.
`permute`: half of these bytes between two processes of one rail: one way, and both ways; and both
ways between two pairs of processes.
`step`: a train step of the GPT on one long document and many short ones; planned, and with every
document split over all devices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.frame import MaybeOut, add_rows

RAILS = 2
RACES = {"round": "one rail", "permute": "one way", "step": "even splitting"}  # and the slow one
PORT = 7811
# One long document and many short ones: bytes of each.
SKEWED = (900, *(40 + 7 * i for i in range(16)))
# A name of its own for a process, and the address of its rail under that name.
_NAMED = (
    'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
)

app = frame.app()


@app.command()
def run(
    rate: Annotated[float, typer.Option(help="Mbit/s of each rail.")] = 200.0,
    runs: int = 7,
    megabytes: Annotated[float, typer.Option(help="Of a hop.")] = 4.0,
    within_s: float = 900.0,
    hosts: int = 2,
    only: Annotated[list[str] | None, typer.Option(help="round, permute or step; or all.")] = None,
    out: MaybeOut = None,
) -> None:
    """Run both races, and print medians."""
    from benchmarks.lab import Lab, Network
    from benchmarks.lab.timing import timed

    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
    with Lab(Network(hosts=hosts, rails=RAILS, rate_mbit=rate), environment=environment) as lab:
        started = []
        for host in range(hosts):
            for rail in range(RAILS):
                number = host * RAILS + rail
                address, name = lab.wires.address(host, rail), f"host{host}rail{rail}"
                names = lab.folder / f"hosts{number}"
                names.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
                here = [sys.executable, "-m", "benchmarks.varlen.race", "process"]
                coordinator = f"{lab.wires.address(0, 0)}:{PORT}"
                arguments = [
                    number,
                    coordinator,
                    lab.folder,
                    hosts,
                    runs,
                    megabytes,
                    *(only or RACES),
                ]
                command = ["sh", "-c", _NAMED, "sh", name, str(names), *here, *map(str, arguments)]
                started.append(lab.spawn(host, command, log=f"process{number}.log"))
        for number, process in enumerate(started):
            if process.wait(within_s):
                log = (lab.folder / f"process{number}.log").read_text()[-3000:]
                raise SystemExit(f"process {number} failed:\n{log}")
        found = [json.loads((lab.folder / f"rows{n}").read_text()) for n in range(len(started))]
    table = Table("race", "way", "ms, median", "spread", "MB sent by a host", "times as fast")
    for race in only or RACES:
        slow = RACES[race]
        contenders = timed([rows[race] for rows in found])
        for way, row in contenders.items():
            gain = contenders[slow].median_s / row.median_s
            cells = f"{row.median_s * 1e3:.1f}", f"{row.spread:.2f}", f"{row.sent_bytes / 1e6:.2f}"
            table.add_row(race, way, *cells, f"{gain:.2f}")
            line = dict(race=race, way=way, hosts=hosts, rate_mbit=rate, megabytes=megabytes)
            add_rows(out, line | dict(seconds=row.seconds, gain=gain, sent_bytes=row.sent_bytes))
    Console(width=96).print(table)


@app.command()
def process(
    number: int,
    coordinator: str,
    folder: Path,
    hosts: int,
    runs: int,
    megabytes: float,
    races: list[str],
) -> None:
    """Be one process of a host."""
    import jax

    from benchmarks.lab.hosts import Host

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, hosts * RAILS, number)
    host = Host.here()
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    grid = np.array(devices, dtype=object).reshape(hosts, RAILS)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(grid, ("data", "context"), axis_types=kinds)
    num_bytes = round(megabytes * 1e6)
    race: dict[str, Callable[[], Any]] = {
        "round": lambda: _round(mesh, host, runs, num_bytes),
        "permute": lambda: _permute(mesh, host, runs, num_bytes // RAILS),
        "step": lambda: _step(mesh, host, runs),
    }
    rows = {name: race[name]() for name in races}
    (folder / f"rows{number}").write_text(json.dumps(rows))


def _barrier(mesh: Any) -> Any:
    """Return what waits for all processes: a sum of an argument, as XLA folds one of a constant."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    axes, sharding = tuple(mesh.axis_names), NamedSharding(mesh, P(tuple(mesh.axis_names)))
    one = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(1, np.float32))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P(),
            check_vma=False,
        )
    )  # fmt: skip
    return lambda: jax.block_until_ready(add(one))


def _round(mesh: Any, host: Any, runs: int, num_bytes: int) -> Any:
    """Time a hop of the ring of all devices over one rail, and over both."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks.lab.timing import interleaved
    from jaxoverlap.train.varlen import Nodes
    from jaxoverlap.train.varlen.device.routing import Route, send

    axes, nodes = tuple(mesh.axis_names), Nodes(*mesh.shape.values())
    tokens = num_bytes // 4 // 256
    numbers = np.arange(nodes.total, dtype=np.float32)[:, None, None]
    full, sharding = (
        np.broadcast_to(numbers, (nodes.total, tokens, 256)),
        NamedSharding(mesh, P(axes)),
    )
    x = jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])

    def contender(proxies: int) -> Any:
        route = Route(nodes, axes, nodes.total, proxies)
        hop = jax.jit(
            jax.shard_map(
                lambda x: send(route, (x,))[0], mesh=mesh, in_specs=P(axes), out_specs=P(axes),
                check_vma=False,
            )
        )  # fmt: skip
        arrived = hop(x).addressable_data(0)
        assert (np.asarray(arrived) == (jax.process_index() - 1) % nodes.total).all()
        return lambda: jax.block_until_ready(hop(x))

    contenders = {"one rail": contender(1), "both rails": contender(RAILS)}
    return interleaved(contenders, runs=runs, barrier=_barrier(mesh), sent_bytes=host.sent_bytes)


def _permute(mesh: Any, host: Any, runs: int, num_bytes: int) -> Any:
    """Time permutes between the first two hosts: on one connection, and on two."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks.lab.timing import interleaved

    axes, sharding = tuple(mesh.axis_names), NamedSharding(mesh, P(tuple(mesh.axis_names)))
    shape = mesh.size, num_bytes // 4
    x = jax.make_array_from_callback(shape, sharding, lambda index: np.ones((1, shape[1]), "f"))

    def contender(*pairs: tuple[int, int]) -> Any:
        permute = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.ppermute(x, axes, pairs), mesh=mesh, in_specs=P(axes),
                out_specs=P(axes), check_vma=False,
            )
        )  # fmt: skip
        return lambda: jax.block_until_ready(permute(x))

    contenders = {
        "one way": contender((0, RAILS)),
        "both ways, one connection": contender((0, RAILS), (RAILS, 0)),
        "both ways, two connections": contender((1, RAILS), (RAILS + 1, 0)),
    }
    return interleaved(contenders, runs=runs, barrier=_barrier(mesh), sent_bytes=host.sent_bytes)


def _step(mesh: Any, host: Any, runs: int) -> Any:
    """Time a train step on the skewed batch, planned and split evenly."""
    import jax

    from benchmarks.lab.timing import interleaved
    from jaxoverlap.train import varlen
    from jaxoverlap.train.varlen.costs import Hop
    from jaxoverlap.train.varlen.rings import bounds_of
    from models.long_context import RECIPE, Config
    from models.recipe import Recipe
    from models.varlen import Documents, make_step, tokens_of

    total = sum(SKEWED)
    config = Config(
        varlen=True, plain=True, data=mesh.shape["data"], context=RAILS, layers=2, hidden=128,
        heads=4, mlp=512, step_tokens=total, longest=max(SKEWED),
    )  # fmt: skip
    recipe = Recipe(Config, Documents, RECIPE.batches)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, n + 1).astype(np.uint8) for n in SKEWED]
    lengths = np.array(SKEWED)
    costs = varlen.AttentionCosts(  # of about these hosts: 200 Mbit/s, and a core a device
        blocks=(16, 4096), pair_s=(2e-8, 2e-8), launch_s=1e-4, token_bytes=1024.0,
        remap_bytes=2048.0, linear_s=2e-4, intra=Hop(1e-3, 1e9), network=Hop(2e-3, 25e6),
        rails=RAILS, backward_bytes=2.0,
    )  # fmt: skip
    capacity = round(1.5 * total / mesh.size)
    nodes = varlen.Nodes(*mesh.shape.values())
    planner = varlen.Planner(costs, nodes, capacity=capacity)
    width = 2 * int((-(-lengths // (2 * nodes.total))).sum())
    split = bounds_of({nodes.total: width}, width, 0)
    even = varlen.Planner(costs, nodes, capacity=max(capacity, width), programs=[split])
    plans = {"even splitting": even(lengths), "planned": planner(lengths)}
    losses = {}

    def contender(name: str) -> Any:
        step, _ = make_step(recipe, config, mesh)
        state = [recipe.init_state(config, mesh, 0)]

        def take() -> None:
            state[0], metrics = step(state[0], plans[name], tokens_of(texts))
            losses.setdefault(name, float(metrics["loss"]))
            jax.block_until_ready(state[0])

        take()
        return take

    contenders = {name: contender(name) for name in plans}
    one, other = losses.values()
    assert abs(one - other) < 1e-4 * abs(one), losses
    return interleaved(contenders, runs=runs, barrier=_barrier(mesh), sent_bytes=host.sent_bytes)


if __name__ == "__main__":
    app()
