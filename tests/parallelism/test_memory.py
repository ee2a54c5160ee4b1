"""Parameters are exact, and memory follows a run's log."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallelism import FRONTIER_LOG_MIB
from benchmarks.published.recipes import FRONTIER, FRONTIER_STACK
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams, in_flight, memory, peak, state_bytes
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.published.models import models, named_model
from jaxoverlap.parallelism.stack import JAX, MEGATRON

RUN = FRONTIER["frontier-175b"]


def test_frontiers_parameters_are_those_that_its_log_prints():
    counts = {0: 2_899_359_744, 15: 2_899_384_320} | dict.fromkeys(range(1, 15), 2_718_480_384)
    for stage, count in counts.items():
        assert StageParams.of_stage(RUN.model, RUN.configuration, stage).total == count


def test_a_layer_follows_the_closed_form():
    """12 h^2 / t + 7.75 h at t = 4: matrices, two norms, biases of rows whole, of columns split."""
    h = RUN.model.hidden
    assert StageParams.of_layer(RUN.model, RUN.configuration).total == 12 * h * h // 4 + 31 * h // 4


@pytest.mark.parametrize("stage", FRONTIER_LOG_MIB)
def test_frontiers_memory_is_within_a_hundredth_of_its_log(stage):
    needs = memory(RUN.model, RUN.configuration, FRONTIER_STACK, RUN.global_batch, stage)
    assert needs.total / 2**20 == pytest.approx(FRONTIER_LOG_MIB[stage], rel=0.01)


def test_between_steps_it_is_nine_bytes_a_parameter():
    params = StageParams.of_stage(RUN.model, RUN.configuration, 7)
    scattered = replace(RUN.configuration, zero_stage=2)  # of gradients the share of ZeRO
    resting = sum(state_bytes(RUN.model, scattered, FRONTIER_STACK, params))
    assert resting == 9 * params.total
    assert resting / 2**20 == pytest.approx(23360.9, rel=0.01)  # the log's


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-22b", 22), ("gpt-175b", 175), ("gpt-530b", 530), ("gpt-1t", 1008), ("llama3-70b", 70.6),
     ("llama3-8b", 8.03), ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 141), ("qwen3-32b", 32.8),
     ("gpt-oss-20b", 20.9)],
)  # fmt: skip
def test_models_have_the_parameters_that_their_papers_say(name, billions):
    assert named_model(name).params / 1e9 == pytest.approx(billions, rel=0.01)


small = st.sampled_from([1, 2, 4])


@given(t=small, p=small, tied=st.booleans(), experts=st.sampled_from([0, 8]))
def test_stages_add_up_to_the_model(t, p, tied, experts):
    """Split matrices add up; norms and biases of rows are on each of t, and tied tables twice."""
    model = Transformer(
        name="small", layers=8, hidden=64, heads=8, sequence=16, vocab=512, biases=False,
        tied=tied, experts=experts, choices=2 if experts else 0, learned_positions=0,
    )  # fmt: skip
    of = Configuration(model=t, pipeline=p)
    total = t * sum(StageParams.of_stage(model, of, stage).total for stage in range(p))
    norms = (t - 1) * (2 * model.layers + 1) * model.hidden
    routers = (t - 1) * model.layers * model.hidden * experts
    again = model.vocab * model.hidden if tied and p > 1 else 0
    assert total == model.params + norms + routers + again


def test_in_flight_is_1f1bs():
    of = Configuration(pipeline=4)
    assert [in_flight(of, 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(of, 2) == 2
    assert in_flight(replace(of, interleave=2), 8) == 2 * 3 + 4 + 1


def test_recompute_zero_and_fsdp_take_less():
    model = named_model("gpt-18.4b")

    def needs(**changes):
        of = Configuration(**{"data": 4, "model": 4, "recompute": "none", **changes})
        return peak(model, of, MEGATRON, 64).total

    assert needs() > needs(recompute="selective") > needs(recompute="full")
    assert needs() > needs(zero_stage=1) > needs(zero_stage=2) > needs(data=1, fsdp=4)
    assert needs() > needs(sequence_parallel=True)


def test_a_lockstep_pipeline_keeps_inputs_alone():
    model, of = named_model("gpt-3.6b"), Configuration(pipeline=2, data=2, recompute="none")
    apart, together = (peak(model, of, replace(JAX, lockstep=on), 64) for on in (False, True))
    assert together.activations < apart.activations


def test_all_models_are_found_by_name():
    assert all(named_model(model.name) == model for model in models())
    with pytest.raises(ValueError, match="did you mean gpt-175b"):
        named_model("gpt-175")
