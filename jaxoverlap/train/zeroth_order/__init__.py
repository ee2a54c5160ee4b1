"""Zeroth-order fine-tuning: forward passes alone, and nothing but scalars between devices."""

from jaxoverlap.train.zeroth_order.blocks import Blocks
from jaxoverlap.train.zeroth_order.estimator import Mezo, MezoState, Pending, mezo
from jaxoverlap.train.zeroth_order.state import ZOState
from jaxoverlap.train.zeroth_order.step import NonFiniteLossError, ZOStep, step

__all__ = [
    "Blocks",
    "Mezo",
    "MezoState",
    "NonFiniteLossError",
    "Pending",
    "ZOState",
    "ZOStep",
    "mezo",
    "step",
]
