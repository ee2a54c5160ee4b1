"""The search is exact, its answer prints, and what fits nowhere is told why."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import jaxoverlap
from benchmarks.parallelism import brute_force
from jaxoverlap.cli.app import app
from jaxoverlap.parallelism.configuration import AXES, Configuration, load_configuration
from jaxoverlap.parallelism.configure import configure
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.sharding import mesh_of, spec_of
from jaxoverlap.parallelism.stack import JAX, MEGATRON, STACKS

SMALL = replace(named_model("gpt-3.6b"), layers=8)


@pytest.mark.parametrize("stack", [JAX, MEGATRON], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["gpt-3.6b", "mixtral-8x7b"])
def test_the_search_finds_what_brute_force_finds(name, stack):
    """But for choices of recompute whose layers take as long, which are compared by their layers."""
    model = replace(named_model(name), layers=8, sequence=512)
    found = configure(model, "a100-sxm-80:1x4", global_batch=4, stack=stack, keep=1)
    assert found.fastest.step_s == pytest.approx(
        brute_force(model, "a100-sxm-80:1x4", 4, stack), rel=0.005
    )


def test_configurations_are_ranked_legal_and_fit():
    found = configure(SMALL, "h100-sxm:2x8", global_batch=64)
    tied = [s for s in found if s.step_s <= 1.02 * found.fastest.step_s]
    assert list(found[: len(tied)]) == tied  # of these the most usual comes first
    rest = [s.step_s for s in found[len(tied) :]]
    assert rest == sorted(rest)
    for scored in found:
        assert not scored.configuration.illegal(SMALL, 64)
        assert scored.memory.total <= 0.95 * JAX.most_pool * found.cluster.chip.memory_bytes
        assert scored.configuration.devices == 16


def test_it_prints_as_a_table_and_says_why():
    found = configure("gpt-18.4b", "h100-sxm:8x8", global_batch=256, axes={"fsdp": [1, 2, 4, 8]})
    text = str(found)
    assert "legal splits" in text and re.search(r"^1 (beats 2 by|takes .* more than 2)", text, re.M)
    assert max(map(len, text.splitlines())) <= 150


def test_axes_are_kept():
    found = configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"pipeline": [2], "fsdp": [1]})
    assert {s.configuration.pipeline for s in found} == {2}
    with pytest.raises(ValueError, match="expected the sizes allowed"):
        configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"model": 4})  # type: ignore[dict-item]
    for none in ([], [0]):
        with pytest.raises(ValueError, match="expected the sizes allowed"):
            configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"model": none})
    with pytest.raises(jaxoverlap.NothingFitsError, match=r"with model in \[3\]: .* the sizes, "):
        configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"model": [3]})
    with pytest.raises(ValueError, match="unknown axes"):
        configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"tensor": [2]})


@pytest.mark.parametrize("wrong", [{"kv_heads": -2}, {"layers": 8.5}, {"mlp": -5}, {"hidden": "a"}])
def test_sizes_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*: expected a whole number"):
        replace(SMALL, **wrong)


def test_what_fits_nowhere_is_told_the_term_and_the_cluster():
    with pytest.raises(jaxoverlap.NothingFitsError) as error:
        configure("gpt-175b", "a100-sxm-80:1x8", global_batch=64)
    assert "most of it is optimizer" in str(error.value)
    would = re.search(r"a100-sxm-80:(\d+)x8 would do", str(error.value))
    assert would
    hosts = int(would[1])
    assert configure("gpt-175b", f"a100-sxm-80:{hosts}x8", global_batch=64, keep=1)
    with pytest.raises(jaxoverlap.NothingFitsError):
        configure("gpt-175b", f"a100-sxm-80:{hosts - 1}x8", global_batch=64)


def test_what_divides_nowhere_is_told_so():
    with pytest.raises(jaxoverlap.NothingFitsError, match="no legal way to split"):
        configure("gpt-3.6b", "h100-sxm:7x1", global_batch=16, axes={"pipeline": [1]})


def test_a_configuration_goes_through_json(tmp_path):
    found = configure(SMALL, "h100-sxm:1x8", global_batch=64, keep=2)
    plain = json.loads(json.dumps(found.to_builtins()))["configurations"][0]
    assert load_configuration(plain) == found[0].configuration
    with pytest.raises(ValueError, match="unknown fields"):
        load_configuration({"tensor": 2})


def test_the_command(tmp_path):
    picture = tmp_path / "picture.png"
    pod = ["--pod", "mi250x-gcd:2x8", "--global-batch", "64"]
    run = CliRunner().invoke(app, ["configure", "gpt-3.6b", *pod, "--picture", str(picture)])
    assert run.exit_code == 0, run.output
    assert "tokens/s" in run.output
    assert picture.stat().st_size > 10_000
    run = CliRunner().invoke(app, ["configure", "gpt-3.6b", *pod, "--json", "--axes", "model=2"])
    assert {c["model"] for c in json.loads(run.output)["configurations"]} == {2}
    assert CliRunner().invoke(app, ["configure", "gpt-3", *pod]).exit_code == 2


def test_a_mesh_puts_the_last_axis_on_neighbours():
    cluster = jaxoverlap.parse_cluster("h100-sxm:2x4")
    order = ("expert", "context", "fsdp", "data", "pipeline", "model")
    at = place(Configuration(data=2, pipeline=2, model=2), cluster, order)
    mesh = mesh_of(at, list(range(8)))  # type: ignore[arg-type]
    assert mesh.axis_names == AXES
    devices = np.array(mesh.devices).reshape(2, 2, 2)  # pipeline, data, model
    assert devices[0, 0].tolist() == [0, 1]
    assert devices[1, 0].tolist() == [2, 3]
    assert devices[0, 1].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("path", "ndim", "stacked", "spec"),
    [
        ("layers/mlp/up/kernel", 3, 1, P("pipeline", "fsdp", "model")),
        ("layers/mlp/up/kernel", 4, 2, P("pipeline", None, "fsdp", "model")),
        ("layers/attention/out/kernel", 2, 0, P("model", "fsdp")),
        ("layers/attention_norm/scale", 2, 1, P("pipeline", None)),
        ("embedding/embedding", 2, 0, P(("fsdp", "model"), None)),
        ("layers/experts/down", 4, 1, P("pipeline", "expert", "model", "fsdp")),
        ("MultiHeadDotProductAttention_0/query/kernel", 2, 0, P("fsdp", "model")),
        ("MultiHeadDotProductAttention_0/query/kernel", 3, 0, P("fsdp", "model", None)),
        ("MultiHeadDotProductAttention_0/out/kernel", 3, 0, P("model", None, "fsdp")),
        ("layers/attention/query/kernel", 4, 1, P("pipeline", "fsdp", "model", None)),
        ("MultiHeadDotProductAttention_0/query/bias", 2, 0, P(None, None)),
        ("lm_head/kernel", 2, 0, P(("fsdp", "model"), None)),
        ("logit_scale", 0, 0, P()),
    ],
)
def test_rules_by_path(path, ndim, stacked, spec):
    assert spec_of(path, ndim, stacked=stacked) == spec


def test_kernels_of_flax_attention_are_no_stacks():
    """Every kernel of a layer of flax's, heads apart, gets axes that its dims divide by."""
    layer = nnx.MultiHeadAttention(8, 32, 32, rngs=nnx.Rngs(0))
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    kernels = {
        path[0]: spec_of("/".join(path), leaf.ndim) for path, leaf in flat if "kernel" in path
    }
    assert kernels.pop("out") == P("model", None, "fsdp")
    assert set(kernels.values()) == {P("fsdp", "model", None)} and len(kernels) == 3


def test_more_stacks_than_dims_are_refused():
    with pytest.raises(ValueError, match="stacked=3 of 'up' with 2 dims: expected 0 to 2"):
        spec_of("up", 2, stacked=3)


def test_a_chip_with_facts_alone_cannot_be_compiled_for():
    with pytest.raises(ValueError, match="CUDA's chips only"):
        jaxoverlap.pod_mesh("mi250x-gcd:1x8", {"x": 8})


def test_it_says_which_tools_the_choice_uses():
    slow = jaxoverlap.Link("slow", 1e9, 20e-6)
    cluster = replace(jaxoverlap.parse_cluster("h100-sxm:4x8"), network=slow)
    axes = {"data": [4], "pipeline": [1]}
    found = configure(SMALL, cluster, global_batch=64, axes=axes)
    assert any("local updates" in line for line in found.tools)
    assert "Use for 1:" in str(found)
    one_host = replace(jaxoverlap.parse_cluster("h100-sxm:1x8"), nvlink=slow)
    near = configure(SMALL, one_host, global_batch=64, axes={"data": [8]})
    assert near[0].terms.data > 0.1 * near[0].step_s  # but not on the network
    assert not any("local updates" in line for line in near.tools)
    staged = configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"pipeline": [2]})
    assert any("jaxoverlap.pipeline" in line for line in staged.tools)
    sharded = configure(SMALL, "h100-sxm:1x8", global_batch=64, axes={"fsdp": [8]})
    assert sharded.tools[0].startswith("jaxoverlap.overlap(step)")
    assert not configure(SMALL, "h100-sxm:1x8", global_batch=64, stack=MEGATRON).tools


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_ranks_and_says_how_far_published_steps_were_off(name):
    axes = {"pipeline": [1], "context": [1], "model": [1, 2]}
    stack = STACKS[name]
    found = configure("llama3-8b", "h100-sxm:2x8", global_batch=64, axes=axes, stack=stack, keep=2)
    assert f"{stack.name} on h100-sxm in bf16" in found.error_band
    assert found.to_builtins()["error_band"] == found.error_band
    unknown = configure("gpt-3.6b", "mi250x-gcd:2x8", global_batch=64, axes=axes, stack=stack)
    assert "Error band: none" in unknown.error_band
