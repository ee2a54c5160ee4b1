"""`jaxoverlap advise` prints constraints to paste."""

from __future__ import annotations

import pytest

from jaxoverlap.cli.advise import advice
from jaxoverlap.search.layouts import Layouts, PinnedResult
from tests.support.command import run
from tests.support.pods import needs_plugin

POD = ("--pod", "h100-sxm:1x8", "--mesh", "data=2,model=4")


def pin(site: int, *spec: tuple[str, ...], part="result", gain_s=None) -> PinnedResult:
    kind = f"bfloat16[{','.join('8' * len(spec))}]"
    return PinnedResult(
        site=site, source="gpt.py:88", type=kind, part=part, spec=spec, gain_s=gain_s
    )


def layouts(*pins: PinnedResult, peak_bytes: int = 10, **more) -> Layouts:
    return Layouts(
        pins=pins,
        plain_s=2.0,
        step_s=1.0,
        plain_peak_bytes=20,
        peak_bytes=peak_bytes,
        memory_bytes=100,
        questions=7,
        **more,
    )


def test_a_pin_is_a_line_to_paste_with_what_it_saves():
    text = "\n".join(advice(layouts(pin(0, ("fsdp", "tp"), (), ("cp",), gain_s=0.456))))
    assert "# gpt.py:88: the result of type bfloat16[8,8,8]: 456.0 ms less (estimated)" in text
    assert 'x, NamedSharding(mesh, P(("fsdp", "tp"), None, "cp")))' in text
    assert "1 result is pinned: 2000.0 ms -> 1000.0 ms (estimated" in text


def test_the_same_advice_is_given_once():
    again = (pin(n, ("tp",), (), part="operand") for n in range(3))
    lines = advice(layouts(*again))
    assert sum(line.startswith("x = ") for line in lines) == 1
    assert "# gpt.py:88: the operand of type bfloat16[8,8]" in lines


def test_axes_are_rules_with_examples():
    axes = {"tp": ("dim 1 of w['up']", "dim 0 of x")}
    assert "#   tp: dim 1 of w['up']; then dim 0 of x" in advice(layouts(pin(0, ()), axes=axes))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (layouts(), "XLA's layout stays: no other has a lower estimated time (7 layouts tried)."),
        (layouts(peak_bytes=300), "It may not fit: about 300 B of a device's 100 B."),
        (layouts(unnamed=("sort (gpt.py:9)",)), "No dim was followed through sort (gpt.py:9)."),
    ],
)
def test_what_no_constraint_helps_is_said(made: Layouts, said: str):
    assert said in advice(made)


@needs_plugin
@pytest.mark.pods
def test_advise_says_no_where_xla_lays_out_well():
    step = "tests.support.build_step"
    assert "XLA's layout stays" in run("advise", step, *POD, code=1)
