"""A dataclass states its limits in its fields' types; what breaks one is named, in words."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
import pytest

import jaxoverlap
from jaxoverlap._util.limits import AtLeast1, checked, number


@dataclass(frozen=True)
@checked
class Limited:
    rank: AtLeast1
    share: Annotated[float, partial(number, above=0, most=1)] = 1.0
    method: Literal["qr", "svd"] = "qr"
    warm: bool = True
    heads: AtLeast1 | None = None
    free: float | None = None

    def __post_init__(self) -> None:
        assert type(self.rank) is int  # fields are checked before


def test_what_is_given_becomes_pythons_own_type():
    made = Limited(np.int64(2), np.float32(0.5), warm=np.bool_(False))  # type: ignore[arg-type]
    assert (type(made.rank), type(made.share), made.warm) == (int, float, False)
    assert made.heads is None and Limited(2, heads=3).heads == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    (
        (dict(rank=0), "rank=0: expected a whole number, 1 or more"),
        (dict(rank=True), "rank=True: expected a whole number"),
        (dict(share=2), "share=2: expected a finite number above 0 and at most 1"),
        (dict(method="lu"), "method='lu': expected 'qr' or 'svd'"),
        (dict(warm=1), "warm=1: expected True or False"),
        (dict(heads=0), "heads=0: expected a whole number, 1 or more"),
    ),
)
def test_a_wrong_one_is_named(wrong, says):
    with pytest.raises(ValueError, match=says):
        Limited(**{"rank": 1, **wrong})


CLUSTER = jaxoverlap.parse_cluster("h100-sxm:2x8")
MADE = [
    CLUSTER,
    CLUSTER.chip,
    CLUSTER.network,
    jaxoverlap.Configuration(),
    jaxoverlap.Scheduler(),
    jaxoverlap.Transformer(name="small", layers=2, hidden=64, heads=4, sequence=64, vocab=64),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("wrong", ["x", [], -1.5, None], ids=repr)
def test_a_public_dataclass_names_a_field_of_a_wrong_type(made, wrong):
    """Configuration(data="x") was a TypeError of Python's; text and None suit some fields."""
    for field in dataclasses.fields(made):
        kind = str(field.type)
        suits = (wrong is None and "None" in kind) or (wrong == "x" and kind == "str")
        if not suits:
            with pytest.raises(ValueError, match=rf"{field.name}="):
                dataclasses.replace(made, **{field.name: wrong})
