"""Make tables of a chip's facts alone: peaks, links, and one share of each that is reached.

They price a chip that nobody measured, by the formulas of the measured tables: no factor over the
three rates of a matmul, and a ring's latency and bytes for a collective.
"""

from __future__ import annotations

from jaxoverlap._util.expect import expect
from jaxoverlap.cost.collective_tables import Collectives, Permutes
from jaxoverlap.cost.interpolation import Curve, FitError
from jaxoverlap.cost.tables import AttentionTable, ChipTables, MatmulTable, MemoryTable
from jaxoverlap.hardware.cluster import Chip, Link

MATMUL_SHARE = 0.5  # of the peak, an assumption: Frontier's runs reach 0.43, H100s 0.6 to 0.8
_MEMORY_SHARE = _LINK_SHARE = 0.8  # usual shares of a memory's and of a link's peak: assumptions
_LAUNCH_S = 3e-6  # as measured on all chips that have tables
_SIZES = (2, 4, 8, 16)  # devices of a group
_BYTES = tuple(float(1 << n) for n in range(0, 37, 2))
_DIMS = (1, 1 << 17)  # of a table of factors that are all one
_NO_ERROR = FitError(0, 0.0, 0.0, 0.0)


def tables_from_facts(chip: Chip, matmul_share: float = MATMUL_SHARE) -> ChipTables:
    """Return tables that price a chip by its data sheet.

    Args:
        chip: the chip.
        matmul_share: operations per second of matmuls and of attention, over the chip's peak.

    Raises:
        ValueError: for a share that is not above zero, or above one.
    """
    what = "a share above 0, at most 1"
    expect(0 < matmul_share <= 1, "matmul_share", matmul_share, what)
    source = f"no rows: {matmul_share:.3g} of the data sheet's peak"
    memory_rate = _MEMORY_SHARE * chip.memory_bandwidth_bytes_per_s
    flops_per_s, ones = matmul_share * chip.bf16_flops_per_s, (0.0,) * 8
    matmuls = MatmulTable(
        _LAUNCH_S, flops_per_s, memory_rate, 2.0, 2.0, _DIMS, _DIMS, _DIMS, ones, source, _NO_ERROR
    )
    attention = AttentionTable(
        _LAUNCH_S, flops_per_s, memory_rate, _DIMS, _DIMS, _DIMS, ones, source, _NO_ERROR
    )
    kinds = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
    curves = {
        kind: {size: _ring(chip.nvlink, passes * (size - 1)) for size in _SIZES}
        for kind, passes in kinds.items()
    }
    link_rate = _LINK_SHARE * chip.nvlink.bandwidth_bytes_per_s
    return ChipTables(
        chip=chip.name,
        date="",
        matmuls={"bf16": matmuls},
        memory=MemoryTable(_LAUNCH_S, memory_rate, source),
        collectives=Collectives(curves, source, _NO_ERROR, _NO_ERROR),
        permutes=Permutes(chip.nvlink.latency_s, 0.0, link_rate, source, None),
        channels=0,
        attention=attention,
    )


def _ring(link: Link, steps: int) -> Curve:
    """Return the seconds of a ring: each step waits for the link, and the bytes go at its rate."""
    rate = _LINK_SHARE * link.bandwidth_bytes_per_s
    return Curve(_BYTES, tuple(steps * link.latency_s + moved / rate for moved in _BYTES))
