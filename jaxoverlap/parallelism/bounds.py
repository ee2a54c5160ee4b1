"""Bound a step's seconds from below, and compare choices of recompute, for the search."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from jaxoverlap.cost.groups import Group
from jaxoverlap.parallelism import traffic
from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.keys import kernels_of, with_recompute
from jaxoverlap.parallelism.placement import Densest
from jaxoverlap.parallelism.recompute import VALUES

# Share of tensor collectives that stays exposed, as choices of recompute are compared.
_EXPOSED = 0.25


class LowerBounds:
    """Lower bounds of the seconds of a step on any placement; tensor parallelism is innermost.

    Args:
        times: the estimates that they bound.
    """

    def __init__(self, times: IterationTime):
        self.times, self.model, self.stack = times, times.model, times.stack
        self._domain = times.cost.cluster.gpus_per_nvlink_domain
        self._least_fsdp_cached = functools.cache(self._least_fsdp_uncached)
        self.layer_s = functools.cache(self._layer_uncached)

    def step_s(self, config: Configuration, layer_s: float | None = None) -> float:
        """Return a lower bound of a step's seconds.

        Kernels and their bubble, what tensor, expert and context parallelism add in the densest
        placement, and what hidden FSDP costs at least.

        Args:
            layer_s: `LowerBounds.layer_s`; None: the configuration's.
        """
        kernels = self.times.kernels
        if layer_s is None:
            layer_s = self.layer_s(kernels_of(config), config.overlap)
        layer_s += self._least_fsdp_s(config) + sum(kernels.casts_s(config))
        layer_s = max(layer_s, kernels.launched_s)
        middle, last = self.times.stage_layers(config)
        slowest_s = max(layer_s * middle, layer_s * last + kernels.head(config).step_s)
        bubble_s = (config.pipeline - 1) * layer_s * middle / config.interleave
        return slowest_s * config.micro_batches(self.times.global_batch) + bubble_s

    def _layer_uncached(self, key: Configuration, overlap: bool) -> float:
        """Return a layer's seconds without FSDP and casts in its densest placement.

        Args:
            key: what `kernels_of` gives.
            overlap: whether `jaxoverlap.overlap` hides collectives.
        """
        layer_s = self.times.kernels.uncast_s(key)
        if key.model == key.expert == key.context == 1:
            return layer_s
        inner = Densest(AXES, tuple(key.axes.values()), self._domain)
        sends = self.times.sends.of_layer(replace(key, overlap=overlap), inner)
        return layer_s + sends.model + sends.expert + sends.context

    def _least_fsdp_s(self, config: Configuration) -> float:
        """Return what hidden collectives of FSDP cost a layer on the fewest domains they fit."""
        if config.fsdp == 1 or (config.pipeline > 1 and self.stack.keeps_gathered):
            return 0.0
        return self._least_fsdp_cached(config.fsdp, config.model, config.expert)

    def _least_fsdp_uncached(self, fsdp: int, model: int, expert: int) -> float:
        config = Configuration(fsdp=fsdp, model=model, expert=expert)
        group = Group(fsdp, min(-(-fsdp * model // self._domain), fsdp))
        sends = traffic.of_weights(self.model, config)
        sent_s = sum(s.count * self.times.sends.in_group_s(s, group) for s in sends)
        return min(self.stack.unhidden + self.stack.hidden_cost, 1.0) * sent_s

    # -- choices of recompute ---------------------------------------------------------------------

    def cost_of_choices(
        self, key: Configuration, choices: Iterable[str]
    ) -> Iterator[tuple[float, float, str]]:
        """Yield what each choice of recompute costs a layer: seconds, saved bytes; and the choice.

        Seconds are those of kernels, and of what goes along the tensor axis and to experts, in the
        densest placement, of which the same part stays exposed with all choices.

        Args:
            key: what `kernels_of` gives.
            choices: as `Configuration` takes them.
        """
        sent_s = self._sent_again_s(key)
        for recompute in choices:
            config = with_recompute(key, recompute)
            again = zip(traffic.again(config, self.stack), sent_s, strict=True)
            seconds = self.times.kernels.uncast_s(config) + sum(s for sends, s in again if sends)
            yield seconds, self.times.kernels.kept_bytes(config), recompute

    def _sent_again_s(self, key: Configuration) -> list[float]:
        """Return the seconds of the collectives that go with each part of `traffic.again`."""
        if key.model == key.expert == 1:
            return [0.0] * 5
        inner = Densest(AXES, tuple(key.axes.values()), self._domain)

        def sent_s(recompute: str) -> float:
            config = with_recompute(key, recompute)
            sends = traffic.of_layer(self.model, config, self.stack)
            exposed = {"model": _EXPOSED, "expert": self.stack.expert_exposed}
            return sum(
                exposed.get(s.term, 0.0) * s.count * self.times.sends.sent_s(s, inner)
                for s in sends
            )

        none_s = sent_s("none")
        apart = (("qkv",), ("up",), ("norms", "out"), ("dispatch",))
        parts = [
            sent_s("saves " + "+".join(v for v in VALUES if v not in of)) - none_s for of in apart
        ]
        return [*parts, sent_s("full") - none_s - sum(parts)]
