"""Run one of several processes that train together, for test_agreement.py and test_hosts.py.

python -m tests.support.many_processes RANK PROCESSES PORT FOLDER SCENARIO...

Each scenario prints a line of JSON. Only in the last one may an exception end the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import DisagreementError, Plan
from jaxoverlap.api import overlapped
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.hardware import hosts, topology
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.passes.rewriting import rewrite

DEVICES, STEPS = 4, 3
HIDDEN, FF, ROWS = 16, 32, 16


def make_mesh() -> Mesh:
    """Return a mesh of four devices, in however many processes."""
    return jax.make_mesh(
        (2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:DEVICES]
    )


def shardings(mesh: Mesh) -> Any:
    """Return the shardings of the weights and of the batch."""
    rows, columns = (NamedSharding(mesh, P(*s)) for s in (("model",), (None, "model")))
    return {"up": columns, "down": rows}, rows


def make_step(mesh: Mesh, rate: float = 0.1) -> Any:
    """Return a step of gradient descent on a sequence-parallel MLP: gathers and scatters."""
    lies, rows = shardings(mesh)

    def loss(w, x):
        h = lax.with_sharding_constraint(x @ w["up"], lies["up"])
        y = lax.with_sharding_constraint(jnp.tanh(h) @ w["down"], rows)
        return jnp.mean((y - jnp.sin(x)) ** 2)

    def train_step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - rate * g, w, gradients), value

    return jax.jit(train_step, in_shardings=(lies, rows), out_shardings=(lies, None))


def abstract(mesh: Mesh) -> Any:
    shapes = {"up": (HIDDEN, FF), "down": (FF, HIDDEN)}, (ROWS, HIDDEN)
    return jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(s, jnp.float32, sharding=at),
        shapes,
        shardings(mesh),
        is_leaf=lambda s: isinstance(s, tuple) and isinstance(s[0], int),
    )


def train(step: Any) -> list[float]:
    """Return the losses of a few steps; they are the same numbers in every process."""
    rng = np.random.default_rng(0)

    def placed(s):
        whole = rng.standard_normal(s.shape).astype("f") / 4
        return jax.make_array_from_callback(s.shape, s.sharding, lambda index: whole[index])

    w, x = jax.tree.map(placed, abstract(make_mesh()))
    losses = []
    for _ in range(STEPS):
        w, value = step(w, x)
        losses.append(float(value))
    return losses


# -- scenarios ------------------------------------------------------------------------------------


def of_file(folder: Path, rank: int) -> Any:
    """Everyone reads one plan."""
    return train(jaxoverlap.overlap(make_step(make_mesh()), plan=folder / "plan.json"))


def of_tuned_file(folder: Path, rank: int) -> Any:
    """Everyone reads the plan that a tuning found."""
    return train(jaxoverlap.overlap(make_step(make_mesh()), plan=folder / "tuned.json"))


def of_process_0(folder: Path, rank: int) -> Any:
    """Process 0 reads a plan, and the others get it."""
    plan = jaxoverlap.agreed(lambda: Plan.read(folder / "plan.json" if rank == 0 else "nowhere"))
    return train(jaxoverlap.overlap(make_step(make_mesh()), plan=plan))


def explained_alone(folder: Path, rank: int) -> Any:
    """explain() waits for nobody, and the step is agreed on once, whoever comes to it how."""
    step = jaxoverlap.overlap(make_step(make_mesh()))
    arguments = abstract(make_mesh())
    if rank == 0:
        step.explain(*arguments)
        step.trace(*arguments)
    if rank == 1:
        step.lower(*arguments).compile()
    return train(step)


def fails_in_one(folder: Path, rank: int) -> Any:
    """The rewrite fails in one process: all run plain if all may."""
    ringed = rewrite.ringed
    if rank == 1:
        rewrite.ringed = lambda *_: 1 / 0
    try:
        return train(jaxoverlap.overlap(make_step(make_mesh()), on_error="plain"))
    finally:
        rewrite.ringed = ringed


def raises_in_one(folder: Path, rank: int) -> Any:
    """The rewrite fails in one process: none may run plain, so all raise."""
    ringed = rewrite.ringed
    if rank == 1:
        rewrite.ringed = lambda *_: 1 / 0
    try:
        return train(jaxoverlap.overlap(make_step(make_mesh())))
    finally:
        rewrite.ringed = ringed


def refused_in_one(folder: Path, rank: int) -> Any:
    """One process has a plan for another step."""
    return train(
        jaxoverlap.overlap(make_step(make_mesh(), rate=0.1 + rank), plan=folder / "plan.json")
    )


def absent(folder: Path, rank: int) -> Any:
    """One process comes late."""
    if rank == 1:
        time.sleep(3)
    return train(jaxoverlap.overlap(make_step(make_mesh()), agree_within_s=1.0))


def no_plan(folder: Path, rank: int) -> Any:
    """Process 0 fails to make a plan."""
    return jaxoverlap.agreed(lambda: Plan.read(folder / "nowhere.json")).step


def late_plan(folder: Path, rank: int) -> Any:
    """Process 0 takes too long; the others do not wait for ever."""

    def slow() -> Plan:
        time.sleep(3)
        return Plan.read(folder / "plan.json")

    return jaxoverlap.agreed(slow, within_s=0.5).step


def tuned(folder: Path, rank: int) -> Any:
    """Process 0 tunes (its search is stood in for), and the others wait for its plan."""
    calls = []

    def search(target: Any, tuning: Any, clock: Any, out: Any) -> Plan:
        calls.append(rank)
        return Plan.read(folder / "other.json")

    real, overlapped.tuned = overlapped.tuned, search
    try:
        step = jaxoverlap.overlap(make_step(make_mesh()), tune=True)
        losses = train(step)
        plan = step.explain(*abstract(make_mesh()))
        assert plan.rings == Plan.read(folder / "other.json").rings
    finally:
        overlapped.tuned = real
    return {"calls": calls, "losses": losses}


def timed(folder: Path, rank: int) -> Any:
    """Everyone asks for a tuning by the clock, of which there would then be several."""
    tuning = jaxoverlap.Tuning(measure=True)
    return train(jaxoverlap.overlap(make_step(make_mesh()), tune=tuning))


def two_plans(folder: Path, rank: int) -> Any:
    """Half of the processes have another plan."""
    name = "plan.json" if rank < jax.process_count() // 2 else "other.json"
    return train(jaxoverlap.overlap(make_step(make_mesh()), plan=folder / name))


# -- hosts ----------------------------------------------------------------------------------------


def on_hosts_as_they_are(folder: Path, rank: int) -> Any:
    """CPU devices pass for H100s, on the one host that all processes are on."""
    return on_hosts(hosts.this_host())


def on_hosts_of_two(folder: Path, rank: int) -> Any:
    """Processes 0 and 1 seem to be on one host, 2 and 3 on another; and they train."""
    row = on_hosts(f"host {rank // 2}")
    return row | {"losses": train(jaxoverlap.overlap(make_step(make_mesh())))}


def on_hosts_in_turn(folder: Path, rank: int) -> Any:
    """Processes seem to be dealt to two hosts in turn, as `srun -m cyclic` does."""
    return on_hosts(f"host {rank % 2}")


def on_hosts(mine: str) -> dict[str, Any]:
    """Return what is found of H100s if this process is on a host of this name."""
    hosts.this_host = lambda: mine
    hosts._known, hosts._WHERE = (None, {}), f"{hosts._WHERE} again"  # as if nobody had said yet
    topology.chips = lambda: (replace(parse_cluster("h100-sxm:1x8").chip, device_name="cpu"),)
    mesh = make_mesh()
    plan = jaxoverlap.overlap(make_step(mesh)).explain(*abstract(mesh))
    groups = groups_of(mesh, None)
    return {
        "cluster": str(topology.cluster_of(mesh)),
        "plan": plan.made_for and plan.made_for.cluster,
        "said": str(plan),
        "domains": {axis: group.domains for axis, group in groups.items()},
        "by_copy": {axis: group.by_copy for axis, group in groups.items()},
    }


def says_its_host_late(folder: Path, rank: int) -> Any:
    """One process names its host after the other has given up; both then learn the hosts."""
    if rank == 1:
        time.sleep(3)
        return len(set(hosts.hosts_of((0, 1)).values()))
    began = time.monotonic()
    try:
        hosts.hosts_of((0, 1), within_s=0.5)
    except DisagreementError as error:
        said, waited = str(error), time.monotonic() - began
    return {"said": said, "waited": waited, "hosts": len(set(hosts.hosts_of((0, 1)).values()))}


SCENARIOS: tuple[Callable[[Path, int], Any], ...] = (
    *(
        of_file,
        of_tuned_file,
        of_process_0,
        explained_alone,
        fails_in_one,
        raises_in_one,
        refused_in_one,
    ),
    *(tuned, timed, absent, no_plan, late_plan, two_plans),
    *(says_its_host_late, on_hosts_as_they_are, on_hosts_of_two, on_hosts_in_turn),
)


def main(rank: int, processes: int, port: str, folder: Path, names: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in names:
        began = time.monotonic()
        try:
            row = {"result": scenarios[name](folder, rank)}
        except (DisagreementError, ValueError, jaxoverlap.RewriteError, OSError) as error:
            row = {"error": f"{type(error).__name__}: {error}"}
            if name == names[-1]:
                raise
        finally:
            taken = time.monotonic() - began
        print(json.dumps({"scenario": name, **row, "seconds": taken}), flush=True)


if __name__ == "__main__":
    rank, processes, port, folder, *names = sys.argv[1:]
    main(int(rank), int(processes), port, Path(folder), names)
