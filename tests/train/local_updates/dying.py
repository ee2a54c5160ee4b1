"""Train by local updates as one of several processes, of which one dies in mid-round.

python -m tests.train.local_updates.dying RANK PROCESSES PORT FOLDER ROUNDS DIES_AT

Prints the losses of each round as a line of JSON; saves after each round.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax

WITHIN_S = 10  # a process that is not heard of for so long is taken to be dead


def main() -> None:
    rank, processes, port, rounds, dies_at = (int(sys.argv[i]) for i in (1, 2, 3, 5, 6))
    folder = Path(sys.argv[4])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, rank, heartbeat_timeout_seconds=WITHIN_S
    )
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxoverlap
    from jaxoverlap.train import LocalUpdates, co2
    from tests.train.local_updates.problem import ROWS, make_data, make_state, make_step

    first = {d.process_index: d for d in reversed(sorted(jax.devices(), key=lambda d: d.id))}
    devices = np.array([first[i] for i in range(processes)], dtype=object)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    updates = LocalUpdates(make_step(), mesh, outer=co2(every=2), overlap=False)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    data = make_data(2 * rounds, processes)
    like = jax.tree.map(np.asarray, make_state())
    start = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, whole, lambda i: x[i]), like
    )
    with ocp.CheckpointManager(folder) as manager, jaxoverlap.lost_named(WITHIN_S):
        state, taken = updates.init(start), manager.latest_step() or 0
        if taken:
            shapes = updates.abstract(start)
            state = manager.restore(taken, args=ocp.args.StandardRestore(shapes))
        for number in range(taken, rounds):
            mine = [d[2 * number : 2 * number + 2, rank * ROWS : (rank + 1) * ROWS] for d in data]
            batches = [jax.make_array_from_process_local_data(split, d) for d in mine]
            if number == dies_at and rank == processes - 1:
                os._exit(9)
            state, metrics = updates.round(state, tuple(batches))
            losses = [s.data.tolist() for s in metrics["loss"].addressable_shards]
            print(json.dumps({"round": number, "loss": losses}), flush=True)
            jax.block_until_ready(state)  # see models/checkpoint.py
            manager.save(number + 1, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()


if __name__ == "__main__":
    main()
