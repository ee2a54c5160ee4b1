"""The first race's side on each host: set up once, then calibrated and timed at every rate."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxoverlap
from benchmarks.lab.hosts import Host
from benchmarks.lab.races.blocks import AXIS, Blocks, Size
from benchmarks.lab.races.gpt import gpt_step
from benchmarks.lab.races.predict import predicted_s
from benchmarks.lab.timing import Rows, interleaved
from jaxoverlap.calibrate import calibrate, this_machine
from jaxoverlap.calibrate.this_machine import Grid
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.tables import ChipTables

GRID = Grid(
    dtypes=("f32",),
    m=(8, 512, 2048),
    nk=(64, 1024),
    elements=(1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 21),
    whole_groups=True,
    rounds=5,
)
SMALL_GRID = replace(GRID, m=(8, 64), nk=(64, 128), elements=(64, 256, 1024), rounds=2)
# The flags of XLA:CPU that bear on what runs concurrently: the order that gives its threads most to
# do at once, at the price of memory.
FLAGS = {"xla_cpu_enable_concurrency_optimized_scheduler": True}
PRICES = "prices.json"

Contender = Callable[[], object]


@dataclass
class _State:
    """The state of this host between calls."""

    barrier: Contender | None = None
    tables: ChipTables | None = None
    cases: dict[str, Case] = field(default_factory=dict)


@dataclass
class Case:
    """A step to race, with one sharding.

    Attributes:
        step: the jitted step.
        args: its arguments.
        mesh: its mesh.
        contenders: those that do not depend on prices.
        closed_form_bytes: what a host has to send at least; 0 where that was not worked out.
    """

    step: Any
    args: tuple[Any, ...]
    mesh: Any
    contenders: dict[str, Contender]
    closed_form_bytes: float = 0.0


_HERE = _State()


def start(host: Host) -> None:
    """Start JAX, and make the barrier."""
    host.start_jax()
    mesh = host.mesh(**{AXIS: host.count})
    replicated = jax.sharding.NamedSharding(mesh, P())
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    add, one = jax.jit(mapped), jax.device_put(jnp.ones(1), replicated)
    _HERE.barrier = lambda: jax.block_until_ready(add(one))


def measure_prices(host: Host, *, smoke: bool = False) -> str:
    """Measure this cluster's prices: all the first time, then its links alone; process 0 writes."""
    grid = SMALL_GRID if smoke else GRID

    def silent(_: str) -> None:
        return

    today = datetime.date.today().isoformat()
    if _HERE.tables is None:
        _HERE.tables = this_machine.tables_here(today, silent, grid=grid)
    else:
        _HERE.tables = this_machine.with_links_here(_HERE.tables, silent, grid)
    path = Path(host.folder) / PRICES
    if host.rank == 0:
        calibrate.write(_HERE.tables, path)
    assert _HERE.barrier
    _HERE.barrier()
    return str(path)


def add_blocks(host: Host, *, way: str, size: dict[str, int]) -> float:
    """Set a stack of MLP blocks up; return the largest relative error of what is by hand."""
    blocks = Blocks(host.mesh(**{AXIS: host.count}), way, Size(**size))
    args, step = blocks.arguments(), blocks.step()
    alone, own = blocks.compute()
    communication = blocks.communication()
    flagged = step.lower(*args).compile(compiler_options=dict(FLAGS))
    contenders: dict[str, Contender] = {
        "compute alone": lambda: jax.block_until_ready(alone(*own)),
        "communication alone": lambda: jax.block_until_ready(communication(*args)),
        "plain": lambda: jax.block_until_ready(step(*args)),
        "plain, flags": lambda: jax.block_until_ready(flagged(*args)),
    }
    error = 0.0
    if way == "tensor":
        hand = blocks.by_hand()
        contenders["by hand"] = lambda: jax.block_until_ready(hand(*args))
        error = _error(hand(*args), step(*args))
    case = Case(step, args, blocks.mesh, contenders, blocks.closed_form_bytes())
    _HERE.cases[way] = case
    return error


def add_gpt(host: Host, *, name: str, axes: dict[str, int], sizes: dict[str, int]) -> None:
    """Set the GPT's train step up, on a mesh of data x model."""
    mesh, step, args = gpt_step(axes, sizes)
    flagged = step.lower(*args).compile(compiler_options=dict(FLAGS))
    _HERE.cases[name] = Case(
        step,
        args,
        mesh,
        {
            "plain": lambda: jax.block_until_ready(step(*args)),
            "plain, flags": lambda: jax.block_until_ready(flagged(*args)),
        },
    )


def race(host: Host, *, case: str, runs: int) -> dict[str, Any]:
    """Race the contenders of one case at the rate of now, jaxoverlap's decided by the prices.

    Returns:
        "rows": as `interleaved`; "predicted_s" by contender; "closed_form_bytes"; "plan": what
        jaxoverlap did; "error": of its results, relative to plain's.
    """
    it, prices = _HERE.cases[case], Path(host.folder) / PRICES
    cost = cost_model(table=prices)
    overlapped: Any = jaxoverlap.overlap(it.step, prices=prices)
    error = _error(overlapped(*it.args), it.step(*it.args))
    contenders = it.contenders | {
        "jaxoverlap": lambda: jax.block_until_ready(overlapped(*it.args)),
    }
    assert _HERE.barrier
    rows: Rows = interleaved(
        contenders, runs=runs, barrier=_HERE.barrier, sent_bytes=host.sent_bytes
    )
    return {
        "rows": rows,
        "predicted_s": {
            "plain": predicted_s(it.step, it.args, it.mesh, cost, plain=True),
            "jaxoverlap": predicted_s(overlapped, it.args, it.mesh, cost),
        },
        "closed_form_bytes": it.closed_form_bytes,
        "plan": _told(overlapped.explain(*it.args)),
        "error": error,
    }


def _told(plan: jaxoverlap.Plan) -> str:
    """Say in a few words what a plan does."""
    variants = sorted({str(decision.variant) for decision in plan.decisions})
    parts = f"rows in {plan.split.parts} parts" if plan.split else ""
    rings = f"{len(plan.decisions)} matmuls {', '.join(variants)}" if variants else ""
    return "; ".join(filter(None, (parts, rings))) or "as it is"


def _error(ours: Any, plain: Any) -> float:
    """Return the largest difference on this host, relative to the largest value of an array."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        a, b = (jnp.asarray(x.addressable_data(0)).astype(float) for x in (one, other))
        worst = max(worst, float(jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-30)))
    return worst
