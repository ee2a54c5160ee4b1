"""The gemma package's transformer, trained by kauldron's TrainStep, as its examples do.

The step is a bound method of a jitted function, with the trainer as a static argument. kauldron
has one mesh axis, "devices", and, besides replication, one rule: FSDP over a weight's largest dim.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.strangers.stranger import Case, Stranger, adamw, fill, tokens


def build(case: Case, mesh: Mesh, real: bool) -> Stranger:
    from gemma import gm
    from kauldron import kd

    vars(kd.sharding)["DEVICES_MESH"] = mesh  # theirs is cached, over jax.devices()
    config = _config(gm.nn.Gemma3_4B.config, case.options, real)
    fsdp = kd.sharding.FSDPSharding(min_size_to_shard_mb=4 if real else 0)
    strategy = kd.sharding.ShardingStrategy(params=fsdp)
    trainer = kd.train.TrainStep(
        model=gm.nn.Transformer(
            config=config, tokens="batch.input", dtype=jax.numpy.bfloat16 if real else np.float32
        ),
        optimizer=adamw(),
        rng_streams=kd.train.RngStreams(seed=0),
        sharding=strategy,
        init_transform=kd.ckpts.NoopTransform(),
        aux=kd.train.Auxiliaries(
            losses={
                "xentropy": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                    logits="preds.logits", labels="batch.target"
                )
            },
            metrics={},
            summaries={},
        ),
    )
    shape = (mesh.size, case.options.get("length", 2048)) if real else (8, 16)
    ids = tokens(shape, config.num_embed, NamedSharding(mesh, P("devices")), real)
    labels = tokens((*shape, 1), config.num_embed, NamedSharding(mesh, P("devices")), real)
    batch = {"input": ids, "target": labels}
    spec = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
    abstract = jax.eval_shape(lambda: trainer.init(spec))
    state = fill(abstract, _state_shardings(abstract, strategy, mesh), real)
    return Stranger(
        step=functools.partial(trainer.step, return_losses=True),
        args=(state, batch),
        after=lambda out: (out[1].loss_states["xentropy"].compute(), out[0]),
        carried=lambda out: (out[0], batch),
    )


def _config(config: Any, options: dict[str, Any], real: bool) -> Any:
    """Their configuration with few layers, on the CPU narrow."""
    first = 6 - options.get("layers", 2)  # the sixth sees all tokens, those before it a window
    changes: dict[str, Any] = {
        "attention_types": config.attention_types[first:6],
        "vision_encoder": None,
        **options.get("changes", {}),
    }
    if not real:
        changes |= {"num_embed": 256, "embed_dim": 64, "hidden_dim": 128, "head_dim": 16}
        changes |= {"num_heads": 8, "num_kv_heads": 4, "sliding_window_size": 8}
    return dataclasses.replace(config, **changes)


def _state_shardings(state: Any, strategy: Any, mesh: Mesh) -> Any:
    """Shard parameters by the strategy's rule, and the optimizer's state like them, as jit does."""
    replicated = NamedSharding(mesh, P())
    rule = strategy.params(state.params)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(rule), strict=True)
    by_shape = {x.shape: sharding for x, sharding in pairs}
    return jax.tree.map(lambda x: by_shape.get(x.shape, replicated), state)
