"""Zeroth-order fine-tuning: forward passes alone, and nothing but scalars between devices."""

from jaxoverlap.train.zeroth_order.blocks import Blocks, Weighted
from jaxoverlap.train.zeroth_order.estimator import Mezo, MezoState, Pending, mezo
from jaxoverlap.train.zeroth_order.log import (
    Header,
    Log,
    LogDamagedError,
    digest,
    header_of,
    replay,
)
from jaxoverlap.train.zeroth_order.state import ZOState
from jaxoverlap.train.zeroth_order.step import NonFiniteLossError, ZOStep, step
from jaxoverlap.train.zeroth_order.subset import adapted, joined, lora, of_adapters, of_part, split

__all__ = [
    "Blocks",
    "Header",
    "Log",
    "LogDamagedError",
    "Mezo",
    "MezoState",
    "NonFiniteLossError",
    "Pending",
    "Weighted",
    "ZOState",
    "ZOStep",
    "adapted",
    "digest",
    "header_of",
    "joined",
    "lora",
    "mezo",
    "of_adapters",
    "of_part",
    "replay",
    "split",
    "step",
]
