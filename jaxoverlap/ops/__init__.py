"""Operations that carry a sharding rule, and answer XLA's partitioner with a ring."""

from pathlib import Path

from jaxoverlap._jax.partitioned_call import not_the_users
from jaxoverlap.ops.einsum import dot_general, einsum, matmul
from jaxoverlap.plan.operations import decisions

__all__ = ["decisions", "dot_general", "einsum", "matmul"]

not_the_users(f"{Path(__file__).parent}/")
