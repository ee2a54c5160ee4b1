"""The CSV is read by a reader that does what NCCL's example tuner plugin does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.flags import VARIABLES
from jaxoverlap.flags.nccl_tuner import ChannelRow, tuner_csv, variables

MIB = 1 << 20
OWN = 24
PLUGIN_LINE = 256  # MAX_LINE_LENGTH: a longer line is read as two


def asked(csv: str, kind: str, size: int, nodes: int, ranks: int) -> tuple[str, str, int]:
    """Do pluginGetCollInfo: take the first row that fits; one channel if none does, or for -1."""
    for line in csv.splitlines():
        assert len(line) + 1 < PLUGIN_LINE
        if line.startswith("#") or not line:
            continue
        fields = line.split(",")
        assert len(fields) == 10
        name, least, most, algorithm, protocol = fields[:5]
        assert algorithm in ("ring", "tree", "nvls") and protocol in ("simple", "ll128", "ll")
        count, n, r, pipe, registered = map(int, fields[5:])
        assert (pipe, registered) == (-1, -1)
        fits = int(least) <= size <= int(most) and n in (-1, nodes) and r in (-1, ranks)
        if name == kind and fits:
            return algorithm, protocol, count if count != -1 else 1
    return "", "", 1


def channels_of(csv: str, kind: str, size: int, nodes: int, ranks: int) -> int:
    """Do ncclGetAlgoInfo: a tuner's 0 channels mean OWN, NCCL's number."""
    return asked(csv, kind, size, nodes, ranks)[2] or OWN


ROWS = (
    ChannelRow(kind="all_gather", min_bytes=0, max_bytes=MIB - 1, channels=2, nodes=1, ranks=8),
    ChannelRow(
        kind="all_gather", min_bytes=MIB, max_bytes=1 << 40, channels=4, chunk_bytes=684 * 1024
    ),
    ChannelRow(kind="reduce_scatter", min_bytes=0, max_bytes=1 << 40, channels=8, algorithm="nvls"),
    ChannelRow(kind="collective_permute", min_bytes=0, max_bytes=1 << 40, channels=6),
    ChannelRow(kind="all_to_all", min_bytes=0, max_bytes=1 << 40, channels=3),
)


def test_each_collective_gets_its_rows_channels():
    csv = tuner_csv(ROWS)
    assert channels_of(csv, "allgather", 100, 1, 8) == 2
    assert channels_of(csv, "allgather", 100, 2, 8) == OWN  # another communicator
    assert channels_of(csv, "allgather", MIB, 4, 32) == 4
    assert channels_of(csv, "reducescatter", 5, 1, 8) == 8


@pytest.mark.parametrize("kind", ["allgather", "allreduce", "reducescatter", "broadcast", "reduce"])
def test_no_collective_is_left_with_one_channel(kind: str):
    assert channels_of(tuner_csv(()), kind, 2**62, 9, 72) == OWN


def test_what_no_row_is_for_is_a_ring_of_nccls_own_channels():
    csv = tuner_csv(ROWS)
    assert asked(csv, "allreduce", 4, 1, 8) == ("ring", "ll", 0)
    assert asked(csv, "allreduce", MIB, 1, 8) == ("ring", "simple", 0)


def test_a_row_can_leave_the_channels_to_nccl():
    csv = tuner_csv((row(channels=None, algorithm="nvls"),))
    assert asked(csv, "allgather", 9, 1, 8) == ("nvls", "simple", 0)


def test_sends_and_chunks_are_comments():
    csv = tuner_csv(ROWS)
    assert "# collective_permute, 6 channels: NCCL's tuner does not set sends" in csv
    assert "# chunks of 700416 bytes: not this file's to set" in csv
    rows = [line for line in csv.splitlines() if not line.startswith("#")]
    assert rows[0] == "allgather,0,1048575,ring,simple,2,1,8,-1,-1"
    assert len(rows) == 3 + 2 * 5


def test_chunks_are_half_a_buffer():
    assert variables(ROWS) == {"NCCL_BUFFSIZE": str(2 * 684 * 1024)}
    assert set(variables(ROWS)) <= set(VARIABLES)
    default = ChannelRow(
        kind="all_gather", min_bytes=0, max_bytes=9, channels=1, chunk_bytes=2 * MIB
    )
    assert variables((default,))["NCCL_BUFFSIZE"] == VARIABLES["NCCL_BUFFSIZE"].default
    assert variables(ROWS[2:]) == {}
    with pytest.raises(ValueError, match="chunks of 700416, 2097152 bytes"):
        variables((ROWS[1], default))


def row(**changes) -> ChannelRow:
    return ChannelRow(
        **{"kind": "all_gather", "min_bytes": 0, "max_bytes": 9, "channels": 2} | changes
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "allgather"}, "kind 'allgather'"),
        ({"min_bytes": 10}, "10 to 9 bytes"),
        ({"channels": 0}, "0 channels"),
        ({"channels": 65}, "65 channels: NCCL has 1 to 64"),
        ({"ranks": 0}, "ranks=0"),
        ({"algorithm": "Ring"}, "'Ring' over 'simple'"),
    ],
)
def test_rows_that_are_none(changes, says: str):
    with pytest.raises(ValueError, match=says):
        row(**changes)


def test_rows_may_not_hold_for_the_same():
    with pytest.raises(ValueError, match="two entries for all_gather of 5 bytes"):
        tuner_csv((row(), row(min_bytes=5, max_bytes=20, ranks=8)))
    tuner_csv((row(nodes=1), row(nodes=2), row(kind="all_reduce")))


CUTS = st.lists(st.integers(1, 2**40), min_size=1, max_size=6, unique=True).map(sorted)


@given(CUTS, st.data())
def test_every_size_gets_the_channels_of_its_range(cuts, data):
    edges = [0, *cuts]
    rows = [
        row(min_bytes=low, max_bytes=high - 1, channels=i + 1)
        for i, (low, high) in enumerate(zip(edges, cuts, strict=False))
    ]
    csv = tuner_csv(data.draw(st.permutations(rows)))
    size = data.draw(st.integers(0, 2 * cuts[-1]))
    wanted = next((r.channels for r in rows if r.min_bytes <= size <= r.max_bytes), OWN)
    assert channels_of(csv, "allgather", size, 3, 24) == wanted
