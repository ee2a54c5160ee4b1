"""Lagom's patterns on its own A40s (arXiv 2602.20656), predicted: python -m benchmarks.lagom.

The search (`jaxoverlap/tuning/lagom/search.py`) looks for the settings itself, on the model of
`jaxoverlap/tuning/lagom/model.py`, from NCCL's default on. The paper names neither shapes nor
batch; taken here is a layer of Phi-2 (hidden 2560) under FSDP among the eight GPUs of a host, and
several batches, so that a range comes out and not the batch that fits best. One number of the model
was fitted, to another figure of the paper: the first table says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.kernels import KernelWork, MatmulKernel
from jaxoverlap.cost.model import Channels, CostModel
from jaxoverlap.hardware.cluster import Chip, Cluster, Link
from jaxoverlap.tuning.lagom.model import Communication, Computation, Makespan, SettingSpace
from jaxoverlap.tuning.lagom.search import Config, search

Row = tuple[str, ...]
_KB, _HIDDEN = 1 << 10, 2560
BATCHES = (4096, 8192, 16384)  # tokens of a device
DEFAULT = Channels(8, 2048 * _KB)  # NCCL's, by the paper
# The paper's chunks are thirds of NCCL's 2 MB; its channels go up to AutoCCL's 61.
SPACE = SettingSpace((1, 2, 4, 8, 16, 32, 61), (684 * _KB, 1366 * _KB, 2048 * _KB), (96, 256, 512))


def a40() -> CostModel:
    """Two hosts of eight A40s: an A100's tables, scaled by NVIDIA's data sheets.

    A40: 84 SMs, 149.7 TFLOP/s bf16, 696 GB/s, 6 MB of L2; A100 80 GB: 312 TFLOP/s, 2039 GB/s. The
    NVLink of 400 Gb/s, the two NICs of 400 Gb/s a host and the eight channels are the paper's.
    """
    a100 = cost_model("a100-sxm-80:1x8")
    chip: Chip = dataclasses.replace(
        a100.cluster.chip,
        name="a40",
        num_sms=84,
        memory_bandwidth_bytes_per_s=696e9,
        l2_bytes=6 << 20,
    )
    link, network = Link("NVLink bridge", 50e9, 12e-6), Link("InfiniBand", 2 * 50e9 / 8, 18e-6)
    faster, wider = 149.7 / 312, 696 / 2039
    matmuls = a100.tables.matmuls["bf16"]
    scaled = msgspec.structs.replace(
        matmuls,
        flops_per_s=matmuls.flops_per_s * faster,
        bytes_per_s=matmuls.bytes_per_s * wider,
    )
    tables = msgspec.structs.replace(
        a100.tables, chip="a40", matmuls={"bf16": scaled}, channels=DEFAULT.count
    )
    return CostModel(Cluster(chip, 2, 8, link, network), tables)


def first(tokens: int) -> Makespan:
    """Pattern 1: a layer's weights are gathered during the forward matmuls of an MLP."""
    wide = 4 * _HIDDEN
    return _problem(("all-gather",), ((tokens, wide, _HIDDEN), (tokens, _HIDDEN, wide)))


def second(tokens: int) -> Makespan:
    """Pattern 2: a gather and a reduce-scatter during the backward matmuls of an MLP."""
    wide = 4 * _HIDDEN
    inputs = ((tokens, wide, _HIDDEN), (tokens, _HIDDEN, wide))
    weights = ((_HIDDEN, wide, tokens), (wide, _HIDDEN, tokens))
    return _problem(("all-gather", "reduce-scatter"), (*inputs, *weights))


def _problem(kinds: tuple[str, ...], matmuls: tuple[tuple[int, int, int], ...]) -> Makespan:
    moved = 12 * _HIDDEN**2 * 2 * 7 // 8  # a layer's weights in bf16
    return Makespan(
        a40(),
        tuple(Communication(kind, moved, Group(8), space=SPACE) for kind in kinds),
        tuple(Computation(KernelWork((MatmulKernel(*dims),))) for dims in matmuls),
    )


def speedup(problem: Makespan, config: Config) -> float:
    """Return the speedup of a config over NCCL's default."""
    return problem.measure(problem.default).step_s / problem.measure(config).step_s


def slowdown(problem: Makespan, channels: Channels | None = None) -> float:
    """Return how many times longer all matmuls take during the first communication.

    Args:
        channels: the communication's channels; None for NCCL's default.
    """
    point = SPACE.near(channels) if channels else problem.default[0]
    count = range(len(problem.computations))
    return sum(problem.slowed_s(i, 0, point) for i in count) / sum(map(problem.alone_s, count))


# -- tables ---------------------------------------------------------------------------------------


def contention() -> str:
    """Compare predicted slowdowns with measured ones, of which only the first was fitted."""
    rows = [
        (
            "A40, NCCL's default, during a gather (fitted)",
            f"{slowdown(first(8192)) - 1:.1%}",
            "30 to 35% (Lagom)",
        )
    ]
    for name in ("a100-sxm-80:1x4", "h100-sxm:1x4"):
        slowdowns = [_full_slowdown(cost_model(name), hidden) - 1 for hidden in (2048, 4096, 5120)]
        what = f"{name}, gathers during all matmuls (not fitted)"
        seen = f"{min(slowdowns):.1%} to {max(slowdowns):.1%}"
        rows.append((what, seen, "18.9% in the mean, 40.0% at most (2507.03114)"))
    return table(
        "How much longer matmuls take during communication",
        ("where", "predicted", "measured"),
        rows,
    )


def _full_slowdown(cost: CostModel, hidden: int) -> float:
    """Return the slowdown of a layer's forward matmuls, 8192 tokens, by its weights' gather."""
    pairs = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    size = cost.cluster.num_devices
    moved = 12 * hidden**2 * 2 * (size - 1) // size
    problem = Makespan(
        cost,
        (Communication("all-gather", moved, Group(size)),),
        tuple(Computation(KernelWork((MatmulKernel(8192, n, k),))) for n, k in pairs),
    )
    return slowdown(problem)


def patterns() -> str:
    """Tabulate the two patterns: the paper's settings, estimated, and what the search finds.

    The first rows assume a gather that lasts as long as all of the compute: the most that the model
    can give.
    """
    return table(
        "Lagom's patterns, A40: speed over NCCL's default (NC=8, C=2 MB)",
        ("pattern", "tokens", "X / Y", "settings", "predicted", "published"),
        _pattern_rows(),
        right=("tokens", "X / Y", "predicted", "published"),
    )


def _pattern_rows() -> Iterator[Row]:
    small, scatter = Channels(2, 684 * _KB), Channels(4, 1366 * _KB)
    for channels, published in ((Channels(61, 2048 * _KB), "0.87"), (small, "1.35")):
        problem = first(8192)
        gain = f"{slowdown(problem) / slowdown(problem, channels):.2f}"
        yield ("1", "any", "full overlap", _short(channels), gain, published)
    for name, make, settings in (
        ("1", first, (((Channels(61, 2048 * _KB),), "0.87"), ((small,), "1.35"))),
        ("2", second, (((small, scatter), "1.43"),)),
    ):
        for tokens in BATCHES:
            problem = make(tokens)
            default = problem.measure(problem.default)
            exposed = f"{default.communication_s / default.computation_s:.2f}"
            for channels, published in settings:
                config = tuple(map(SPACE.near, channels))
                what = ", ".join(map(_short, channels))
                gain = f"{speedup(problem, config):.2f}"
                yield (name, str(tokens), exposed, what, gain, published)
            searched = search(problem)
            what = ", ".join(_short(SPACE.setting(point)[0]) for point in searched.config)
            gain = f"{speedup(problem, searched.config):.2f}"
            how = f"found in {searched.evaluations}: {what}"
            yield (name, str(tokens), exposed, how, gain, "")


def _short(channels: Channels) -> str:
    return f"NC={channels.count} C={channels.chunk_bytes // _KB} kB"


def main() -> None:
    """Print both tables."""
    print(contention())
    print(patterns())


if __name__ == "__main__":
    main()
