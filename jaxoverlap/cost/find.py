"""The cost model of a cluster: from the package's tables of its chip, or from a file's."""

from __future__ import annotations

import os

from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.adjusted_tables import cluster_here, with_memory_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster, chips, parse_cluster


def cost_model(
    cluster: Cluster | str | None = None, *, table: str | os.PathLike[str] | None = None
) -> CostModel:
    """The cost model of a cluster, with the package's tables of its chip or with a file's.

    Args:
        cluster: what `parse_cluster` takes or gives. May be left out where `table` is the work of
            `python -m jaxoverlap.calibrate --here` or `--from-profile`: then it is what that found.
        table: a file of tables to take in place of the package's.

    Raises:
        ValueError: for a cluster that does not parse, a chip that has no tables, or a file that is
            no table of this chip.
    """
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
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    tables = tables or measured.packaged(cluster.chip.name)
    if tables is None:
        known = ", ".join(c.name for c in chips() if measured.packaged(c.name))
        raise ValueError(
            f"no tables of {cluster.chip.name}: known are {known}; give table=, a file made by "
            "`python -m jaxoverlap.calibrate --here`"
        )
    return CostModel(cluster, with_memory_of(cluster.chip, tables))


def has_cost_model(cluster: Cluster) -> bool:
    """Return whether the package has tables of a cluster's chip."""
    return measured.packaged(cluster.chip.name) is not None
