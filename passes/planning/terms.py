"""The terms by which all matmuls of a step are decided on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.requests import Requests


@dataclass(frozen=True)
class Terms:
    """The facts and requests that all decisions on a step go by.

    Attributes:
        axis_sizes: devices along each mesh axis.
        requests: the requests for single matmuls.
        costs: the cost of a byte along each mesh axis, from `topology.axis_costs`; 1 by default.
        prices: the prices of rings on the cluster, if that is known.
        prefetch: whether the weights of a scan are gathered before any ring.
        rings: whether matmuls may become rings; if not, `prefetch` is all that is done.
        lookups: whether the gradients of lookups may be scattered.
        explicit: the mesh's axes whose shardings are a part of types.
        unread: why none of the shardings could be read; None if they could.
    """

    axis_sizes: Mapping[str, int]
    requests: Requests = field(default_factory=Requests)
    costs: Mapping[str, float] = field(default_factory=dict)
    prices: RingCosts | None = None
    prefetch: bool = False
    rings: bool = True
    lookups: bool = True
    explicit: Sequence[str] = ()
    unread: str | None = None
