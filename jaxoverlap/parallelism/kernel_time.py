"""Estimate the seconds of kernels: of a layer, the head, casts, additions, the optimizer."""

from __future__ import annotations

import functools

from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism import work
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.keys import kernels_of, unrecomputed
from jaxoverlap.parallelism.memory import LayerValues, StageParams, zero_ways
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.recompute import VALUES
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.terms import StepTerms


class KernelTime:
    """Estimates and caches the seconds of kernels on one device, one after the other.

    Args:
        model: the model that is trained.
        cost: gives the seconds of kernels.
        stack: the training software.
        global_batch: sequences of a step.
    """

    def __init__(self, model: Transformer, cost: CostModel, stack: Stack, *, global_batch: int):
        self.model, self.cost, self.stack = model, cost, stack
        self.global_batch = global_batch
        self._kernel_s = functools.cache(self._kernel_uncached)
        self._kernels = functools.cache(self._kernels_uncached)
        self._forward_cached = functools.cache(self._forward_uncached)
        self._backward_cached = functools.cache(self._backward_uncached)
        self._again_by_value_s = functools.cache(self._again_uncached)
        self._uncast_s = functools.cache(lambda key: self._kernels(key).step_s)
        self._head = functools.cache(self._head_uncached)
        self._passes = functools.cache(self._passes_uncached)
        self._values = functools.cache(self._values_uncached)
        self._casts_cached = functools.cache(self._casts_uncached)

    # -- a layer ----------------------------------------------------------------------------------

    def layer(self, config: Configuration) -> StepTerms:
        """Seconds of a layer's kernels for one micro-batch, with the casts of its weights."""
        forward_s, backward_s = self.casts_s(config)
        kernels = self._kernels(kernels_of(config))
        if not forward_s:
            return kernels
        # XLA casts again where it computes again, and a pipeline of one program always does.
        again = (
            config.recompute != "none" if self.stack.skips_unread else config.recompute == "full"
        )
        times = again + (self.stack.lockstep and config.pipeline > 1)
        return kernels + StepTerms(compute=forward_s + backward_s, recompute=times * forward_s)

    @functools.cached_property
    def launched_s(self) -> float:
        """Seconds that the host takes to launch a layer's kernels, where that is counted."""
        experts = sum(count for count, kind in self.model.kinds if kind.experts)
        casts = self.stack.narrow_launches if self.stack.matmul_dtype != "bf16" else 1.0
        return casts * self.stack.expert_launch_s * experts / self.model.layers

    def forward_s(self, config: Configuration) -> float:
        """Seconds of a layer's forward pass, the mean of its kinds."""
        return self._forward_cached(unrecomputed(config)) + self.casts_s(config)[0]

    def backward_s(self, config: Configuration) -> float:
        """Seconds of a layer's backward pass, with what it computes again."""
        layer = self.layer(config)
        return layer.compute + layer.recompute - self.forward_s(config)

    def casts_s(self, config: Configuration) -> tuple[float, float]:
        """Return the seconds of casting a layer's weights, and their gradients."""
        if self.stack.weight_bytes <= ELEMENT:
            return 0.0, 0.0
        return self._casts_cached(config.fsdp, config.model, config.expert)

    def uncast_s(self, key: Configuration) -> float:
        """Return the seconds of a layer's kernels, without casts of weights.

        Args:
            key: what `kernels_of` gives.
        """
        return self._uncast_s(key)

    def passes(self, config: Configuration) -> tuple[tuple[float, work.Pass], ...]:
        """Return the passes of each kind of layer, and its share of the layers."""
        return self._passes(unrecomputed(config))

    def kept_bytes(self, config: Configuration) -> float:
        """Return the bytes that a layer saves of a micro-batch."""
        values = self._values(unrecomputed(config))
        return values.kept(config.recompute, config.saved, self.stack)

    def _casts_uncached(self, fsdp: int, model: int, expert: int) -> tuple[float, float]:
        config = Configuration(fsdp=fsdp, model=model, expert=expert)
        casts = work.weight_casts(self.model, config, self.stack)
        return self._work_s(casts.forward), self._work_s(casts.backward)

    def _kernels_uncached(self, config: Configuration) -> StepTerms:
        """Seconds of a layer's kernels for one micro-batch, without casts of weights."""
        forward_s = self._forward_cached(unrecomputed(config))
        again_s = self._again_s(config)
        if self.stack.lockstep and config.pipeline > 1:
            again_s += forward_s
        stacked_s = 0.0
        if self.stack.saved > 1 and config.recompute != "full":
            # A scan copies residuals into stacked ones, and out of them: four more passes.
            stacked_s = self._work_s(work.Work(memory_bytes=4 * self.kept_bytes(config)))
        kernels_s = forward_s + self._backward_cached(unrecomputed(config))
        return StepTerms(compute=kernels_s + stacked_s, recompute=again_s)

    def _again_s(self, config: Configuration) -> float:
        """Return the seconds of the kernels that a layer's backward pass runs again."""
        if config.recompute == "none":
            return 0.0
        if config.recompute == "full" and not self.stack.skips_unread:
            return self._forward_cached(unrecomputed(config))
        by_value = self._again_by_value_s(unrecomputed(config))
        saved = config.saved | ({"out"} if "norms" in config.saved else set())
        if not self.stack.fuses(config.context):
            saved -= {"attention"}  # its scores, which the backward pass reads, are not kept
        return sum(by_value[name] for name in VALUES if name not in saved)

    def _again_uncached(self, config: Configuration) -> dict[str, float]:
        seconds = dict.fromkeys(VALUES, 0.0)
        for share, counted in self._passes(config):
            for name, again in counted.again.items():
                seconds[name] += share * self._work_s(again)
        return seconds

    def _passes_uncached(self, config: Configuration) -> tuple[tuple[float, work.Pass], ...]:
        model, stack = self.model, self.stack
        return tuple(
            (count / model.layers, work.layer(model, config, stack, kind))
            for count, kind in model.kinds
        )

    def _forward_uncached(self, config: Configuration) -> float:
        return sum(share * self._work_s(of.forward) for share, of in self._passes(config))

    def _backward_uncached(self, config: Configuration) -> float:
        return sum(share * self._work_s(of.backward) for share, of in self._passes(config))

    def _values_uncached(self, config: Configuration) -> LayerValues:
        return LayerValues.of(self.model, config, self.stack)

    # -- the rest of a step -----------------------------------------------------------------------

    def head(self, config: Configuration) -> StepTerms:
        """Seconds of the head's kernels for one micro-batch."""
        return self._head(unrecomputed(config))

    def added_s(self, config: Configuration) -> float:
        """Seconds of adding a micro-batch's gradients up, where the stack has kernels for that."""
        if not self.stack.lockstep or config.micro_batches(self.global_batch) == 1:
            return 0.0
        params = StageParams.largest(self.model, config, even=True)
        stored = (params.total - params.tables) * config.shard_share(self.model)
        return self._work_s(work.added_gradients(stored, in_pipeline=config.pipeline > 1))

    def optimizer_s(self, config: Configuration) -> float:
        """Seconds of the update."""
        params = StageParams.largest(self.model, config, even=self.stack.lockstep)
        elements = 0.0
        for part, shards in zip((params.dense, params.experts), zero_ways(config), strict=True):
            elements += part * config.shard_share(self.model) / (shards if config.zero_stage else 1)
        return self._work_s(work.optimizer(elements, self.stack))

    def offload_s(self, config: Configuration) -> float:
        """Seconds by which the copy of a layer's activations exceeds the layer, there and back."""
        if not config.offload:
            return 0.0
        copy_s = self.kept_bytes(config) / self.cost.cluster.chip.host_link.bandwidth_bytes_per_s
        layer, forward_s = self.layer(config), self.forward_s(config)
        return max(0.0, copy_s - forward_s) + max(0.0, copy_s - layer.step_s + forward_s)

    def _head_uncached(self, config: Configuration) -> StepTerms:
        counted = work.head(self.model, config)
        return StepTerms(compute=self._work_s(counted.forward) + self._work_s(counted.backward))

    # -- kernels ----------------------------------------------------------------------------------

    def matmul_s(self, matmul: MatmulKernel) -> float:
        """Seconds of one matmul of this stack."""
        return self.stack.compute_factor * self._kernel_s(matmul)

    def _work_s(self, counted: work.Work) -> float:
        """Return the seconds of kernels, one after the other."""
        matmuls_s = sum(map(self._kernel_s, counted.matmuls))
        attention_s = self.stack.attention_factor * sum(map(self._kernel_s, counted.attention))
        memory = self.cost.tables.memory
        moved = self.stack.memory_factor * counted.memory_bytes
        memory_s = counted.kernels * memory.launch_s + moved / memory.bytes_per_s
        return self.stack.compute_factor * (matmuls_s + attention_s + memory_s)

    def _kernel_uncached(self, kernel: MatmulKernel | AttentionKernel) -> float:
        """Return the seconds of a kernel.

        Attention on a chip that has no such table gets the rate of a square matmul of 4096, halved:
        FlashAttention-2 reaches 0.5 to 0.7 of that on A100s (Dao 2023, figure 4).
        """
        if isinstance(kernel, MatmulKernel):
            grouped = kernel.batch > 1 and self.model.experts
            factor = self.stack.expert_factor if grouped else 1.0
            return factor * self.cost.matmul_s(**vars(kernel))
        if self.cost.tables.attention is not None:
            return self.cost.attention_s(**vars(kernel))
        square = MatmulKernel(4096, 4096, 4096)
        return 2 * kernel.flops / square.flops * self._kernel_s(square)
