"""Collectives stay out of CUDA graphs, whatever XLA_FLAGS say."""

from __future__ import annotations

import pytest

from jaxoverlap.flags.graphs import OPTION, without_collectives

BESIDE = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("FUSION,COLLECTIVES,CUBLAS", "FUSION,CUBLAS"),
        ("+collectives", BESIDE),
        ("+COLLECTIVES,+WHILE,-CUDNN", BESIDE.replace("CUDNN,", "") + ",WHILE"),
        ("COLLECTIVES", ""),
    ],
)
def test_collectives_are_taken_out(monkeypatch, value, kept):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --{OPTION}={value}")
    assert without_collectives() == {OPTION: kept}


@pytest.mark.parametrize(
    "flags", ["", "--xla_a=1", f"--{OPTION}=", f"--{OPTION}=FUSION,CUBLAS", f"--{OPTION}=-CUDNN"]
)
def test_what_has_none_stays_as_the_user_has_it(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert without_collectives() == {}


def test_of_two_the_last_counts(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{OPTION}=COLLECTIVES --{OPTION}=FUSION")
    assert without_collectives() == {}
