"""Functions for hosts of a lab: the smallest there are, for docs/lab.md and the smoke test."""

import functools
import time
from typing import Any

from benchmarks.lab.hosts import Host


def all_reduce(host: Host, *, megabytes: float, runs: int = 3) -> dict[str, Any]:
    """Time an all-reduce of float32 over all hosts, and count the bytes that this one sends."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    host.start_jax()
    mesh, replicated = host.mesh(hosts=host.count), PartitionSpec()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
    )
    def add(x):
        return jax.lax.psum(x, "hosts")

    x = jax.device_put(jnp.ones(round(megabytes * 2**18)), NamedSharding(mesh, replicated))
    total = jax.block_until_ready(add(x))
    seconds, before = [], host.sent_bytes()
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(add(x))
        seconds.append(time.perf_counter() - began)
    sent = (host.sent_bytes() - before) / runs
    first = float(total.addressable_data(0)[0])
    return {"seconds": seconds, "sent_bytes": sent, "sum": first}
