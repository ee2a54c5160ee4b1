"""PyTorch's side of the race: DDP on CPUs with gloo, plain and with powerSGD_hook.

The lab runs this file under a Python of its own, with PyTorch: it imports the standard library,
numpy and torch alone.
"""

# Torch is in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import Any

from benchmarks.lab.hosts import Host
from benchmarks.lab.timing import interleaved

_HERE: dict[str, Any] = {}


def set_up(host: Host, *, width: int, layers: int, rows: int, rank_of: int) -> dict[str, float]:
    """Join the others, set up the layers with each method of averaging, and take some steps."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.set_num_threads(1)
    address, _, _ = host.coordinator.partition(":")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="7712", GLOO_SOCKET_IFNAME="rail0")
    dist.init_process_group("gloo", rank=host.rank, world_size=host.count)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rng = np.random.default_rng(0)
            self.layers = nn.ModuleList()
            for i in range(layers):
                layer = nn.Linear(width, width, bias=False)
                own = rng.normal(size=(width, width)) * (0.3 + 0.2 * i) / width**0.5
                layer.weight.data = torch.tensor(own.T.copy(), dtype=torch.float32)
                self.layers.append(layer)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    own = np.random.default_rng(host.rank).normal(size=(rows, width))
    x = torch.tensor(own, dtype=torch.float32)

    def trains(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            (model(x) - torch.sin(x)).square().mean().backward()
            optimizer.step()

        return step

    plain = nn.parallel.DistributedDataParallel(Stack())
    # The hook waits for sums inside gloo's own threads, of which there are two: with two buckets
    # both wait, and no thread is left to add. One bucket takes all layers.
    bucket_mb = layers * width**2 * 4 / 2**20 + 1
    hooked = nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=bucket_mb)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank_of,
        start_powerSGD_iter=2,
        min_compression_rate=2,
    )
    hooked.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _HERE.update({"none": trains(plain), "PowerSGD": trains(hooked), "alone": trains(Stack())})
    for _ in range(4):
        for step in _HERE.values():
            step()
    share = 2 * (host.count - 1) / host.count * 4 * layers
    return {"none": share * width**2, "PowerSGD": share * rank_of * 2 * width}


def torch_host(host: Host, *, runs: int, start: dict[str, int] | None = None) -> Any:
    """Set up the layers that `start` describes, or race what is set up."""
    return set_up(host, **start) if start else race(host, runs=runs)


def race(host: Host, *, runs: int) -> Any:
    """Race what `set_up` made, at the rate of now."""
    import torch.distributed as dist

    return interleaved(_HERE, runs=runs, barrier=dist.barrier, sent_bytes=host.sent_bytes)
