"""`--attention`: cuDNN's kernel where it runs or is wanted, XLA's matmuls elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import typer.testing
from flax import nnx

import jaxoverlap
from jaxoverlap._jax import fused_attention
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import devices as pod_devices
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.sharding import AXES as AXES_OF_SIX
from models import (
    attention,
    configured,
    configured_model,
    gpt,
    long_context,
    moe,
    train_gpt,
    train_long,
    vit,
)
from models.config import Mistake
from tests.support.attention import stand_in, stand_in_backward
from tests.support.pods import pytestmark as pods
from tests.support.seeds import some

SMALL: dict[str, Any] = dict(layers=1, hidden=64, heads=4, mlp=64)
MODELS = {"gpt": gpt, "moe": moe, "vit": vit, "long_context": long_context}
AXES = {
    "gpt": dict(data=2, model=2),
    "moe": dict(data=2, expert=2),
    "vit": dict(data=2, model=2),
    "long_context": dict(data=2, context=2),
}


def test_unknown_ones_are_refused():
    with pytest.raises(Mistake, match="attention='flash': expected one of auto, xla, cudnn"):
        gpt.Config(attention="flash")


def test_auto_is_matmuls_without_a_gpu():
    config = gpt.Config(**SMALL, dtype="bfloat16")
    assert not attention.uses_cudnn(config, gpt.make_mesh(config))


@pytest.mark.parametrize(
    ("command", "flags"), [(train_gpt, ""), (train_long, ""), (train_long, "--varlen")]
)
def test_cudnn_without_a_gpu_is_a_mistake(command: Any, flags: str):
    done = typer.testing.CliRunner().invoke(
        command.app,
        f"--attention cudnn --dtype bfloat16 {flags}".split(),
        env={"COLUMNS": "300", "TERM": "dumb"},
    )
    assert done.exit_code == 2, done.output
    assert "expected NVIDIA GPUs, and the mesh is of cpu" in done.output
    assert "Traceback" not in done.output


def loss_and_gradients(name: str, config: Any) -> Any:
    recipe = MODELS[name].RECIPE
    mesh = recipe.make_mesh(config)
    state = recipe.init_state(config, mesh, seed=0)
    batch = jax.device_put(recipe.batches(config)(0), recipe.batch_shardings(config, mesh))
    return jax.tree.map(np.asarray, recipe.make_grads(config, mesh)(state["params"], batch))


@pytest.mark.rotating
@pytest.mark.parametrize("name", some(1, ["gpt", "vit", "long_context"]))
def test_numbers_are_those_of_matmuls(name: str, monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for cuDNN's kernel, which this machine does not have."""

    def jax_s(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    config = MODELS[name].Config(**SMALL, batch=4, **AXES[name], attention="xla")
    expected = loss_and_gradients(name, config)
    kernel = fused_attention.BlockKernel(stand_in, stand_in_backward)
    monkeypatch.setattr(fused_attention, "CUDNN", kernel)
    monkeypatch.setattr(fused_attention, "refusal", lambda q, k, v: None)
    monkeypatch.setattr(attention, "refusal", lambda config, mesh: None)
    monkeypatch.setattr(gpt, "cudnn", jax_s)
    got = loss_and_gradients(name, dataclasses.replace(config, attention="cudnn"))
    for g, wanted in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(g, wanted, rtol=1e-4, atol=1e-6)


class TestOnPods:
    pytestmark = pods

    @pytest.mark.parametrize(
        ("pod", "changes", "why"),
        [
            ("h100-sxm", {}, None),
            ("h100-sxm", {"dtype": "float32"}, "must be fp16/bf16"),
            ("h100-sxm", {"hidden": 48}, "multiple of 8, but got 12"),
            ("h100-sxm", {"hidden": 1024}, None),
            ("a100-sxm-80", {"hidden": 1024}, "head dim must be <= 128"),
            ("h100-sxm", {"compress": "qsgd:4"}, "without --compress"),
        ],
    )
    def test_auto_is_cudnn_where_it_runs(self, pod: str, changes: dict, why: str | None):
        mesh = jaxoverlap.pod_mesh(f"{pod}:1x4", {"data": 2, "model": 2})
        jaxoverlap.pod_mesh("h100-sxm:1x2", {"data": 2})  # the last one described
        sizes = SMALL | dict(dtype="bfloat16", **AXES["gpt"]) | changes
        assert attention.uses_cudnn(gpt.Config(**sizes), mesh) == (why is None)
        assert not attention.uses_cudnn(gpt.Config(**sizes, attention="xla"), mesh)
        if why:
            with pytest.raises(Mistake, match=f"attention='cudnn': .*{why}.*attention='xla'"):
                attention.uses_cudnn(gpt.Config(**sizes, attention="cudnn"), mesh)

    @pytest.mark.rotating
    @pytest.mark.parametrize("name", some(2, [*MODELS]))
    def test_steps_are_compiled_with_it(self, name: str):
        """Forward, again in the backward pass, and backward; for long texts on each of two hops."""
        model, axes = MODELS[name], AXES[name]
        mesh = jaxoverlap.pod_mesh("h100-sxm:1x4", axes)
        assert model.Config.pod(**axes).attention == "xla"
        sizes = {"sequence": 512} if name != "vit" else {}
        sizes |= {"group": 256} if name == "moe" else {}
        config = model.Config.pod(
            layers=1, hidden=512, heads=8, mlp=512, attention="cudnn", batch=8, **sizes, **axes
        )
        recipe = model.RECIPE
        step = recipe.make_step(config, mesh).lower(*recipe.abstract_args(config, mesh)).compile()
        text = step.as_text()
        assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == (
            4 if name == "long_context" else 2
        )
        assert '"__cudnn$fmhaSoftmaxBackward"' in text

    @pytest.mark.rotating
    @pytest.mark.parametrize(
        ("recompute", "kind", "kernels"),
        some(
            1,
            [
                ("full", "auto", 0),
                ("selective", "auto", 0),
                ("full", "cudnn", 2 * 2),
                ("selective", "cudnn", 2 * 2),
            ],
        ),
    )
    def test_configured_meshes_have_the_ring_if_it_is_wanted(self, recompute, kind, kernels):
        """The ring has two hops, forward and again in the backward pass, with shared key heads too."""
        split = Configuration(fsdp=2, model=2, context=2, recompute=recompute)
        config = configured_model.Config(
            split=split, order=AXES_OF_SIX, layers=2, hidden=512, heads=8, kv_heads=4, mlp=512, sequence=512,
            batch=4, vocab=256, dtype="bfloat16", attention=kind,
        )  # fmt: skip
        recipe = configured.DENSE
        mesh = configured.mesh_on(pod_devices(parse_cluster("h100-sxm:1x8")), config)
        step = recipe.make_step(config, mesh).lower(*recipe.abstract_args(config, mesh)).compile()
        assert step.as_text().count('custom_call_target="__cudnn$fmhaSoftmax"') == kernels

    @pytest.mark.rotating
    @pytest.mark.parametrize(
        ("recompute", "kernels"),
        some(1, [("save_qkv_proj", 2), ("save_attention", 1), ("full", 2)]),
    )
    def test_saved_attention_does_not_run_again(self, recompute, kernels):
        """With what the gradient's kernel reads besides its result."""
        split = Configuration(fsdp=2, model=2, data=2, recompute=recompute)
        config = configured_model.Config(
            split=split, order=AXES_OF_SIX, layers=2, hidden=512, heads=8, mlp=512, sequence=512,
            batch=4, vocab=256, dtype="bfloat16", attention="cudnn",
        )  # fmt: skip
        recipe = configured.DENSE
        mesh = configured.mesh_on(pod_devices(parse_cluster("h100-sxm:1x8")), config)
        step = recipe.make_step(config, mesh).lower(*recipe.abstract_args(config, mesh)).compile()
        assert step.as_text().count('custom_call_target="__cudnn$fmhaSoftmax"') == kernels


def test_a_model_s_option_reaches_its_layers():
    config = gpt.Config(**SMALL, attention="xla")
    model = nnx.eval_shape(lambda: gpt.GPT(config, gpt.make_mesh(config), nnx.Rngs(0)))
    assert model.layers.attention.fused is False
