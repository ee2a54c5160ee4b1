"""Keep what was published of training on Frontier: configurations, and shares of the peak.

Dash et al., arXiv 2312.12705 (ISC'24), on AMD MI250X; launch scripts and a run's log are in
sajal-vt/Megatron-DeepSpeed-ORNL (branches FA2 and frontier-sd). That log's printed TFLOP/s are not
used: 149 would be 78% of the peak, above what the paper claims of its best. DeepSpeed's file said
four sequences a micro-batch where Megatron fed one, so that a quarter of the samples ran that the
printed rate divides by (an inference from the log's own settings).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.stack import Stack

_SCRIPTS = "sajal-vt/Megatron-DeepSpeed-ORNL, branch FA2"
_PAPER = "Dash et al., arXiv 2312.12705"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published run.

    Attributes:
        model: what was trained.
        configuration: how it was split.
        cluster: where, as `parse_cluster` takes it.
        global_batch: sequences of a step.
        share_of_peak: published operations per second over the chips' peak, counted by
            `megatron_flops` with recompute; None if its source gives none.
        source: where it was published.
    """

    model: Transformer
    configuration: Configuration
    cluster: str
    global_batch: int
    share_of_peak: float | None
    source: str


def megatron_flops(model: Transformer, samples: int, *, recompute: bool = True) -> float:
    """The operations that Megatron-DeepSpeed's printed rate counts (its megatron/utils.py).

    24 k B s L h^2 (1 + s / 6h + V / 16 L h), k = 4 with full recompute and 3 without.
    """
    h, s, layers = model.hidden, model.sequence, model.layers
    matmuls = 24 * (4 if recompute else 3) * samples * s * layers * h**2
    return matmuls * (1 + s / (6 * h) + model.vocab / (16 * layers * h))


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, sequence=2048, vocab=50688,
        learned_positions=2048, source=_SCRIPTS,
    )  # fmt: skip


# Fused attention, weights of 16 bits, ZeRO-1; sums of gradients in 16 bits.
FRONTIER_STACK = Stack(
    name="Megatron-DeepSpeed on Frontier",
    causal=False,
    dropout=True,
    gradient_bytes=2,
    reduced_bytes=2,
    gradient_passes=11,
    # Read off a run's log of 175B: 300.0 MiB a micro-batch, of which six layers' inputs are 288;
    # 530 MiB that no term explains; 33.4 to 37.8 GB reserved where 26.9 to 33.9 were allocated.
    micro_batch_bytes=12 * 2**20,
    buffer_bytes=530 * 2**20,
    reserve=1.2,
    source="logs/gpt175b_megatron_16N_newcomm-405287.o, branch frontier-sd",
)

FRONTIER = {
    "frontier-22b": Recipe(
        model=_gpt("22B", 48, 6144, 48),
        configuration=Configuration(pipeline=8, data=2, zero_stage=1),
        cluster="mi250x-gcd:2x8",
        global_batch=640,
        share_of_peak=0.3838,
        source=f"{_PAPER}, its rate; {_SCRIPTS}, 22b, the configuration behind it",
    ),
    "frontier-175b": Recipe(
        model=_gpt("175B", 96, 12288, 96),
        configuration=Configuration(model=4, pipeline=16, data=2, zero_stage=1),
        cluster="mi250x-gcd:16x8",
        global_batch=640,
        share_of_peak=0.3614,
        source=f"{_PAPER}; {_SCRIPTS}, 175b, with the log's sequence of 2048",
    ),
    "frontier-1t": Recipe(
        model=_gpt("1T", 128, 25600, 200),
        configuration=Configuration(model=8, pipeline=64, data=2, zero_stage=1),
        cluster="mi250x-gcd:128x8",
        global_batch=1600,
        share_of_peak=0.3196,
        source=f"{_PAPER}: its final configuration, remembered and not read; heads of the script",
    ),
    "frontier-1t-script": Recipe(
        model=_gpt("1T", 128, 25600, 200),
        configuration=Configuration(model=4, pipeline=128, data=2, zero_stage=1),
        cluster="mi250x-gcd:128x8",
        global_batch=1024,
        share_of_peak=None,
        source=f"{_SCRIPTS}, 1T: a launch script without a published rate",
    ),
}


@dataclass(frozen=True)
class Scaling:
    """A published scaling efficiency: rate for each device on `devices`, over that on `base`.

    Attributes:
        recipe: whose configuration, with more replicas.
        base, devices: numbers of devices.
        base_batch, batch: sequences of a step on each.
        published: the efficiency.
    """

    recipe: str
    base: int
    devices: int
    base_batch: int
    batch: int
    published: float


# The sizes of batches are remembered from the paper, not read: a reconstruction.
SCALING = {
    "175B weak": Scaling("frontier-175b", 128, 1024, 640, 5120, 1.0),
    "1T weak": Scaling("frontier-1t", 1024, 3072, 1024, 3072, 1.0),
    "175B strong": Scaling("frontier-175b", 128, 1024, 8000, 8000, 0.8993),
    "1T strong": Scaling("frontier-1t", 1024, 3072, 8016, 8016, 0.8705),
}
