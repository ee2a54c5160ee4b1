"""The cost model of a cluster: from the package's tables of its chip, or from a file's."""

from __future__ import annotations

import os
from typing import TypeGuard

from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.adjusted_tables import cluster_here, with_memory_of, with_steps_matmuls
from jaxoverlap.cost.facts import MATMUL_SHARE, tables_from_facts
from jaxoverlap.cost.model import CostModel
from jaxoverlap.cost.tables import ChipTables
from jaxoverlap.hardware.cluster import Chip, Cluster, chips, cluster_from


def cost_model(
    cluster: Cluster | str | None = None,
    *,
    table: str | os.PathLike[str] | None = None,
    matmul_share: float | None = None,
    loops: bool = False,
) -> CostModel:
    """The cost model of a cluster, which gives the seconds of its kernels and collectives.

    Args:
        cluster: what `parse_cluster` takes or gives. May be left out where `table` is the work of
            `python -m jaxoverlap.calibrate --here` or `--from-profile`: then it is what that found.
        table: a file of tables to take in place of the package's, for the chip.
        matmul_share: price the chip by its data sheet instead, with matmuls at this share of the
            peak (`jaxoverlap.cost.facts`): for a chip that has no tables.
        loops: price matmuls as the package's tables were measured, in loops of nothing else, and
            not as they run in a step; not used with `table` or `matmul_share`.

    Raises:
        ValueError: for no cluster, `table` and `matmul_share` together, a share that is none, a
            cluster that does not parse, a chip without tables, or a file that is no table of it.
    """
    if table is not None and matmul_share is not None:
        raise ValueError(f"table={table} and matmul_share={matmul_share}: give one of these")
    tables = None if table is None else measured.read(table)
    if cluster is None and tables and tables.here:
        return CostModel(cluster_here(tables, tables.here), tables)
    if cluster is None:
        cluster = tables.profiled[0] if tables else ""
        if not cluster:
            raise ValueError(
                "no cluster: give one, or a table that was measured by --here or corrected by "
                "--from-profile"
            )
    cluster = cluster_from(cluster)
    if matmul_share is not None:
        return CostModel(cluster, tables_from_facts(cluster.chip, matmul_share))
    if tables is None:
        return CostModel(cluster, _packaged(cluster.chip, loops=loops))
    return CostModel(cluster, with_memory_of(cluster.chip, tables))


def _packaged(chip: Chip, *, loops: bool) -> ChipTables:
    """Return the package's tables for a chip, with matmuls as in a step or as in loops."""
    tables = measured.packaged(chip.name)
    if tables is None:
        known = ", ".join(c.name for c in chips() if measured.packaged(c.name))
        raise ValueError(
            f"no tables of {chip.name}: known are {known}; give table=, a file made by "
            "`python -m jaxoverlap.calibrate --here`, or matmul_share=, for its data sheet's rates"
        )
    tables = with_memory_of(chip, tables)
    return tables if loops else with_steps_matmuls(chip, tables)


def cost_or_data_sheet(cluster: Cluster) -> CostModel:
    """The cost model by the package's tables, or by the data sheet of a chip that has none."""
    return cost_model(cluster, matmul_share=None if has_packaged_tables(cluster) else MATMUL_SHARE)


def has_packaged_tables(cluster: Cluster) -> bool:
    """Return whether the package has tables of a cluster's chip."""
    return measured.packaged(cluster.chip.name) is not None


def cost_of(cluster: str | Cluster | CostModel) -> CostModel:
    """Return a cost model as it is, or that of a cluster; raises as `cost_model`."""
    return cluster if is_cost_model(cluster) else cost_model(cluster_from(cluster))


def is_cost_model(value: object) -> TypeGuard[CostModel]:
    """Return whether a value gives the seconds of a cluster's work, as a `CostModel` does."""
    return isinstance(getattr(value, "cluster", None), Cluster)
