"""Write each collective's channels as a file for NCCL's tuner plugin.

NCCL calls a tuner plugin, for each collective, for algorithm, protocol and channels. Its example of
one reads them from a file: CSV, of which the first row that fits is taken (NVIDIA/nccl@5067397c,
2.30.7, plugins/tuner/example/plugin.c). To a collective that no row fits the plugin gives one
channel, and likewise to one whose row says -1, which its README calls NCCL's choice; 0 is NCCL's
choice, as it goes through the plugin and NCCL takes it for not set (src/enqueue.cc,
ncclGetAlgoInfo). It is not called for sends and receives, as permutes and exchanges are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from jaxoverlap.plan.channel_row import SENDS, TUNED, ChannelRow


def tuner_csv(rows: Sequence[ChannelRow]) -> str:
    """Return the file for NCCL's example tuner plugin (NCCL_TUNER_CONFIG_FILE).

    Rows of permutes and exchanges are comments in it. All that no row is for has NCCL's own number
    of channels. The plugin cannot leave NCCL the algorithm and the protocol as well; those are
    rings, by LL up to 64 KiB and by Simple above.

    Args:
        rows: in any order.

    Raises:
        ValueError: if two rows hold for one collective of one communicator.
    """
    _check_apart(rows)
    lines = [_HEADER, *(line for row in rows for line in _lines(row)), _OTHERS, *_others()]
    return "\n".join(lines) + "\n"


_HEADER = (
    "# colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
)
_OTHERS = "# all others: as many channels as NCCL gives them"
_NO_LIMIT = 2**63 - 1  # the plugin reads bytes with strtoull
# By NCCL's tuning model (nccl.py) LL is sooner up to here on any ring, also one of two GPUs.
_LL_BYTES = 64 * 1024


def _others() -> list[str]:
    kinds = [*map(_plugins_name, TUNED), "broadcast", "reduce"]
    small = [_line(kind, 0, _LL_BYTES, "ring", "ll", None, None, None) for kind in kinds]
    return small + [_line(kind, 0, _NO_LIMIT, "ring", "simple", None, None, None) for kind in kinds]


def _plugins_name(kind: str) -> str:
    return kind.replace("_", "")


def _lines(row: ChannelRow) -> list[str]:
    if row.kind in SENDS:
        return [f"# {row.kind}, {row.channels} channels: NCCL's tuner does not set sends"]
    chunks = f"# chunks of {row.chunk_bytes} bytes: not this file's to set"
    sizes, how = (row.min_bytes, row.max_bytes), (row.algorithm, row.protocol)
    line = _line(_plugins_name(row.kind), *sizes, *how, row.channels, row.nodes, row.ranks)
    return [line] if row.chunk_bytes is None else [chunks, line]


def _line(
    kind: str,
    least: int,
    most: int,
    algorithm: str,
    protocol: str,
    channels: int | None,
    nodes: int | None,
    ranks: int | None,
) -> str:
    """Return one row of the file; -1 matches any number of nodes, ranks, pipe ops and buffers."""
    where = (-1 if nodes is None else nodes, -1 if ranks is None else ranks, -1, -1)
    return ",".join(map(str, (kind, least, most, algorithm, protocol, channels or 0, *where)))


def variables(rows: Sequence[ChannelRow]) -> dict[str, str]:
    """Return NCCL_BUFFSIZE for the entries' chunk size; empty if no entry has one.

    In NCCL a chunk of the Simple protocol is half a channel's buffer (src/include/collectives.h:
    half of the buffer's eight steps); the default of 4 MiB makes chunks of 2 MiB.

    Raises:
        ValueError: if they want different chunks: NCCL has one buffer size for all.
    """
    chunks = {r.chunk_bytes for r in rows if r.kind in TUNED and r.chunk_bytes is not None}
    if len(chunks) > 1:
        raise ValueError(
            f"chunks of {', '.join(map(str, sorted(chunks)))} bytes: NCCL_BUFFSIZE holds "
            "for all collectives; give them one chunk_bytes, or None"
        )
    return {"NCCL_BUFFSIZE": str(2 * chunks.pop())} if chunks else {}


def _check_apart(rows: Sequence[ChannelRow]) -> None:
    for a, b in combinations(rows, 2):
        same = all(
            x is None or y is None or x == y for x, y in ((a.nodes, b.nodes), (a.ranks, b.ranks))
        )
        overlap = a.min_bytes <= b.max_bytes and b.min_bytes <= a.max_bytes
        if a.kind == b.kind and same and overlap:
            raise ValueError(
                f"two entries for {a.kind} of {max(a.min_bytes, b.min_bytes)} bytes: the plugin "
                "would take the first; make their sizes, nodes or ranks differ"
            )
