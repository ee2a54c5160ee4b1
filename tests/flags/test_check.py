"""The check finds every flag that is dead in the installed compiler, and accuses no live one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.flags import DEAD, PRESETS, check
from jaxoverlap.flags.compiler import ask
from jaxoverlap.flags.extract import flags_in, variables_in

# AxLearn gives these to all its GPU jobs (axlearn/cloud/gcp/jobset_utils.py); none is dead.
LIVE = [
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_gpu_enable_all_gather_combine_by_dim=false",
    "--xla_gpu_enable_reduce_scatter_combine_by_dim=false",
    "--xla_disable_hlo_passes=rematerialization",
]


def statuses(text: str) -> dict[str, str]:
    return {f.text: f.status for f in check(text)}


# -- dead flags -------------------------------------------------------------------------------------


def test_every_planted_dead_flag_is_found_and_nothing_else():
    assert len(DEAD) >= 12
    planted = [f"--{name}={'0' if name.endswith('level') else 'true'}" for name in DEAD]
    mixed = [flag for pair in zip(LIVE * 2, planted, strict=False) for flag in pair]
    assert set(planted) <= set(mixed)
    dead = {f.text for f in check(" ".join(mixed)) if f.dead}
    assert dead == set(planted)


def test_a_dead_flag_says_until_when_and_what_instead():
    (finding,) = check("--xla_gpu_graph_level=0")
    assert finding.status == "rejected"
    assert "last seen in jaxlib 0.6.2" in finding.note
    assert "xla_gpu_enable_command_buffer" in finding.note


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("xla_gpu_enable_latency_hiding_schedular", "xla_gpu_enable_latency_hiding_scheduler"),
        ("xla_gpu_autotune_lvl", "xla_gpu_autotune_level"),
    ],
)
def test_an_unknown_flag_is_told_the_near_one_whether_that_is_set_or_not(typed, meant):
    (finding,) = check(f"--{typed}=1")
    assert finding.status == "rejected" and f"did you mean {meant}" in finding.note


def test_our_own_presets_do_what_they_say():
    # "default" where a version has by itself what a preset wants
    lines = dict.fromkeys(p.xla_flags for p in PRESETS.values())
    assert {f.status for f in check(" ".join(lines))} <= {"set", "default"}


# -- each of the others -----------------------------------------------------------------------------


BECOMES = {
    "--xla_gpu_enable_triton_gemm=false": "set",
    "--xla_gpu_enable_triton_gemm=true": "default",
    "--xla_gpu_enable_triton_gemm": "default",
    "--xla_gpu_enable_while_loop_double_buffering": "set",
    "--xla_gpu_enable_pipelined_all_gather=true": "renamed",
    "--xla_gpu_enable_pipelined_all_gather=false": "renamed",
    "--xla_gpu_enable_cudnn_fmha=true": "ignored",
    "--xla_gpu_enable_cudnn_fmha=false": "ignored",
    "--xla_cpu_use_thunk_runtime=true": "ignored",
    "--xla_gpu_no_such_flag=1": "rejected",
    "--xla_gpu_no_such_flag": "rejected",
    "--xla_gpu_no_such_flag=$N": "rejected",
    "--xla_gpu_all_gather_combine_threshold_bytes=many": "bad value",
    "--xla_gpu_all_gather_combine_threshold_bytes=$N": "set",  # as far as anyone can tell
    "--xla_gpu_collective_permute_mode=COLLECTIVES_PEER_MEMORY": "bad value",
    "--xla_gpu_collective_permute_mode=peer": "set",
    "--xla_gpu_enable_command_buffer=''": "set",
    '--xla_gpu_enable_command_buffer=""': "set",
    "--xla_gpu_analytical_latency_estimator_options=gpus_per_node=4": "set",
    "--xla_dump_to=/tmp/nowhere": "set",
}


def test_the_compiler_says_what_becomes_of_a_flag():
    assert statuses(" ".join(BECOMES)) == BECOMES


def test_notes_say_what_to_write():
    notes = {f.text: f.note for f in check(
        "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_colective_permute_mode=peer "
        "--xla_gpu_collective_permute_mode=COLLECTIVES_PEER_MEMORY"
    )}  # fmt: skip
    assert list(notes.values()) == [
        "sets xla_gpu_pipeline_all_gather",
        "did you mean xla_gpu_collective_permute_mode?",
        "XLA_FLAGS take private, peer, symmetric",
    ]


def test_what_stands_after_a_word_that_is_no_flag_is_lost():
    line = "--xla_gpu_enable_triton_gemm=false true --xla_gpu_nccl_p2p_max_nchannels=4"
    (alone, whole) = ask(["--xla_gpu_enable_triton_gemm=false", line])
    assert whole.fields == alone.fields  # the compiler says so, and nothing of it
    assert statuses(line) == {
        "--xla_gpu_enable_triton_gemm=false": "set",
        "--xla_gpu_nccl_p2p_max_nchannels=4": "ignored",
        "true": "ignored",
    }


@pytest.mark.parametrize("text", ["", "latency hiding", "/no/such/file.sh"])
def test_no_flags_is_a_mistake(text: str):
    with pytest.raises(ValueError, match="no flags in"):
        check(text)


# -- scripts ----------------------------------------------------------------------------------------

SHELL = """
# export XLA_FLAGS="--xla_gpu_in_a_comment=1"
export NCCL_MIN_CHANNELS=12   # NCCL_PROTO=LL
export NCCL_PROTO="Simple"
export XLA_FLAGS="--xla_dump_to=$OUT/dumps/
 --xla_gpu_enable_triton_gemm=false --xla_gpu_enable_command_buffer='' \\
 --xla_gpu_graph_level=0"
"""
YAML = """
envs:
- name: NCCL_PROTO
  value: "Simple"
- name: XLA_FLAGS
  value: >-
    --xla_gpu_enable_triton_gemm=false
    --xla_gpu_enable_command_buffer=""
    --xla_gpu_graph_level=0
"""
PYTHON = """
os.environ["NCCL_PROTO"] = "Simple"
env = {"NCCL_ALGO": "Ring"}
flags = [
    # "--xla_gpu_in_a_comment=1",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
    "--xla_gpu_graph_level=0",
]
"""


def test_a_shell_script_is_read():
    assert [(g.name, g.value) for g in flags_in(SHELL)] == [
        ("xla_dump_to", None),
        ("xla_gpu_enable_triton_gemm", "false"),
        ("xla_gpu_enable_command_buffer", ""),
        ("xla_gpu_graph_level", "0"),
    ]
    assert {g.name: g.value for g in variables_in(SHELL)} == {
        "NCCL_MIN_CHANNELS": "12",
        "NCCL_PROTO": "Simple",
    }


def test_yaml_and_python_are_read():
    assert [g.value for g in flags_in(YAML)] == ["false", "", "0"]
    assert [g.value for g in flags_in(PYTHON)] == ["false", "FUSION,CUSTOM_CALL", "0"]
    assert [(g.name, g.value) for g in variables_in(YAML)] == [("NCCL_PROTO", "Simple")]
    got = {g.name: g.value for g in variables_in(PYTHON)}
    assert got == {"NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring"}


def test_a_file_is_checked_variables_too(tmp_path):
    (tmp_path / "run.sh").write_text(SHELL)
    findings = check(str(tmp_path / "run.sh"))
    assert [f.text for f in findings if f.dead] == ["--xla_gpu_graph_level=0"]
    (unread,) = [f for f in findings if f.status == "unread"]
    assert unread.text == "NCCL_MIN_CHANNELS"
    assert "did you mean NCCL_MIN_NCHANNELS?" in unread.note


WORDS = st.text("abz09_", min_size=1, max_size=8)
VALUES = st.none() | st.text("aZ09_/:-", max_size=6)


@settings(max_examples=50)
@given(st.lists(st.tuples(WORDS, VALUES), min_size=1, max_size=5, unique_by=lambda p: p[0]))
def test_flags_come_out_as_they_went_in(pairs):
    flags = [f"--xla_{n}" if v is None else f"--xla_{n}={v}" for n, v in pairs]
    listed, line = "\n".join(f'    "{f}",' for f in flags), " ".join(flags)
    for text in (
        line,
        listed,
        f"XLA_FLAGS='{line}'",
        f"flags: {' '.join(f'`{f}`' for f in flags)}",
    ):
        assert [(g.name, g.value) for g in flags_in(text)] == [(f"xla_{n}", v) for n, v in pairs]
