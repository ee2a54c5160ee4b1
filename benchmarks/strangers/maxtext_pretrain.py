"""MaxText: its default decoder, jitted and sharded as its pre-training loop does it.

The step is a jax.jit of a functools.partial with in_shardings, over a mesh of a dozen axes, most of
them of one device, under jax.set_mesh; layers are scanned and remat is whole.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.strangers.maxtext_rules import by_rules
from benchmarks.strangers.stranger import Case, Stranger, fill, tokens

_SIZES = {  # of base.yml's own model: two layers of it on the pod, narrow on the CPU
    False: {
        "base_emb_dim": 64,
        "base_mlp_dim": 128,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 4,
        "head_dim": 16,
        "vocab_size": 256,
        "max_target_length": 16,
        "dtype": "float32",
    },
    True: {"max_target_length": 2048, "base_emb_dim": 4096, "base_mlp_dim": 14336},
}


def build(case: Case, mesh: Mesh, real: bool) -> Stranger:
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import sharding, train_utils

    base = Path(pyconfig.__file__).parent / "base.yml"
    config = pyconfig.initialize(["train", str(base)], **_options(case, mesh, real))
    sizes = [case.axes.get(axis, 1) for axis in config.mesh_axes]
    kinds = mesh.axis_types[:1] * len(sizes)
    mesh = Mesh(mesh.devices.reshape(sizes), config.mesh_axes, axis_types=kinds)
    with by_rules() if case.by_rules else contextlib.nullcontext():
        (abstract, batch), _, shardings, _, graph = train_compile.get_shaped_inputs(mesh, config)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    data = sharding.get_input_data_sharding(config, mesh)
    step = train_utils.jit_train_step(
        config, graph, abstract, shardings, data, train.train_step, params
    )
    state = fill(abstract, shardings, real)
    filled = {
        # Every token in one segment: a token alone in its own attends to nothing else, and then
        # queries and keys have no gradient.
        name: tokens(x.shape, 2 if "segment" in name else config.vocab_size, data, real)
        for name, x in batch.items()
    }

    @contextlib.contextmanager
    def context() -> Any:
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    return Stranger(
        step=step,
        args=(state, filled),
        after=lambda out: (out[1]["scalar"]["learning/loss"], out[0]),
        context=context,
        carried=lambda out: (out[0], filled),
    )


def _options(case: Case, mesh: Mesh, real: bool) -> dict[str, Any]:
    return {
        "run_name": "stranger",
        "hardware": "cpu",
        "attention": "dot_product",
        "base_num_decoder_layers": 2,
        "per_device_batch_size": mesh.size / jax.device_count(),  # they count the devices here
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "log_config": False,
        # Their schedule starts at zero, and three steps would change nothing.
        "learning_rate": 1e-3,
        "learning_rate_schedule_steps": 100,
        "warmup_steps_fraction": 0.0,
        **{f"ici_{axis}_parallelism": size for axis, size in case.axes.items()},
        **_SIZES[real],
        **case.options,
    }
