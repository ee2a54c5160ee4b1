"""Predict published training steps: `python -m benchmarks.accuracy --steps FILE`.

A file has the columns framework, model, seq, gbs, per_gpu_batch, gpus, chip, mesh, precision,
remat, overlap, step_s, source and notes, as ../shared/data/published/steps.csv has them. A row that
the form cannot describe is named with its reason, never dropped.
"""

from __future__ import annotations

import csv
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.frame import markdown
from benchmarks.published.stacks import is_later, stack_of
from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.bands import Band, Kind
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.recompute import canonical
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.terms import StepTerms

FILE = Path("../shared/data/published/steps.csv")
_CHIPS = {
    "A100-40": "a100-sxm-40",
    "A100-80": "a100-sxm-80",
    "H100-80": "h100-sxm",
    "H100-SXM": "h100-sxm",
    "H100": "h100-sxm",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200",
    "B300": "b300",
    "GB300": "gb300",
}
_TO_EACH_EXPERT = "alltoall"  # in the column mesh: NCCL's all-to-all, a copy for each expert
_UNFUSED = "before the cuDNN kernel"  # in the column notes: attention was einsums
_500W = "500 W"  # in the column chip
_MODELS = {
    "fuji-7b-v2": "llama2-7b",
    "fuji-70b-v2": "llama2-70b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt3-126m": "gpt-126m",
    "gpt3-5b": "gpt-5b",
    "gpt3-175b": "gpt-175b",
    "grok1-314b": "grok-1",
    "nemotron-15b": "nemotron4-15b",
    "nemotron-340b": "nemotron4-340b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "deepseekv3": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "kimi-k2": "kimi-k2",
    "nemotron-3-nano": "nemotron3-nano",
    "nemotron-3-super": "nemotron3-super",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
}
# What a network says of itself in the column chip, by the name of a cluster's network.
_NETWORKS = {"EFA": "efa", "p5.48xlarge": "efa"}
# What the name of a model says besides, in parentheses: the sizes in words, or another model.
_SAME_MODEL = re.compile(r"\(\d+ x \d+\)|\(llama2-\d+b\)")
_AXES = re.compile(r"\b(fsdp|dp|data|tp|pp|cp|ep|etp|vp|mbs)(\d+)")
_MICRO_BATCH = re.compile(r"(?:micro-batch |mbs)(\d+)")
_DTYPES = {  # of matmuls, by the column precision
    "bf16": "bf16",
    "amp_bf16": "bf16",
    "fp8": "fp8",
    "amp_fp8": "fp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "fp8 tensorwise": "fp8",
    "fp8 tensorwise, fp8 all-gather": "fp8",
}
# Overlap that a row says it has, in the column overlap. PyTorch's asynchronous tensor parallelism
# leaves this share exposed in torchtitan's Llama3.1-8B in bf16; the row in fp8 agrees.
_OVERLAPPED: tuple[tuple[str, dict[str, float]], ...] = (
    ("async TP", {"tensor_exposed": 0.7}),
    ("EP overlap on", {"expert_exposed": 0.0}),
    ("EP overlap +", {"expert_exposed": 0.0}),
)
# What is not a plain step: overlap that a stack here does not have, or work that it does not count.
_NOT_PLAIN = {
    "interleaved 1F1B": "how often its stages interleave is not published",
    "LoRA": "most weights have no gradients",
    "delayed starts": "another scheduler",
    "eager": "a compiler is assumed, and this ran without",
}


@dataclass(frozen=True)
class Step:
    """A published step.

    Attributes:
        source: the publication.
        model, configuration, stack, cluster, global_batch: what ran, and where.
        measured_s: its seconds.
        fitted: whether it set a factor of its stack or chip, or was looked at for its choice.
    """

    source: str
    model: Transformer
    configuration: Configuration
    stack: Stack
    cluster: str
    global_batch: int
    measured_s: float
    fitted: bool

    @functools.cached_property
    def terms(self) -> StepTerms:
        """The predicted seconds by term."""
        cost = _cost(self.cluster)
        times = IterationTime(self.model, cost, self.stack, global_batch=self.global_batch)
        return times.terms(self.configuration, place(self.configuration, cost.cluster))

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.terms.step_s / self.measured_s

    @property
    def kind(self) -> Kind:
        """What bands of errors go by: software, chip, dtype, and whether there are experts."""
        chip = self.cluster.partition(":")[0]
        return self.stack.name, chip, self.stack.matmul_dtype, bool(self.model.experts)


@functools.cache
def _cost(cluster: str) -> CostModel:
    return cost_model(cluster)


class NotDescribedError(ValueError):
    """A row of a file that the form cannot describe; the message says why."""


def read(path: Path = FILE) -> tuple[list[Step], dict[str, str]]:
    """Return the steps of a file, and why each other row (by line and model) is none of them."""
    steps, left_out = list[Step](), dict[str, str]()
    with path.open() as file:
        for line, fields in enumerate(csv.DictReader(file), 2):
            try:
                steps.append(step_of(fields))
            except NotDescribedError as reason:
                left_out[f"{line}, {fields['framework']} {fields['model']}"] = str(reason)
    return steps, left_out


def step_of(fields: dict[str, str]) -> Step:
    """Return a row as a step.

    Raises:
        NotDescribedError: if its chip, model, software, dtype or mesh has no form here.
    """
    for name in ("step_s", "gbs", "seq", "gpus"):
        if not fields[name]:
            raise NotDescribedError(f"{name} is not published")
    for word, reason in _NOT_PLAIN.items():
        if word in fields["overlap"] or word in fields["notes"]:
            raise NotDescribedError(f"not a plain step: {reason}")
    chip = _chip(fields)
    if fields["precision"].lower() not in _DTYPES:
        raise NotDescribedError(f"matmuls in {fields['precision']}: no rows")
    dtype = _DTYPES[fields["precision"].lower()]
    if dtype not in cost_model(f"{chip}:1x1").dtypes:
        raise NotDescribedError(f"{chip} has no matmuls in {dtype}")
    later = is_later(fields["framework"], _name(fields), chip, dtype, fields.get("date", ""))
    stack = stack_of(fields["framework"], chip, dtype, later=later)
    if stack is None:
        raise NotDescribedError(f"no stack of {fields['framework']}")
    if _TO_EACH_EXPERT in fields["mesh"] or fields["framework"] == "NeMo/Megatron":
        stack = replace(stack, sends_once=False)
    for words, hidden in _OVERLAPPED:
        if words in fields["overlap"]:
            stack = replace(stack, **hidden)
    if _recipe(fields).a2a_overlap:
        stack = replace(stack, expert_exposed=0.0)
    if _UNFUSED in fields["notes"]:
        stack = replace(stack, fused_attention=False)
    model, config = _model(fields), _configuration(fields)
    batch = int(fields["gbs"])
    if reason := config.illegal(model, batch):
        raise NotDescribedError(f"no legal form: {reason}")
    return Step(
        source=fields["source"],
        model=model,
        configuration=config,
        stack=stack,
        cluster=_cluster(fields, chip),
        global_batch=batch,
        measured_s=float(fields["step_s"]),
        fitted=_fitted(fields),
    )


# What a framework's words for recompute mean, where they are no policy's name; in this order.
_RECOMPUTE = {
    "MaxText": (("mlpwo", "save_dot_except_mlpwi"), ("qkv, out", "save_dot_except_mlp"),
                ("qkv", "save_qkv_proj")),
    "Pax": (("out_proj", "save_qkv_out_proj"), ("dot", "save_dot_only")),
    "AxLearn": (("", "save_attention"),),
    "torchtitan": (("sac", "selective_op"), ("selective", "selective_op")),
}  # fmt: skip


def _recompute(fields: dict[str, str]) -> str:
    """Return what a row's backward pass computes again, as `Configuration` takes it.

    Raises:
        NotDescribedError: for words that name no policy here.
    """
    remat = fields["remat"].lower()
    if remat == "full" or (remat == "none" and fields["framework"] != "AxLearn"):
        return remat
    for word, policy in _RECOMPUTE.get(fields["framework"].split(" ")[0], ()):
        if word in remat:
            return policy
    if not remat:
        return _recipe(fields).recompute
    try:
        return canonical(remat)
    except ValueError as error:
        raise NotDescribedError(f"no policy {remat!r}") from error


class Published(NamedTuple):
    """What a recipe of Megatron-Bridge sets that the table of its steps does not say.

    Attributes:
        recompute: as `Configuration` takes it.
        offload: layers whose activations wait in host memory.
        a2a_overlap: whether another micro-batch's kernels hide the sends to experts.
    """

    recompute: str = "none"
    offload: int = 0
    a2a_overlap: bool = False


# NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs, *_workload_base_configs.py: by model,
# with words of its mesh, chips and dtypes, the first that matches. Those of NeMo, which came
# before, are taken to be alike.
_RECIPES: tuple[tuple[str, str, str, Published], ...] = (
    ("gpt-oss-120b", "GB200 B200 H100", "bf16", Published("layernorm+moe_act")),
    ("gpt-oss-120b", "B200 H100", "fp8 mxfp8", Published("layernorm+moe_act")),
    ("llama3-70b", "GB200", "fp8", Published(offload=40)),
    ("llama3-70b", "GB300", "fp8", Published(offload=20)),
    ("llama3-70b", "GB300", "bf16", Published(offload=30)),
    ("llama3-70b", "GB200", "bf16", Published(offload=20)),
    ("deepseek-v3 vp2", "B200", "mxfp8", Published("mla_up_proj+mlp", a2a_overlap=True)),
    ("deepseek-v3", "GB300 B300 B200", "mxfp8 fp8 bf16", Published("mla_up_proj")),
    ("deepseek-v3", "GB200", "bf16", Published("mla_up_proj")),
    ("deepseek-v3", "GB200", "mxfp8 fp8", Published("mlp")),
    ("deepseek-v3", "H100", "bf16 fp8", Published("mla_up_proj+mlp")),
    ("nemotron3-nano", "H100", "bf16", Published("moe+layernorm")),
    ("nemotron3-nano", "H100", "fp8", Published("moe+layernorm+core_attn")),
    ("nemotron3-super", "GB200", "mxfp8 bf16", Published("moe+layernorm+core_attn")),
)


def _recipe(fields: dict[str, str]) -> Published:
    """Return what the recipe behind a row of Megatron-Bridge sets; nothing of other software."""
    if fields["framework"] not in ("Megatron-Bridge", "NeMo/Megatron"):
        return Published()
    name, chip = _model(fields).name, fields["chip"].split("-")[0].split(" ")[0]
    dtype = _DTYPES[fields["precision"].lower()]
    fsdp = "fsdp" in fields["mesh"]  # activations are offloaded by recipes with Megatron's FSDP
    for model, chips, dtypes, published in _RECIPES:
        of, *words = model.split()
        here = of == name and all(word in fields["mesh"].split() for word in words)
        if here and chip in chips.split() and dtype in dtypes.split():
            return published if fsdp or not published.offload else Published()
    return Published()


def _chip(fields: dict[str, str]) -> str:
    name = fields["chip"].split(" ")[0]
    if name not in _CHIPS:
        raise NotDescribedError(f"no tables of {fields['chip'] or 'a chip that is not named'}")
    return "h100-sxm-500w" if _500W in fields["chip"] else _CHIPS[name]


def _model(fields: dict[str, str]) -> Transformer:
    _, _, more = fields["model"].lower().partition(" (")
    layers = re.fullmatch(r"(\d+) layers?\)", more)
    if more and not layers and not _SAME_MODEL.fullmatch(f"({more}"):
        raise NotDescribedError(f"no reading of '({more}' in the model's name")
    try:
        model = named_model(_name(fields), sequence=int(fields["seq"]))
    except ValueError as error:
        raise NotDescribedError(f"no sizes of {fields['model']}") from error
    return replace(model, layers=int(layers[1])) if layers else model


def _name(fields: dict[str, str]) -> str:
    """Return the name of a row's model as the package has it, if it has it."""
    name = fields["model"].lower().partition(" (")[0].replace("_", "-").replace(" ", "-")
    name = name.removesuffix("-single-host")
    return _MODELS.get(name, name)


def _configuration(fields: dict[str, str]) -> Configuration:
    """Return how a row's model was split; what its mesh does not name is data parallel."""
    sizes = defaultdict[str, int](lambda: 1)
    for axis, size in _AXES.findall(fields["mesh"]):  # an axis may lie within hosts and across them
        sizes[axis] *= int(size)
    gpus = int(fields["gpus"])
    model, pipeline, context, fsdp, expert = (
        sizes[axis] for axis in ("tp", "pp", "cp", "fsdp", "ep")
    )
    split = model * pipeline * context * fsdp
    named_data = "dp" in sizes or "data" in sizes
    data = sizes["dp"] * sizes["data"] if named_data else max(gpus // split, 1)
    # Megatron's expert-tensor-parallel size is 1 unless a row says so: whole experts over both.
    on_model = expert > 1 and model > 1 and sizes["etp"] == 1
    if on_model:
        if expert % model:
            raise NotDescribedError(f"experts over a part of the tensor axis: {fields['mesh']}")
        expert //= model
    if expert > 1 and ((not on_model and sizes["etp"] not in (1, model)) or data % expert):
        raise NotDescribedError(f"experts over other axes than data: {fields['mesh']}")
    if data * split != gpus:
        raise NotDescribedError(f"{fields['mesh']} on {gpus} GPUs")
    named = _MICRO_BATCH.search(f"{fields['notes']} {fields['mesh']} {fields['per_gpu_batch']}")
    once = int(fields["gbs"]) // (data * fsdp)
    megatron = fields["framework"] in ("NeMo/Megatron", "Megatron-Bridge")
    batched = named or not fields["per_gpu_batch"]
    micro_batch = int(named.group(1)) if named else 1
    return Configuration(
        data=data // expert,
        fsdp=fsdp,
        model=model,
        pipeline=pipeline,
        expert=expert,
        context=context,
        micro_batch=micro_batch if batched else max(once, 1),
        recompute=_recompute(fields),
        interleave=sizes["vp"],
        sequence_parallel=model > 1,
        experts_on_model=on_model,
        offload=_recipe(fields).offload,
        zero_stage=1 if megatron and fsdp == 1 else 0,
    )


def _cluster(fields: dict[str, str], chip: str) -> str:
    gpus = int(fields["gpus"])
    each = min(4 if chip.startswith("gb") else 8, gpus)
    network = "@1600" if chip.startswith("a100") and "1600 Gb/s" in fields["notes"] else ""
    said = [name for word, name in _NETWORKS.items() if word in fields["chip"]]
    network = f"@{said[0]}" if said else network
    return f"{chip}:{gpus // each}x{each}{network}"


def _fitted(fields: dict[str, str]) -> bool:
    """Return whether a row set a factor, or was looked at while one was chosen.

    That is all of a software but for: other sizes, hosts and fp8 of llm-foundry; fp8 of NeMo;
    meshes of torchtitan with tensor parallelism, but for the one that is asynchronous, in bf16;
    AxLearn; other rows of Megatron-Bridge than those
    of experts in containers from 26.06 on, those of Llama3-405B on GB200s, which set that chip's
    matmuls, and those that called for `Stack.tensor_exposed` (Llama3-70B on H100s),
    `Stack.expert_factor`, and `Stack.expert_launch_s` (Qwen3 30B-A3B on B200s).
    """
    framework, model = fields["framework"], fields["model"]
    bf16 = _DTYPES[fields["precision"].lower()] == "bf16"
    if framework in ("MaxText", "Pax"):
        return model in ("llama2-70b", "gpt3-5b (24 x 4096)")
    if framework == "NeMo/Megatron":
        return bf16 and fields["chip"] == "H100-SXM"
    if framework == "torchtitan":
        overlapped = "async TP" in fields["overlap"] and bf16
        return _500W in fields["chip"] and ("tp" not in fields["mesh"] or overlapped)
    if framework == "Megatron-Bridge":
        dense = model == "LLAMA3_70B" and fields["chip"] == "H100" and fields["gpus"] == "64"
        dense = dense or (model == "LLAMA3.1_405B" and fields["chip"] == "GB200")
        launches = model == "Qwen3_30B_a3B" and fields["chip"] == "B200"
        chip, dtype = _chip(fields), _DTYPES[fields["precision"].lower()]
        later = is_later(framework, _name(fields), chip, dtype, fields.get("date", ""))
        return dense or launches or later or (bf16 and model in ("GPT OSS 120B", "qwen3-30b-a3b"))
    foundry = framework.startswith("llm-foundry")
    return foundry and bf16 and model in ("mpt-1b", "mpt-3b", "mpt-7b")


def bands(steps: Iterable[Step]) -> dict[Kind, Band]:
    """Return the errors of the steps that had no part in a fit, by kind, and how many had one."""
    by_kind = defaultdict[Kind, list[Step]](list)
    for step in steps:
        by_kind[step.kind].append(step)
    found = dict[Kind, Band]()
    for kind, mine in sorted(by_kind.items()):
        off = [abs(step.ratio - 1) for step in mine if not step.fitted]
        mean, worst = (round(float(np.mean(off)), 3), round(max(off), 3)) if off else (0.0, 0.0)
        found[kind] = Band(len(off), mean, worst, len(mine) - len(off))
    return found


# -- tables ---------------------------------------------------------------------------------------


def by_kind(steps: Iterable[Step]) -> str:
    """Tabulate the errors by stack, chip and dtype, of steps without part in a fit, and others."""
    kinds = defaultdict[tuple[str, str, str], list[Step]](list)
    for step in steps:
        software, chip, dtype, experts = step.kind
        kinds[software, chip, dtype + (", experts" if experts else "")].append(step)
    rows = []
    for kind, mine in sorted(kinds.items()):
        rows.append((*kind, *_summary([s for s in mine if not s.fitted]), *_fit(mine)))
    unseen = [s for steps in kinds.values() for s in steps if not s.fitted]
    dense = [s for s in unseen if s.cluster.startswith(("h100", "a100")) and not s.model.experts]
    for name, chosen in (("H100 and A100, dense", dense), ("all", unseen)):
        rows.append((name, "", "", *_summary(chosen), "", ""))
    columns = ("stack", "chip", "matmuls", "held back", "mean", "worst", "mean ratio")
    columns += ("fitted", "mean")
    title = (
        "Published steps: |predicted / measured - 1| of rows without part in a fit, and of others"
    )
    return table(title, columns, rows, right=columns[3:], width=170)


def _summary(steps: list[Step]) -> tuple[str, ...]:
    if not steps:
        return "0", "", "", ""
    ratios = np.array([s.ratio for s in steps])
    off = abs(ratios - 1)
    return str(len(steps)), f"{off.mean():.1%}", f"{off.max():.1%}", f"{ratios.mean():.2f}"


def _fit(steps: list[Step]) -> tuple[str, str]:
    count, mean, *_ = _summary([s for s in steps if s.fitted])
    return count, mean


_COLUMNS = ("model", "cluster", "configuration", "matmuls", "sequence", "published s")
_COLUMNS += ("predicted s", "ratio", "source", "why: largest terms of the prediction")


def _cells(step: Step) -> tuple[str, ...]:
    shares = {name: term_s / step.terms.step_s for name, term_s in step.terms.by_term.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    why = ", ".join(f"{name} {shares[name]:.0%}" for name in largest if shares[name] > 0.02)
    source = step.source.split(" ")[0] + (" (fitted)" if step.fitted else "")
    return (
        step.model.name,
        step.cluster,
        str(step.configuration),
        step.stack.matmul_dtype,
        str(step.model.sequence),
        f"{step.measured_s:.3f}",
        f"{step.terms.step_s:.3f}",
        f"{step.ratio:.2f}",
        source,
        why,
    )


def every_step(steps: Iterable[Step]) -> str:
    """Tabulate each step: published and predicted seconds, ratio, source, and largest terms."""
    cells = [_cells(step) for step in steps]
    return table("Published steps, each", _COLUMNS, cells, right=_COLUMNS[4:8], width=260)


def page(path: Path = FILE) -> str:
    """Return each step of a file, and the rows that are none, as a page of Markdown."""
    steps, left_out = read(path)
    reasons = Counter(left_out.values())
    return "\n".join(
        (
            "# Published steps, each",
            "",
            "`python -m benchmarks.accuracy --page` makes this page of published steps; "
            "docs/accuracy.md says how it is done, and what was fitted. *(fitted)*: the step set a "
            "factor, or was looked at for one.",
            "",
            markdown(_COLUMNS, map(_cells, steps)),
            "",
            f"{len(left_out)} rows of the file are not described:",
            "",
            *(f"- {count}: {reason}" for reason, count in reasons.most_common()),
        )
    )


def report(path: Path) -> str:
    """Return each step of a file, the errors by kind, and the rows that are none, with reasons."""
    steps, left_out = read(path)
    reasons = "\n".join(f"  line {where}: {reason}" for where, reason in left_out.items())
    return f"{every_step(steps)}\n\n{by_kind(steps)}\n\nLeft out, {len(left_out)}:\n{reasons}"
