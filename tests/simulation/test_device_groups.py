"""Replica groups are read in every spelling of HLO, with the axes and domains that they join."""

from __future__ import annotations

import pytest

from jaxoverlap.simulation.device_groups import axes_of, domains, parties


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("{}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("{{0,3},{1,2},{4,7},{5,6}}", [(0, 3), (1, 2), (4, 7), (5, 6)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['x'=8] {'x':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh['x'=8] {'x':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_groups_in_every_spelling(groups: str, expected: list[tuple[int, ...]]):
    assert parties(groups, 8) == tuple(expected)


def test_groups_in_an_unknown_spelling():
    with pytest.raises(ValueError, match="groups in an unknown form: all of them"):
        parties("all of them", 8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[2,4]<=[8]", ("b",)),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("", ("a", "b")),
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("b",)),
        ("{{0,4},{4,0}}", ("a",)),
        ("{{0},{1}}", ()),
    ],
)
def test_the_axes_along_which_data_moves(groups: str, axes: tuple[str, ...]):
    assert axes_of(groups, 8, {"a": 2, "b": 4}) == axes


@pytest.mark.parametrize(
    ("groups", "per_domain", "expected"),
    [
        ("[2,4]<=[8]", 4, 1),
        ("[2,4]<=[8]", 8, 1),
        ("[2,4]<=[8]", 2, 2),
        ("[4,2]<=[2,4]T(1,0)", 4, 2),
        ("", 4, 2),
        ("", 1, 8),
        ("{{0,1},{1,2},{2,3},{3,4}}", 4, 2),  # one pair of a permute crosses
        ("{{0,1},{2,3,4}}", 4, 2),  # the worst group
    ],
)
def test_the_domains_that_a_group_spreads_over(groups: str, per_domain: int, expected: int):
    assert domains(groups, 8, per_domain) == expected
