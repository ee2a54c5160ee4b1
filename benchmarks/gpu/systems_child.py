"""A process's part in timing the training systems."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.gpu.child import Process
from benchmarks.gpu.race_child import about
from benchmarks.lab.timing import interleaved

_COMPRESSED = ("none", "PowerSGD", "L-GreCo, PowerSGD")
_COMPILES = 2  # first runs of a zeroth-order step, whose state is placed otherwise after the first
_SEQUENCE = 2048  # of ZO2's table
_TILE = 1 << 20  # random numbers, which are repeated to fill a large array


def _on_cpu() -> bool:
    return jax.devices()[0].platform == "cpu"


def _take_turns(
    here: Process,
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    more: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Time contenders in turn, and send a row of each."""
    for name, run in contenders.items():
        here.send("doing", row=name, what="the first run")
        run()
    turns = itertools.cycle(contenders)

    def barrier() -> None:
        here.barrier()
        here.send("doing", row=next(turns), what="a turn")

    taken = interleaved(contenders, runs=rounds, barrier=barrier, sent_bytes=lambda: 0)
    for name, row in taken.items():
        here.send("row", row=name, seconds=row["seconds"], **(more or {}).get(name, {}))


def local_updates(here: Process, *, rounds: int) -> None:
    """Time rounds of local updates against the same steps without an average, and with all."""
    from benchmarks.local_updates.race import METHODS, runner

    here.send("device", **about())
    width, layers, rows = (64, 2, 16) if _on_cpu() else (2048, 8, 8192)
    contenders = {}
    for method in METHODS:
        here.send("doing", row=method, what="compiling")
        run = runner(method, rows, width, layers)
        contenders[method] = lambda run=run: run(1)
    _take_turns(here, contenders, rounds)


@dataclass(frozen=True)
class _Host:
    """A process as the lab's races see it: JAX runs already, and bytes are not counted."""

    rank: int
    count: int

    def start_jax(self) -> None:
        """Do nothing."""

    def mesh(self, **sizes: int) -> Mesh:
        """Return a mesh of the first device of each process."""
        first: dict[int, Any] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            first.setdefault(device.process_index, device)
        devices = np.array([first[process] for process in sorted(first)], dtype=object)
        kinds = (AxisType.Auto,) * len(sizes)
        return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def compressed(here: Process, *, rounds: int) -> None:
    """Time steps whose gradients are compressed, against plain ones and no average at all."""
    from benchmarks.compression.race import WARM, set_up

    here.send("device", **about())
    width, rows = (64, 16) if _on_cpu() else (4096, 4096)
    here.send("doing", row="all", what="compiling")
    host = _Host(here.rank, here.count)
    steps, states, methods = set_up(host, width, rows, _COMPRESSED)
    for name, step in steps.items():
        chooses = name.startswith("L-GreCo") and not _on_cpu()
        count = WARM + 1 if chooses else 1
        here.send("doing", row=name, what=f"first steps: {count}")
        for _ in range(count):
            step()
    sent = {n: dict(form_bytes=m.sent_bytes(states[n], also=4)) for n, m in methods.items()}
    _take_turns(here, steps, rounds, sent)


def zeroth_order(here: Process, *, model: str, host: bool, name: str, rounds: int) -> None:
    """Time MeZO's steps on OPT, its blocks on the device or streamed from pinned host memory."""
    from benchmarks.zeroth_order import opt
    from jaxoverlap.train import zeroth_order as zo

    here.send("device", **about())
    size, sequence = opt.SIZES[model], _SEQUENCE
    if _on_cpu():
        size, sequence = opt.Size(2, 64, 4, vocab=256), 32
    here.send("doing", row=name, what="making parameters")
    mesh = Mesh(np.array(jax.devices()[:1], object).reshape(1), ("data",))
    mezo = zo.mezo(eps=1e-3, lr=1e-7, rounding="nearest")  # as ZO2 rounds
    step = zo.step(opt.model(size), mezo, mesh, host=host, check=False)
    params = jax.tree.map(_weights, opt.shapes(size))
    state = step.init(params)
    del params
    tokens = np.random.default_rng(0).integers(0, size.vocab, (1, sequence + 1))
    batch = dict(tokens=jnp.asarray(tokens, jnp.int32))
    here.send("doing", row=name, what="compiling and running")
    seconds = []
    for number in range(rounds + _COMPILES):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        if number >= _COMPILES:
            seconds.append(time.perf_counter() - began)
    stats = jax.local_devices()[0].memory_stats() or {}
    used = stats.get("peak_bytes_in_use")
    here.send("row", row=name, seconds=seconds, tokens=sequence, used_bytes=used)


def _weights(like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return small random weights on the host: a tile of them, repeated."""
    count = int(np.prod(like.shape))
    tile = np.random.default_rng(0).standard_normal(min(count, _TILE), np.float32) * 0.02
    return np.resize(tile.astype(like.dtype), like.shape)


def varlen(here: Process, *, rounds: int) -> None:
    """Time attention, forward and backward: texts one after the other, and padded to the longest.

    cuDNN's kernels on a GPU; in a rehearsal XLA's, with a mask in place of lengths.
    """
    from jaxoverlap._jax import fused_attention

    here.send("device", **about())
    lengths, heads = ([16, 8, 8], 2) if _on_cpu() else ([8192, 2048, 1024, 1024, 512, 3584], 16)
    total, longest, rows = sum(lengths), max(lengths), len(lengths)
    starts = jnp.asarray([np.cumsum([0, *lengths])], jnp.int32)
    sizes = jnp.asarray([lengths], jnp.int32)
    owner = np.repeat(np.arange(rows), lengths)
    same = jnp.asarray(owner[:, None] == owner)[None, None]

    def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if _on_cpu():
            return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)
        return fused_attention.packed_causal(q, k, v, sizes, starts, scale=128**-0.5)

    def padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kernel = "xla" if _on_cpu() else "cudnn"
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    contenders = {}
    for name, attend, shape in (
        ("padded to the longest", padded, (rows, longest, heads, 128)),
        ("one after the other", packed, (1, total, heads, 128)),
    ):
        args = [jax.random.normal(key, shape, jnp.bfloat16) for key in _keys()]
        both = jax.jit(lambda q, k, v, g, f=attend: jax.vjp(f, q, k, v)[1](g))
        contenders[name] = lambda both=both, args=args: jax.block_until_ready(both(*args))
    tokens = dict(tokens=total)
    _take_turns(here, contenders, rounds, dict.fromkeys(contenders, tokens))


def _keys() -> jax.Array:
    return jax.random.split(jax.random.key(0), 4)
