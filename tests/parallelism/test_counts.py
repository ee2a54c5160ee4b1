"""What is counted: parameters once, states of experts, tables, layers that do not divide."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallelism import LARGE_RUNS
from jaxoverlap.cost.find import cost_or_data_sheet
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.parallelism import traffic, work
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.configure import configure
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import StageParams, memory
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.stack import JAX, MEGATRON, MEGATRON_CORE

MIXTRAL = named_model("mixtral-8x7b")


def times(model, pod="h100-sxm:2x8", stack=JAX, batch=64):
    return IterationTime(model, cost_or_data_sheet(parse_cluster(pod)), stack, global_batch=batch)


def terms(model, config, *, pod="h100-sxm:2x8", stack=JAX, batch=64):
    return times(model, pod, stack, batch).terms(config, place(config, parse_cluster(pod)))


def test_expert_states_are_divided_by_expert_once():
    """Data 2 x expert 8: a device has one expert of a layer, whose state two devices share."""
    config = Configuration(data=2, expert=8, zero_stage=1)
    needs = memory(MIXTRAL, config, JAX, 16)
    dense, experts = MIXTRAL.layer_params()
    tables = MIXTRAL.params - MIXTRAL.layers * (dense + experts)
    by_hand = 8 * (MIXTRAL.layers * experts / 8 / 2 + (MIXTRAL.layers * dense + tables) / 16)
    assert needs.optimizer == pytest.approx(by_hand)
    assert needs.optimizer / 1e9 == pytest.approx(23.4, abs=0.1)
    two = memory(MIXTRAL, replace(config, zero_stage=2), MEGATRON, 16)
    assert two.gradients == pytest.approx(by_hand / 8 * 4)


def test_the_optimizer_updates_what_the_memory_counts():
    """Adam's seconds go by the states of a device, experts' too."""
    zero = Configuration(data=2, expert=8, zero_stage=1)
    one_s, all_s = (terms(MIXTRAL, c).optimizer for c in (zero, replace(zero, zero_stage=0)))
    states = [memory(MIXTRAL, c, JAX, 64).optimizer for c in (zero, replace(zero, zero_stage=0))]
    assert one_s / all_s == pytest.approx(states[0] / states[1], rel=0.01)


@given(
    experts=st.sampled_from([0, 4, 8]),
    kv=st.sampled_from([1, 2, 8]),
    gated=st.booleans(),
    biases=st.booleans(),
    size=st.sampled_from([None, 16, 32]),
    shared=st.sampled_from([0, 64]),
)
def test_a_layer_on_many_devices_has_the_parameters_of_one(
    experts, kv, gated, biases, size, shared
):
    """Dense and expert parts are counted in one place, so that they agree."""
    model = Transformer(
        name="small", layers=3, hidden=64, heads=8, kv_heads=kv, head_dim=size, sequence=16,
        experts=experts, choices=2 if experts else 0, shared_mlp=shared if experts else 0,
        gated=gated, biases=biases, vocab=128,
    )  # fmt: skip
    layer = StageParams.of_layer(model, Configuration())
    table = model.vocab * model.hidden
    assert model.params == 3 * layer.total + table + model.norm_params
    if experts:
        split = StageParams.of_layer(model, Configuration(expert=4))
        assert split.dense == layer.dense
        assert 4 * split.experts == layer.experts


def test_a_head_may_have_its_own_size():
    """Qwen3-30B-A3B: 32 heads of 128 where the hidden size is 2048; 30.5B parameters."""
    model = Transformer(
        name="qwen3-30b-a3b", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, mlp=768,
        sequence=4096, vocab=151936, experts=128, choices=8, gated=True, biases=False, tied=False,
    )  # fmt: skip
    assert model.params / 1e9 == pytest.approx(30.5, rel=0.01)
    qkv, out = work.layer(model, Configuration(), JAX).forward.matmuls[:2]
    assert (qkv.n, out.k) == ((32 + 2 * 4) * 128, 32 * 128)


def test_unknown_and_missing_fields_are_refused():
    sizes = {"name": "own", "layers": 2, "hidden": 64, "heads": 4, "sequence": 16}
    assert Transformer.from_fields({**sizes, "head_dim": 32}).head_size == 32
    with pytest.raises(ValueError, match="unknown fields kv_headz; did you mean kv_heads"):
        Transformer.from_fields({**sizes, "kv_headz": 2})
    with pytest.raises(ValueError, match="missing fields: heads"):
        Transformer.from_fields({name: sizes[name] for name in sizes if name != "heads"})
    with pytest.raises(ValueError, match="gated='yes': expected True or False"):
        Transformer.from_fields({**sizes, "gated": "yes"})


@pytest.mark.parametrize("stack", [JAX, MEGATRON], ids=lambda s: s.name)
def test_fsdp_moves_the_tables(stack):
    config = Configuration(fsdp=16)
    small, large = (replace(named_model("gpt-3.6b"), vocab=vocab) for vocab in (256, 262144))
    sent = [sum(s.sent_bytes for s in traffic.of_tables(m, config, stack)) for m in (small, large)]
    assert sent[1] - sent[0] == 2 * 2 * (262144 - 256) * small.hidden * 15 / 16
    assert terms(large, config, stack=stack).fsdp > terms(small, config, stack=stack).fsdp


def test_the_first_gather_and_the_last_scatter_are_exposed():
    """Large matmuls hide all other gathers; one in a layer's and one in a table's way remain.

    Of the others a step pays the stack's share: `hidden_cost`.
    """
    model, cluster = named_model("gpt-18.4b"), parse_cluster("h100-sxm:1x8")
    config = Configuration(fsdp=8, micro_batch=8, overlap=True)
    form, costly = (
        times(model, "h100-sxm:1x8", replace(JAX, hidden_cost=share)) for share in (0.0, 0.5)
    )
    placement = place(config, cluster)
    layer = [s for s in traffic.of_layer(model, config, MEGATRON) if s.term == "fsdp"]
    gather, _, scatter = (form.sends.sent_s(s, placement) for s in layer)
    tables = [
        form.sends.sent_s(s, placement, pieces=1) for s in traffic.of_tables(model, config, JAX)
    ]
    exposed_s = gather + scatter + sum(tables)
    assert form.terms(config, placement).fsdp == pytest.approx(exposed_s)
    paid_s = 0.5 * model.layers * (2 * gather + scatter)
    assert costly.terms(config, placement).fsdp == pytest.approx(exposed_s + paid_s)


def test_a_pipeline_of_one_program_hides_no_gather():
    """Its stages run in loops over ticks, which neither overlap() nor XLA's scheduler reaches."""
    model = named_model("gpt-3.6b")
    config = Configuration(pipeline=2, fsdp=8, overlap=True)
    unhidden = replace(JAX, prefetches=False)
    for stack, on in ((JAX, True), (JAX, False), (unhidden, True)):
        other = terms(model, replace(config, overlap=on), stack=stack).fsdp
        assert other == terms(model, replace(config, overlap=False), stack=unhidden).fsdp
    elsewhere = replace(unhidden, lockstep=False)
    hidden, bare = (
        terms(model, replace(config, overlap=on), stack=elsewhere).fsdp for on in (True, False)
    )
    assert hidden < bare


@pytest.mark.parametrize(
    ("name", "pipeline", "interleave", "first", "last"),
    [("llama3-405b", 16, 1, 7, 7), ("llama3-405b", 16, 8, 7, 7), ("gpt-175b", 5, 1, 20, 18)],
)
def test_layers_that_do_not_divide_leave_the_ends_lighter(name, pipeline, interleave, first, last):
    model = named_model(name)
    config = Configuration(pipeline=pipeline, interleave=interleave)
    chunks = config.chunk_layers(model)
    assert sum(chunks) == model.layers
    assert max(chunks) - min(chunks) <= 1
    stages = [config.stage_layers(model, stage) for stage in range(pipeline)]
    assert sum(stages) == model.layers
    if name == "llama3-405b":
        assert (stages[0], stages[-1]) == (first, last)
        assert set(stages[1:-1]) == {8}
        assert not config.illegal(model, 1024)
    total = sum(StageParams.of_stage(model, config, stage).total for stage in range(pipeline))
    copy = model.vocab * model.hidden + model.learned_positions * model.hidden
    assert total == model.params + (copy if model.tied else 0)


PUBLISHED = {
    "Llama 3 405B, 8,192 H100s": (
        named_model("llama3-405b"),
        Configuration(data=128, pipeline=16, model=8, interleave=8, zero_stage=1),
        2048,
    ),
    "BLOOM, 384 A100s": (
        Transformer(name="bloom", layers=70, hidden=14336, heads=112, sequence=2048, vocab=250880),
        Configuration(data=8, pipeline=12, model=4, micro_batch=2, zero_stage=1),
        2048,
    ),
    "OPT-175B, 992 A100s": (
        Transformer(name="opt-175b", layers=96, hidden=12288, heads=96, sequence=2048, vocab=50272),
        Configuration(fsdp=124, model=8),
        124 * 8,
    ),
}


def test_large_runs_are_legal():
    for model, config, pod, batch, stack, _ in LARGE_RUNS:
        assert not config.illegal(model, batch, stack)
        assert config.devices == parse_cluster(pod).num_devices


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_legal(name):
    model, config, batch = PUBLISHED[name]
    assert not config.illegal(model, batch, MEGATRON)


def test_padded_shards_cost_what_they_pad():
    model, config, _ = PUBLISHED["OPT-175B, 992 A100s"]
    assert config.shard_share(model) == 100 / 12288  # 99.1 rows of a device become 100
    sent = next(s for s in traffic.of_layer(model, config, MEGATRON) if s.term == "fsdp")
    params = StageParams.of_layer(model, config).total
    assert sent.sent_bytes == pytest.approx(2 * params * 100 / 12288 * 123)
    assert "even shards" in config.illegal(model, 992, JAX)


def test_a_search_interleaves_as_often_as_layers_allow():
    model = replace(named_model("gpt-3.6b"), layers=32, sequence=512)
    found = configure(
        model, "a100-sxm-80:2x8", global_batch=16, stack=MEGATRON, keep=500,
        axes={"pipeline": [2], "data": [1], "fsdp": [1]},
    )  # fmt: skip
    assert {1, 2, 4, 8, 16} <= {s.configuration.interleave for s in found}


def test_what_is_computed_again_by_name():
    """MaxText's policy saves qkv and the attention's projection; the MLP's result is never read."""
    model = named_model("llama2-70b")
    again = work.layer(model, Configuration(), JAX).again
    flops = {name: of.flops for name, of in again.items()}
    tokens, h = model.sequence, model.hidden
    assert flops["gate"] == flops["up"] == 2 * tokens * h * model.inner
    assert flops["qkv"] + flops["out"] == 2 * tokens * (
        sum(model.layer_params()) - 3 * h * model.inner - 2 * model.norm_params
    )
    assert "down" not in flops and not flops["norms"] and not flops["activation"]
    form, key = times(model), Configuration(micro_batch=2)
    full, policy, none = (
        form.terms(replace(key, data=16, recompute=name), place(
            replace(key, data=16), parse_cluster("h100-sxm:2x8"))).recompute
        for name in ("full", "save_dot_except_mlp", "none")
    )  # fmt: skip
    assert full > policy > none == 0


def test_fp8_matmuls_are_faster_and_their_casts_are_counted():
    model, config = named_model("llama2-70b"), Configuration(fsdp=64, micro_batch=2)
    fp8 = replace(JAX, matmul_dtype="fp8")
    plain, cast = (work.layer(model, config, stack) for stack in (JAX, fp8))
    m = plain.forward.matmuls
    operands = sum(x.k * (x.m + x.n) for x in m)
    assert cast.forward.memory_bytes - plain.forward.memory_bytes == 4 * operands
    assert cast.backward.memory_bytes - plain.backward.memory_bytes == 4 * sum(x.m * x.n for x in m)
    step = terms(model, config, pod="h100-sxm:8x8", stack=fp8, batch=128).step_s
    assert step < 0.8 * terms(model, config, pod="h100-sxm:8x8", batch=128).step_s


def test_scales_wait_for_more_hosts_up_to_a_limit():
    model = named_model("llama2-70b")
    added = []
    for hosts in (1, 8, 32, 64):
        config, pod = Configuration(fsdp=8, data=hosts), f"h100-sxm:{hosts}x8"
        data_s = [
            terms(
                model,
                config,
                pod=pod,
                stack=replace(JAX, matmul_dtype="fp8", scale_syncs=n),
                batch=8 * hosts,
            ).data
            for n in (0, 12)
        ]
        added.append(data_s[1] - data_s[0])
    assert added[0] < added[1] / 2 < added[2] / 4
    assert added[3] == pytest.approx(added[2], rel=0.1)


def test_experts_in_groups_take_longer_and_tokens_are_sorted():
    model, config = named_model("qwen3-30b-a3b"), Configuration(expert=16)
    plain = replace(MEGATRON_CORE, expert_factor=1.0, permutes=0, expert_launch_s=0.0)
    step, slower, sorting = (
        terms(model, config, stack=stack, batch=1024).compute
        for stack in (plain, replace(plain, expert_factor=2.0), replace(plain, permutes=4))
    )
    cost, tokens = cost_or_data_sheet(parse_cluster("h100-sxm:2x8")), model.sequence
    layer = work.layer(model, config, plain)
    grouped = [m for m in (*layer.forward.matmuls, *layer.backward.matmuls) if m.batch > 1]
    assert len(grouped) == 6
    once_s = sum(cost.matmul_s(**vars(m)) for m in grouped)
    assert slower - step == pytest.approx(64 * model.layers * once_s)
    moved = 2 * 4 * 2 * 2 * tokens * model.choices * model.hidden * plain.memory_factor
    sorted_s = moved / cost.tables.memory.bytes_per_s
    assert sorting - step == pytest.approx(64 * model.layers * sorted_s)


def test_a_token_crosses_to_a_host_once():
    """Eight choices of 128 experts on two hosts: nearly all tokens have experts on both."""
    model, config = named_model("qwen3-30b-a3b"), Configuration(expert=16)
    each, once = (
        terms(model, config, stack=replace(MEGATRON_CORE, sends_once=sends), batch=1024).expert
        for sends in (False, True)
    )
    assert each / once == pytest.approx(8 / (2 * (1 - 0.5**8)), rel=0.05)


def test_a_token_goes_to_a_device_of_its_host_once():
    """Eight choices on eight devices: 5.25 of them, on average, have one of a token's experts."""
    model, config = named_model("qwen3-30b-a3b"), Configuration(expert=8, data=2, micro_batch=8)
    each, once = (
        terms(model, config, stack=replace(MEGATRON_CORE, sends_once=sends), batch=1024).expert
        for sends in (False, True)
    )
    assert each / once == pytest.approx(8 / (8 * (1 - (7 / 8) ** 8)), rel=0.05)


def test_layers_with_experts_take_no_less_than_their_launches():
    """Small micro-batches are bound by the host, sends included; large ones, and dense, are not."""
    model, stack = named_model("qwen3-30b-a3b"), replace(MEGATRON_CORE, matmul_dtype="mxfp8")
    none = replace(stack, expert_launch_s=0.0)
    pod = "b200:1x8"

    def both(model, stack=stack, **changes):
        config = Configuration(recompute="none", **changes)
        steps = [terms(model, config, pod=pod, stack=s, batch=512) for s in (stack, none)]
        return [step.compute + step.expert for step in steps]

    launched, kernels = both(model, expert=8)
    layers_s = 64 * model.layers * stack.expert_launch_s * stack.narrow_launches
    assert kernels < layers_s < launched < 1.1 * layers_s  # the head's kernels come on top
    large, kernels = both(model, expert=8, micro_batch=8)
    assert large == kernels
    dense, kernels = both(named_model("llama3-8b"), data=8)
    assert dense == kernels
