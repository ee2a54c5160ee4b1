"""Published rows are read as they were published, and the cost model is as near as pages say."""

from pathlib import Path

import pytest

from benchmarks.published import collectives, steps
from jaxoverlap.cost.find import cost_model
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.bands import BANDS, band
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.stack import MAXTEXT


@pytest.mark.skipif(not collectives.FILE.exists(), reason=f"{collectives.FILE} is not there")
def test_published_collectives():
    """From 256 kB on; 256 kB over Google's gIB is off by more, as that source's small sizes jump."""
    points, left_out = collectives.read(collectives.FILE)
    off = abs(collectives.errors(points))
    assert len(points) > 90 and left_out
    assert off.mean() < 0.15
    assert (off > 0.40).sum() <= 1


STEPS = pytest.mark.skipif(not steps.FILE.exists(), reason=f"{steps.FILE} is not there")


@STEPS
def test_published_steps_without_part_in_a_fit():
    """Dense models on H100s and A100s: 12% in the mean, none of a model above 1B over 25%."""
    found, left_out = steps.read()
    unseen = [s for s in found if not s.fitted and not s.model.experts]
    unseen = [s for s in unseen if s.cluster.startswith(("h100", "a100"))]
    off = {s: abs(s.ratio - 1) for s in unseen}
    assert len(off) > 70 and left_out
    assert sum(off.values()) / len(off) < 0.06
    assert max(error for s, error in off.items() if s.model.params > 1e9) < 0.25


@STEPS
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_maxtexts_published_scaling(dtype):
    """Llama2-70B on 64 to 2048 H100s: each step within 10%, the loss to 256 within 3 points."""
    rows = [s for s in steps.read()[0] if s.model.name == "llama2-70b"]
    rows = [s for s in rows if s.stack.matmul_dtype == dtype]
    assert [s.configuration.devices for s in rows] == [64, 128, 256, 512, 1024, 2048]
    assert all(s.ratio == pytest.approx(1, abs=0.10) for s in rows)
    published, predicted = (
        rows[2].measured_s / rows[0].measured_s,
        rows[2].terms.step_s / rows[0].terms.step_s,
    )
    assert predicted == pytest.approx(published, abs=0.03)


@STEPS
def test_published_steps_on_blackwell():
    """Dense models in four dtypes: 8% in the mean, none over 20%; no part in a fit."""
    found = [s for s in steps.read()[0] if not s.fitted and not s.model.experts]
    found = [s for s in found if s.cluster.startswith(("gb", "b"))]
    off = [abs(s.ratio - 1) for s in found]
    assert {s.stack.matmul_dtype for s in found} == {"bf16", "fp8", "mxfp8", "nvfp4"}
    assert len(off) > 30 and sum(off) / len(off) < 0.08 and max(off) < 0.20


@STEPS
def test_the_bands_are_those_of_the_published_steps():
    assert steps.bands(steps.read()[0]) == BANDS


@STEPS
def test_the_page_of_published_steps_is_what_the_command_prints():
    page = Path(__file__).parents[2] / "benchmarks" / "results" / "published_steps.md"
    assert page.read_text() == f"{steps.page()}\n"


def test_a_band_says_what_it_is_of():
    """Of the software that it is asked for, and of no other on the same chip."""
    foundry, maxtext, jax = (
        band(stack, "h100-sxm", "bf16", experts=False)
        for stack in ("llm-foundry (2023)", "MaxText", "JAX")
    )
    assert "llm-foundry (2023) on h100-sxm in bf16 without part in a fit" in foundry
    assert "none" in maxtext and "6 had part in a fit" in maxtext
    assert "none" in jax and "fit" not in jax
    assert "with experts" in band("MaxText", "gb200", "fp8", experts=True)


def test_a_row_that_has_no_form_is_named():
    row = dict.fromkeys(
        [
            "framework",
            "model",
            "seq",
            "gbs",
            "gpus",
            "chip",
            "mesh",
            "precision",
            "remat",
            "step_s",
        ],
        "",
    )
    row |= {"per_gpu_batch": "", "overlap": "", "notes": "", "source": "nowhere"}
    with pytest.raises(steps.NotDescribedError, match="step_s is not published"):
        steps.step_of(row)
    row |= {"step_s": "1.0", "gbs": "8", "seq": "2048", "gpus": "8", "chip": "MI300X"}
    with pytest.raises(steps.NotDescribedError, match="MI300X"):
        steps.step_of(row)
    row |= {"chip": "H100-SXM", "framework": "MaxText", "precision": "bf16", "model": "gpt3-5b"}
    with pytest.raises(steps.NotDescribedError, match="fsdp4 x dp1 on 8 GPUs"):
        steps.step_of(row | {"mesh": "fsdp4 x dp1"})
    step = steps.step_of(row | {"mesh": "fsdp8", "per_gpu_batch": "1", "remat": "SAVE_QKV"})
    assert step.model.name == "gpt-5b" and step.configuration.saved == {"qkv"}
    row |= {"gpus": "256", "gbs": "256", "mesh": "dcn dp2 x dcn fsdp16 x ici fsdp8"}
    config = steps.step_of(row | {"per_gpu_batch": "1"}).configuration
    assert (config.data, config.fsdp) == (2, 128)
    row |= {"framework": "NeMo/Megatron", "model": "grok1-314b", "mesh": "tp4 ep8 etp4 mbs1"}
    config = steps.step_of(row).configuration
    assert (config.data, config.expert, config.model) == (8, 8, 4)
    config = steps.step_of(row | {"mesh": "tp4 ep8 etp1 mbs1"}).configuration
    assert (config.data, config.expert, config.experts_on_model) == (32, 2, True)
    with pytest.raises(steps.NotDescribedError, match="a part of the tensor axis"):
        steps.step_of(row | {"mesh": "tp4 ep2 etp1 mbs1"})


@pytest.mark.parametrize(
    ("cluster", "config", "batch", "published_s"),
    [
        (
            "h100-sxm:1x8",
            Configuration(fsdp=8, micro_batch=2, recompute="minimal_flash"),
            16,
            0.721,
        ),
        (
            "h100-sxm:32x8@1600",
            Configuration(data=32, fsdp=8, micro_batch=4, recompute="minimal_flash"),
            1024,
            1.500,
        ),
    ],
    ids=["JAX-Toolbox", "gpu-recipes, a3-mega"],
)
def test_llama2_7b_by_maxtext_elsewhere(cluster, config, batch, published_s):
    """Neither had part in a fit: JAX-Toolbox's MaxText page, and gpu-recipes; minimal_flash."""
    cost = cost_model(cluster)
    times = IterationTime(named_model("llama2-7b"), cost, MAXTEXT, global_batch=batch)
    step_s = times.terms(config, place(config, cost.cluster)).step_s
    assert step_s == pytest.approx(published_s, rel=0.15)


_H100S = {"source": "NVIDIA/dgxc-benchmarking", "chip": "H100-SXM", "overlap": "", "notes": ""}


@pytest.mark.parametrize(
    ("gpus", "precision", "published_s"),
    [
        (128, "bf16", 15.563), (256, "bf16", 15.444), (512, "bf16", 15.519),
        (1024, "bf16", 15.603), (2048, "bf16", 15.898),
        (128, "fp8", 9.074), (256, "fp8", 9.488), (512, "fp8", 9.244),
        (1024, "fp8", 9.483), (2048, "fp8", 9.339),
    ],
)  # fmt: skip
def test_another_model_of_maxtext(gpus, precision, published_s):
    """Llama3-70B, 8192 tokens: maxtext/README_70b.md; no part in a fit."""
    mesh = f"fsdp{gpus}" if gpus <= 256 else f"fsdp128 (dcn 16 x ici 8) x dp{gpus // 128}"
    row = {"framework": "MaxText", "model": "llama3-70b", "seq": "8192", "gbs": str(2 * gpus)}
    row |= {"per_gpu_batch": "2", "gpus": str(gpus), "mesh": mesh, "precision": precision}
    row |= {"remat": "save_qkv_proj", "step_s": str(published_s)}
    step = steps.step_of(_H100S | row)
    assert not step.fitted and step.ratio == pytest.approx(1, abs=0.10)


@pytest.mark.parametrize(("gpus", "published_s"), [(128, 7.47), (2048, 8.02)])
def test_another_model_of_pax(gpus, published_s):
    """GPT-3 175B in fp8: paxml/README_175b.md; no part in a fit."""
    row = {"framework": "Pax", "model": "gpt3-175b", "seq": "2048", "gbs": str(2 * gpus)}
    row |= {"mesh": f"dcn dp{gpus // 128} x dcn fsdp16 x ici fsdp8", "remat": "SAVE_QKV_OUT_PROJ"}
    row |= {"per_gpu_batch": "2", "gpus": str(gpus), "precision": "fp8"}
    step = steps.step_of(_H100S | row | {"step_s": str(published_s)})
    assert not step.fitted and step.ratio == pytest.approx(1, abs=0.20)
