"""Define `transform`: a synchronisation as an optax transformation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optax

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import whole
from jaxoverlap.train.arguments import keys
from jaxoverlap.train.compression.averager import averager_of
from jaxoverlap.train.compression.compressors.compressor import Setting
from jaxoverlap.train.compression.explain import in_vain
from jaxoverlap.train.compression.sync import Sync


def transform(
    sync: Sync,
    params: Any,
    *,
    axis: str,
    workers: int,
    stacked: Sequence[str] = (),
    settings: Sequence[Setting] | None = None,
) -> optax.GradientTransformation:
    """Return a synchronisation as an optax transformation, to be chained before an optimizer.

    It runs in a `jax.shard_map` over the workers' axis (with check_vma=False); other axes may stay
    automatic. Its updates are the means over the workers; its state is a `SyncState`, of which
    `error` and `accumulated` differ between workers. Settings are fixed: `data_parallel` has the
    loop that changes them.

    Args:
        sync: `uniform(power_sgd(4))`, say.
        params: arrays or shapes.
        axis: the manual mesh axis of the workers.
        workers: its size.
        stacked: keys; leaves below one of them have a first dim of layers.
        settings: one for each layer that is compressed, in order; the default ones if None.
    """
    expect(isinstance(sync, Sync), "sync", sync, "one such as uniform(power_sgd(4))")
    workers, stacked = whole("workers", workers, 1), keys("stacked", stacked)
    averager = averager_of(sync, params, axis=axis, workers=workers, stacked=stacked)
    if text := in_vain(averager, params):
        warnings.warn(text, stacklevel=2)
    if settings is not None:
        if len(settings) != len(averager.layers):
            raise ValueError(
                f"{len(settings)} settings for {len(averager.layers)} compressed layers: expected "
                f"one for each of {', '.join(layer.name for layer in averager.layers)}"
            )
        for setting in settings:
            sync.compressor.with_setting(setting)  # raises if there is no such setting
        averager = replace(averager, settings=tuple(settings))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return averager.average(updates, state)[:2]

    init: Any = averager.init
    return optax.GradientTransformation(init, update)
