"""PyTorch's side of the first race: DDP and FSDP2 on CPUs with gloo, on the same hosts.

The lab runs this file under a Python of its own, with PyTorch and nothing else of this project: it
imports the standard library and torch alone.
"""

# Torch is in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import Any

from benchmarks.lab.hosts import Host
from benchmarks.lab.timing import interleaved

_HERE: dict[str, Any] = {}


def start(host: Host, *, threads: int) -> str:
    """Join the process group over gloo; return PyTorch's version."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    address, _, _ = host.coordinator.partition(":")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="7711", GLOO_SOCKET_IFNAME="rail0")
    dist.init_process_group("gloo", rank=host.rank, world_size=host.count)
    return torch.__version__


def add(host: Host, *, way: str, rows: int, hidden: int, inner: int, blocks: int) -> None:
    """Set the stack of MLP blocks up as DDP ("data") or FSDP2 ("fsdp") trains it.

    With it its own compute alone, and its own collectives alone, as few as JAX's.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        layers = []
        for _ in range(blocks):
            up, down = (nn.Linear(*s, bias=False) for s in ((hidden, inner), (inner, hidden)))
            layers.append(nn.Sequential(up, nn.ReLU(), down))
        return nn.Sequential(*layers)

    x = torch.randn(rows // host.count, hidden)
    alone, model = stack(), stack()
    if way == "data":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (host.count,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def trains(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        return step

    weights = [torch.randn(hidden * inner) for _ in range(2 * blocks)]
    parts = [torch.randn(hidden * inner // host.count) for _ in range(2 * blocks)]

    def communicate() -> None:
        for weight, part in zip(weights, parts, strict=True):
            if way == "data":
                dist.all_reduce(weight)
            else:
                dist.all_gather_into_tensor(weight, part)
                dist.reduce_scatter_tensor(part, weight)

    _HERE[way] = {
        "compute alone": trains(alone),
        "communication alone": communicate,
        "PyTorch": trains(model),
    }


def race(host: Host, *, case: str, runs: int) -> dict[str, Any]:
    """Race what `add` set up, at the rate of now."""
    import torch.distributed as dist

    rows = interleaved(_HERE[case], runs=runs, barrier=dist.barrier, sent_bytes=host.sent_bytes)
    return {"rows": rows}
