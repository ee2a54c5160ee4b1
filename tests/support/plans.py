"""Plans, written by hand and drawn."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import strategies as st

from jaxoverlap.plan.decisions import Code, Reason
from jaxoverlap.plan.edits import (
    EditedMatmul,
    GatherAhead,
    MakeRing,
    Pin,
    ReadGathered,
    ScatterLookup,
    ShareViews,
    SplitBatch,
)
from jaxoverlap.plan.plan import (
    ChannelRow,
    Decision,
    MadeFor,
    Nccl,
    Plan,
    Predictions,
    Schedule,
    Skip,
    Variant,
)

QKV = Decision(
    site=3,
    ring=3,
    source="gpt.py:88",
    einsum="abc,cd->abd",
    kind="all_gather_matmul",
    axis="model",
    letter="b",
    num_chunks=8,
    bytes_moved=29_400_000,
    runs=4,
)


OUT = Decision(
    site=5,
    ring=5,
    source="gpt.py:97",
    einsum="abc,cd->abd",
    kind="matmul_reduce_scatter",
    axis="data",
    letter="d",
    num_chunks=2,
    bytes_moved=600_000,
    runs=1,
    variant=Variant("two_way", 2),
    others=("all_gather over model", "all_reduce over pod"),
    why="data moves most",
)


ODD = Skip(
    site=1,
    source="gpt.py:81",
    einsum="ab,bc->ac",
    runs=2,
    why=Reason("no ring", "dim s has size 30"),
)


IDLE = Skip(site=0, source="gpt.py:80", einsum="ab,bc->ac", runs=1, why=Reason("no collective"))


ALSO_IDLE = Skip(
    site=2, source="gpt.py:86", einsum="ab,cb->ac", runs=7, why=Reason("no collective")
)


OPAQUE = Skip(
    site=4, source="gpt.py:90", einsum="ab,bc->ac", runs=1, why=Reason("no collective", "auto")
)


PLAN = Plan(
    step="train_step",
    mesh={"data": 2, "model": 8},
    entries=(IDLE, ODD, ALSO_IDLE, QKV, OPAQUE, OUT),
)


_text = st.text(max_size=8)


_count = st.integers(0, 2**53)


_variants = st.one_of(
    st.builds(Variant, st.sampled_from(["one_way", "two_way", "direct"]), st.integers(1, 64)),
    st.builds(Variant, st.just("sliced"), st.integers(2, 64)),
)


_decisions = st.builds(
    Decision,
    site=_count,
    ring=_count,
    source=_text,
    einsum=_text,
    kind=_text,
    axis=_text,
    letter=_text,
    num_chunks=_count,
    bytes_moved=_count,
    runs=_count,
    variant=_variants,
    others=st.lists(_text, max_size=2).map(tuple),
    why=_text,
)


_skips = st.builds(
    Skip, site=_count, source=_text, einsum=_text, runs=_count, why=st.builds(Reason, st.sampled_from(get_args(Code)), _text)
)  # fmt: skip


_plans = st.builds(
    Plan,
    step=_text,
    mesh=st.dictionaries(_text, _count, max_size=3),
    entries=st.lists(_decisions | _skips, max_size=4).map(tuple),
)


MADE_FOR = MadeFor(
    step="5f" * 32,
    arguments=("float32[16@model, 32]", "float32[32, 64@model]"),
    results=("float32[16, 64], anywhere",),
    axis_types={"data": "Auto", "model": "Auto"},
    domains={"data": 2, "model": 1},
    devices="NVIDIA H100 80GB HBM3",
    cluster="h100-sxm:2x8",
    versions={"jaxoverlap": "0.1.0", "jax": "0.12.0", "jaxlib": "0.12.0"},
)


TUNED = msgspec.structs.replace(
    PLAN,
    edits=(
        Pin(site=0, spec=(("data",), ())),
        SplitBatch(site=3, operand=0, dim=0, parts=2, shards=2),
        ScatterLookup(
            number=0, updates=((), ()), out=(("model",), ()), scatters=((0, "model", 1),)
        ),
        MakeRing(kind="all_gather", axis="model", matmuls=(EditedMatmul(site=3),), keep=True),
        MakeRing(
            kind="reduce_scatter",
            axis="model",
            variant=Variant("two_way", 2),
            matmuls=(EditedMatmul(site=5, lhs=((), ("model",)), through=(2,)),),
        ),
        ReadGathered(matmul=EditedMatmul(site=4), rings=(3,)),
        GatherAhead(whole_layers=True),
        ShareViews(),
    ),
    schedule=Schedule(slack=0.05, in_flight=8),
    xla_options={"xla_gpu_enable_latency_hiding_scheduler": "True"},
    nccl=Nccl(
        env={"NCCL_MAX_NCHANNELS": "8"},
        channels=(
            ChannelRow(
                kind="all_gather",
                min_bytes=0,
                max_bytes=1 << 20,
                channels=4,
                chunk_bytes=None,
                nodes=2,
                ranks=16,
            ),
        ),
    ),
    predictions=Predictions(
        step_s=0.7575,
        compute_s=0.7022,
        communication_s=0.4501,
        exposed_s=0.0543,
        bound_s=0.7022,
        peak_bytes=8_300_000_000,
        plain_step_s=0.9073,
        plain_peak_bytes=9_100_000_000,
    ),
    made_for=MADE_FOR,
)
