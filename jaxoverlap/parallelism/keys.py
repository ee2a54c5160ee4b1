"""Reduce a configuration to the fields that its kernels depend on: keys of caches."""

from __future__ import annotations

import functools

from jaxoverlap.parallelism.configuration import Configuration


def kernels_of(config: Configuration) -> Configuration:
    """Return a configuration with only those fields that its kernels depend on."""
    return _key(
        min(config.pipeline, 2), config.model, config.expert, config.context, config.micro_batch,
        config.recompute, config.sequence_parallel, config.experts_on_model,
    )  # fmt: skip


def unrecomputed(config: Configuration) -> Configuration:
    """Return what its passes depend on: all that its kernels do, but for recompute."""
    return _key(
        1, config.model, config.expert, config.context, config.micro_batch, "none",
        config.sequence_parallel, config.experts_on_model,
    )  # fmt: skip


def with_recompute(key: Configuration, recompute: str) -> Configuration:
    """Return what `kernels_of` gives, with another choice of recompute."""
    return _key(
        key.pipeline, key.model, key.expert, key.context, key.micro_batch, recompute,
        key.sequence_parallel, key.experts_on_model,
    )  # fmt: skip


@functools.cache  # a search asks for the same few again and again
def _key(
    pipeline: int, model: int, expert: int, context: int, micro_batch: int, recompute: str,
    sequence_parallel: bool, experts_on_model: bool,
) -> Configuration:  # fmt: skip
    return Configuration(
        pipeline=pipeline, model=model, expert=expert, context=context, micro_batch=micro_batch,
        recompute=recompute, sequence_parallel=sequence_parallel,
        experts_on_model=experts_on_model,
    )  # fmt: skip
