"""Describe how a model is split over the devices of a cluster, and read it from a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import AtLeast0, AtLeast1, checked
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.recompute import canonical, in_words, saved_by
from jaxoverlap.parallelism.stack import Stack

# Major to minor: devices along the last axis are adjacent.
AXES: tuple[str, ...] = ("pipeline", "data", "fsdp", "expert", "context", "model")


@dataclass(frozen=True, kw_only=True)
@checked
class Configuration:
    """The axes of a mesh, and how a step runs on it.

    The batch is split over data, fsdp and expert, the sequence over context.

    Attributes:
        data: replicas of the weights (data parallel).
        fsdp: devices that share the weights, their gradients and the optimizer's state (ZeRO-3).
        model: tensor parallelism, with sequence parallelism if `sequence_parallel`.
        pipeline: stages.
        expert: expert parallelism; for other weights it counts as data.
        context: context parallelism; for weights it counts as data.
        micro_batch: sequences of one micro-batch on a device.
        zero_stage: 0; 1: optimizer's state split over data; 2: gradients too. (3 is `fsdp`.)
        recompute: what the backward pass computes again: "none"; "selective": attention; "full":
            each layer from its input; a published policy such as "minimal_flash"; or what it does
            not, as in "saves qkv+out" (`jaxoverlap.parallelism.recompute`).
        interleave: pieces of the model that each stage has, in turn (1: one).
        sequence_parallel: whether values that tensor parallelism replicates are sharded over the
            sequence.
        experts_on_model: whether the tensor axis, too, splits experts whole, as expert parallelism
            does, and not each by its columns (Megatron's expert-tensor-parallel size of 1).
        offload: layers whose kept activations wait in host memory for the backward pass; a search
            takes none.
        overlap: whether tensor and FSDP collectives run as rings and gathers ahead, as
            `jaxoverlap.overlap` makes them.
    """

    data: AtLeast1 = 1
    fsdp: AtLeast1 = 1
    model: AtLeast1 = 1
    pipeline: AtLeast1 = 1
    expert: AtLeast1 = 1
    context: AtLeast1 = 1
    micro_batch: AtLeast1 = 1
    zero_stage: int = 0
    recompute: str = "full"
    interleave: AtLeast1 = 1
    sequence_parallel: bool = False
    experts_on_model: bool = False
    offload: AtLeast0 = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        what = "0, 1 or 2; stage 3 is the axis fsdp"
        expect(self.zero_stage in (0, 1, 2), "zero_stage", self.zero_stage, what)
        object.__setattr__(self, "recompute", canonical(self.recompute))

    @property
    def saved(self) -> frozenset[str]:
        """Return the values of a layer that its backward pass finds (`recompute.VALUES`)."""
        return saved_by(self.recompute)

    @property
    def expert_ways(self) -> int:
        """Devices over which the experts of a layer are split, none by its columns."""
        return self.expert * (self.model if self.experts_on_model else 1)

    @property
    def axes(self) -> dict[str, int]:
        """Return the size of each axis, major to minor."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """Devices in all."""
        return math.prod(self.axes.values())

    @property
    def batch_ways(self) -> int:
        """Devices over which the batch is split."""
        return self.data * self.fsdp * self.expert

    @property
    def replicas(self) -> int:
        """Devices that compute gradients of the same weights outside experts, to be summed."""
        return self.batch_ways * self.context

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step; `global_batch` is its sequences."""
        return global_batch // (self.batch_ways * self.micro_batch)

    def chunk_layers(self, model: Transformer) -> tuple[int, ...]:
        """Return the layers of each pipeline chunk, in the order in which a batch meets them.

        Where layers do not divide, the last chunk, the first, the last but one and so on have one
        layer fewer: the ends have the embedding and the head besides (Llama 3, arXiv 2407.21783,
        section 3.3.2, for 126 layers over 16 stages).
        """
        return _chunk_layers(model.layers, self.pipeline * self.interleave)

    def stage_layers(self, model: Transformer, stage: int | None = None) -> int:
        """Layers of a stage; None: of the stage that has most."""
        return _stage_layers(model.layers, self.pipeline, self.interleave, stage)

    def shard_share(self, model: Transformer) -> float:
        """Return the fraction of a stage's parameters on a device of `fsdp`; shards are padded."""
        return -(-model.hidden // self.fsdp) / model.hidden

    def illegal(self, model: Transformer, global_batch: int, stack: Stack | None = None) -> str:
        """Say why a model cannot be split so; "" if it can.

        Args:
            stack: the training software, for what it cannot combine; None: only what none can.
        """
        rules = (
            *self._rules(model, global_batch),
            *(self._rules_of(stack, model) if stack else ()),
        )
        return next((reason for broken, reason in rules if broken), "")

    def _rules(self, model: Transformer, global_batch: int) -> Iterator[tuple[bool, str]]:
        """Yield what no software can do: whether it is the case, and in words."""
        per_step, chunks = self.batch_ways * self.micro_batch, self.pipeline * self.interleave
        yield bool(model.heads % self.model), f"{model.heads} heads over model={self.model}"
        yield bool(model.inner % self.model), f"an MLP of {model.inner} over model={self.model}"
        yield (
            bool(model.shared_mlp % self.model),
            f"a shared expert of {model.shared_mlp} over model={self.model}",
        )
        yield (
            bool(model.key_heads % self.model) and bool(self.model % model.key_heads),
            f"{model.key_heads} heads of keys over model={self.model}",
        )
        yield (
            min(self.chunk_layers(model)[1:-1], default=1) < 1 or model.layers < self.pipeline,
            f"{model.layers} layers over pipeline={self.pipeline}, interleave={self.interleave}: "
            "only the first and the last chunk may have none",
        )
        yield self.interleave > 1 and self.pipeline == 1, "interleave without a pipeline"
        yield (
            self.expert_ways > 1 and (not model.experts or bool(model.experts % self.expert_ways)),
            f"{model.experts} experts over expert={self.expert}"
            + (f" and model={self.model}" if self.experts_on_model else ""),
        )
        yield (
            self.experts_on_model and not self.splits_sequence,
            "experts_on_model without a sequence that the tensor axis splits",
        )
        rows = self.context * (self.model if self.splits_sequence else 1)
        yield (
            bool(model.sequence % rows),
            f"a sequence of {model.sequence} over context={self.context}"
            + (f" and model={self.model}" if self.splits_sequence else ""),
        )
        yield (
            not 0 <= self.offload <= model.layers or (self.offload > 0 and self.pipeline > 1),
            f"offload={self.offload} of {model.layers} layers, over pipeline={self.pipeline}: give "
            "0 with a pipeline, else at most all layers",
        )
        yield self.fsdp > model.hidden, f"hidden size {model.hidden} over fsdp={self.fsdp}"
        yield bool(global_batch % per_step), f"a batch of {global_batch} in parts of {per_step}"
        yield (
            chunks > self.pipeline and bool(self.micro_batches(global_batch) % self.pipeline),
            f"{self.micro_batches(global_batch)} micro-batches in rounds of "
            f"pipeline={self.pipeline}, which interleaving asks for",
        )

    def _rules_of(self, stack: Stack, model: Transformer) -> Iterator[tuple[bool, str]]:
        """Yield what a software stack cannot combine: whether it is the case, and in words."""
        dtype, ways = stack.matmul_dtype, self.fsdp
        ways *= self.replicas // self.fsdp if self.zero_stage else 1
        yield (
            stack.even_shards and bool(model.hidden % ways),
            f"hidden size {model.hidden} over {ways} shards: {stack.name} has even shards only",
        )
        sharded = self.fsdp > 1 or self.zero_stage == 2
        yield (
            sharded and self.pipeline > 1 and not stack.fsdp_in_pipelines,
            f"fsdp={self.fsdp}, ZeRO-{self.zero_stage} with pipeline={self.pipeline}: "
            f"{stack.name} shards weights and gradients without a pipeline only",
        )
        yield (
            sharded and dtype not in stack.fsdp_dtypes,
            f"fsdp={self.fsdp}, ZeRO-{self.zero_stage} with {dtype}: {stack.name} shards weights "
            f"and gradients with {', '.join(stack.fsdp_dtypes)} only",
        )

    @property
    def splits_sequence(self) -> bool:
        """Whether tensor parallelism splits the sequence between matmuls."""
        return self.sequence_parallel and self.model > 1

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes.items() if size > 1)
        return f"{axes or 'one device'}, {self.settings}"

    @property
    def settings(self) -> str:
        """Name the choices that are not axes, in words."""
        more = [f"micro-batch {self.micro_batch}"]
        more += [f"ZeRO-{self.zero_stage}"] if self.zero_stage else []
        more += [text] if (text := in_words(self.recompute)) else []
        more += [f"{self.offload} layers offloaded"] if self.offload else []
        more += ["experts over model too"] if self.experts_on_model else []
        more += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        return ", ".join(more)


@functools.cache  # a search asks for the same few again and again
def _chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    most = -(-layers // chunks)
    each = [most] * chunks
    for i in range(chunks * most - layers):
        each[i // 2 if i % 2 else chunks - 1 - i // 2] -= 1
    return tuple(each)


@functools.cache
def _stage_layers(layers: int, pipeline: int, interleave: int, stage: int | None) -> int:
    chunks = _chunk_layers(layers, pipeline * interleave)
    stages = range(pipeline) if stage is None else (stage,)
    return max(sum(chunks[s::pipeline]) for s in stages)


# -- as a file ------------------------------------------------------------------------------------

_PREDICTED = {"step_s", "terms", "memory", "error", "failed"}
_PREDICTED |= {"simulated_s", "simulated_bytes", "plain_s"}


@dataclass(frozen=True)
class Chosen:
    """A configuration as a file has it.

    Attributes:
        configuration: the split.
        order: its placement: the axes over the devices, major to minor.
        global_batch, cluster, model, dtype: what it was made for; None in a file that says nothing
            of it.
    """

    configuration: Configuration
    order: tuple[str, ...]
    global_batch: int | None = None
    cluster: str | None = None
    model: Transformer | None = None
    dtype: str | None = None


def read_chosen(path: str | Path) -> Chosen:
    """Read the first configuration of a file of `jaxoverlap configure --json`, or one of its.

    Raises:
        ValueError: if the file cannot be read or is another one; it says what was expected.
    """
    try:
        data = msgspec.json.decode(Path(path).read_bytes(), type=dict)
        first = data.get("configurations", [data])[0]
        order = first.get("order", AXES)
    except (OSError, LookupError, AttributeError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"{type(error).__name__}: {error}: expected a file of `jaxoverlap configure --json`"
        ) from error
    if sorted(order) != sorted(AXES):
        raise ValueError(f"order={order}: expected each of {', '.join(AXES)} once, slowest first")
    model = data.get("model") if "configurations" in data else None  # else it is an axis
    return Chosen(
        load_configuration(first),
        tuple(order),
        data.get("global_batch"),
        data.get("cluster"),
        Transformer.from_fields(model) if model else None,
        data.get("dtype"),
    )


def load_configuration(data: Mapping[str, Any]) -> Configuration:
    """Return a configuration from plain data, as `Configurations.to_builtins` has them.

    Raises:
        ValueError: for a field that is unknown, or of a value that no configuration has.
    """
    known = set(Configuration.__dataclass_fields__)
    if unknown := set(data) - known - _PREDICTED - {"order"}:
        raise ValueError(f"unknown fields {sorted(unknown)}: known are {', '.join(sorted(known))}")
    return Configuration(**{name: value for name, value in data.items() if name in known})


def plain(configuration: Configuration, order: tuple[str, ...]) -> dict[str, Any]:
    """Return a configuration as plain data: what `load_configuration` takes, and the placement."""
    return {**asdict(configuration), "order": list(order)}
