"""Gradient compression, at a rate chosen for each layer by its error.

from jaxoverlap.train import compression

sync = compression.lgreco(compression.power_sgd(rank=4), every=500)
step = compression.data_parallel(loss_and_grads, optimizer, mesh, axis="data", sync=sync)
"""

from jaxoverlap.train.compression.compressors.compressor import Averaged, Compressor, none
from jaxoverlap.train.compression.compressors.power_sgd import power_sgd
from jaxoverlap.train.compression.compressors.qsgd import qsgd
from jaxoverlap.train.compression.compressors.top_k import top_k
from jaxoverlap.train.compression.data_parallel import DataParallel, data_parallel
from jaxoverlap.train.compression.programme import solve
from jaxoverlap.train.compression.state import NonFiniteGradientError, SyncState, TrainState
from jaxoverlap.train.compression.sync import Sync, accordion, lgreco, uniform
from jaxoverlap.train.compression.transform import transform

__all__ = [
    "Averaged",
    "Compressor",
    "DataParallel",
    "NonFiniteGradientError",
    "Sync",
    "SyncState",
    "TrainState",
    "accordion",
    "data_parallel",
    "lgreco",
    "none",
    "power_sgd",
    "qsgd",
    "solve",
    "top_k",
    "transform",
    "uniform",
]
