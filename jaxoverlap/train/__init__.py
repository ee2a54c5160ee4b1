"""Train with less communication: algorithms that send less often than once a step.

It needs the extra `train`: `pip install '.[train]'` in the checkout.
"""

from jaxoverlap.train.elastic.elastic import Elastic, ElasticRound
from jaxoverlap.train.local_updates.algorithms import (
    bmuf,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from jaxoverlap.train.local_updates.co2 import co2
from jaxoverlap.train.local_updates.finite import NonFiniteRoundError
from jaxoverlap.train.local_updates.local_updates import LocalUpdates
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.state import LocalState

__all__ = [
    "Elastic",
    "ElasticRound",
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
