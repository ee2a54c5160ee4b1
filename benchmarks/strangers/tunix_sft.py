"""google-tunix: its Gemma 3 or Qwen 3 in its PeftTrainer, full-weight supervised fine-tuning.

The trainer's step is a functools.partial of an nnx.jit object over the model and the optimizer,
which the step changes; the model's constraints need the legacy `with mesh:`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.strangers.stranger import Case, Stranger, adamw, fill, tokens


def build(case: Case, mesh: Mesh, real: bool) -> Stranger:
    from tunix.sft import peft_trainer

    config, make = _model(case.options, real)
    model = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    _fill(model, mesh, real)
    trainer = peft_trainer.PeftTrainer(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        adamw(),
        peft_trainer.TrainingConfig(eval_every_n_steps=10),
    ).with_gen_model_input_fn(_model_input)
    trainer.model = model
    trainer.optimizer = _optimizer(model, mesh, real)
    step, _ = trainer.jit_train_and_eval_step()  # partial(nnx.jit(...), model, optimizer)

    length = case.options.get("length", 2048) if real else 16
    batch = mesh.size if real else 8  # a row for each GPU
    sharded = NamedSharding(mesh, P("fsdp"))
    example = peft_trainer.TrainingInput(
        input_tokens=tokens((batch, length), config_vocab(config), sharded, real),
        input_mask=tokens((batch, length), 2, sharded, real),
    )
    return Stranger(
        step=step,
        args=(example,),
        after=lambda out: (out[0], (nnx.state(model), nnx.state(trainer.optimizer))),
        context=lambda: _context(mesh, case.options["constraints"]),
    )


def config_vocab(config: Any) -> int:
    return getattr(config, "num_embed", None) or config.vocab_size


def _model(options: dict[str, Any], real: bool) -> tuple[Any, Any]:
    """Their configuration with two layers; on the CPU narrow and in float32, so errors show."""
    if options["model"] == "gemma3":
        from tunix.models.gemma3 import model as gemma3

        config, make = gemma3.ModelConfig.gemma3_4b_pt(), gemma3.Gemma3
        narrow = {"num_embed": 256, "embed_dim": 64, "hidden_dim": 128, "head_dim": 16}
        heads = {"num_heads": 8, "num_kv_heads": 4, "sliding_window_size": 8}
        remat = gemma3.RematConfig.DECODER
    else:
        from tunix.models.qwen3 import model as qwen3

        config, make = qwen3.ModelConfig.qwen3_8b(), qwen3.Qwen3
        narrow = {"vocab_size": 256, "embed_dim": 64, "hidden_dim": 128, "head_dim": 16}
        heads = {"num_heads": 8, "num_kv_heads": 4}
        remat = qwen3.RematConfig.DECODER
    changes: dict[str, Any] = {"num_layers": 2, "remat_config": remat, **options.get("changes", {})}
    if not real:
        changes |= {**narrow, **heads, "param_dtype": np.float32}
    known = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if k in known}), make


def _fill(model: Any, mesh: Mesh, real: bool) -> None:
    state = nnx.state(model)
    nnx.update(model, fill(state, _shardings(state, mesh), real))


def _shardings(state: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(state))


def _optimizer(model: Any, mesh: Mesh, real: bool) -> Any:
    """Their optimizer, sharded as `PeftTrainer._shard_optimizer` does it; zeros where it runs."""
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, adamw(), wrt=nnx.Param), model)
    state = nnx.state(optimizer)
    nnx.update(optimizer, fill(state, _shardings(state, mesh), real))
    return optimizer


def _model_input(example: Any) -> dict[str, Any]:
    from tunix.sft import utils

    mask = example.input_tokens != 0
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def _context(mesh: Mesh, constraints: bool) -> Any:
    """The mesh as their loop has it; with the constraints that they leave out where JAX has no GPU.

    Their `shard` looks at jax.devices()[0]: on a CPU, or compiling for GPUs from one, a step
    would have none.
    """
    import contextlib

    from tunix.utils import sharding_utils

    stack = contextlib.ExitStack()
    stack.enter_context(mesh)
    if constraints:
        stack.enter_context(mock.patch.object(sharding_utils, "shard", _as_on_a_gpu(mesh)))
    return stack


def _as_on_a_gpu(mesh: Mesh) -> Any:
    def shard(x: Any, spec: tuple, eager: bool = False) -> Any:
        del eager
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    return shard
