"""Train with less communication: algorithms that send less often than once a step.

The extra `train` brings what this room needs beside the package: `pip install 'jaxoverlap[train]'`.
"""

from jaxoverlap.train.local_updates.algorithms import (
    bmuf,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from jaxoverlap.train.local_updates.finite import NonFiniteRoundError
from jaxoverlap.train.local_updates.local_updates import LocalUpdates
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.state import LocalState

__all__ = [
    "LocalState",
    "LocalUpdates",
    "NonFiniteRoundError",
    "Outer",
    "bmuf",
    "co2",
    "diloco",
    "eager_diloco",
    "local_sgd",
    "overlap_local_sgd",
    "slowmo",
    "streaming_diloco",
]
