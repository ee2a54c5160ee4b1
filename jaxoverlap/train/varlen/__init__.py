"""Train on sequences of variable length without the wait: Zeppelin (arXiv 2509.21841).

costs = varlen.attention_costs("h100-sxm:2x8", heads=32, head_size=128)
planner = varlen.Planner(costs, "h100-sxm:2x8", capacity=10240)
planner.fit(sample)                                      # chooses at most five programs
step = varlen.train_step(model, optimizer, mesh, costs=costs)
plan = planner(lengths)                                  # prints and draws itself
state, metrics = step(state, plan, {"inputs": inputs, "targets": targets})
"""

from jaxoverlap.train.varlen.arrays import PlanArrays
from jaxoverlap.train.varlen.attend import attention
from jaxoverlap.train.varlen.costs import AttentionCosts, attention_costs
from jaxoverlap.train.varlen.finite import NonFiniteStepError
from jaxoverlap.train.varlen.plan import BatchPlan
from jaxoverlap.train.varlen.planner import Planner
from jaxoverlap.train.varlen.rings import Bounds, Nodes
from jaxoverlap.train.varlen.sharing import Infeasible
from jaxoverlap.train.varlen.step import VarlenStep, train_step

__all__ = [
    "AttentionCosts",
    "BatchPlan",
    "Bounds",
    "Infeasible",
    "Nodes",
    "NonFiniteStepError",
    "PlanArrays",
    "Planner",
    "VarlenStep",
    "attention",
    "attention_costs",
    "train_step",
]
