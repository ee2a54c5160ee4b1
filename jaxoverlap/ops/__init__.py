"""Operations that carry a sharding rule, and answer XLA's partitioner with a ring."""

from pathlib import Path

from jaxoverlap._jax.operations.lowering import not_the_users
from jaxoverlap.ops.attention import attention
from jaxoverlap.ops.cross_entropy import softmax_cross_entropy_with_integer_labels
from jaxoverlap.ops.einsum import dot_general, einsum, matmul
from jaxoverlap.ops.partition import compiler_options
from jaxoverlap.ops.per_sequence import per_sequence
from jaxoverlap.plan.operations import decisions

__all__ = [
    "attention",
    "compiler_options",
    "decisions",
    "dot_general",
    "einsum",
    "matmul",
    "per_sequence",
    "softmax_cross_entropy_with_integer_labels",
]

not_the_users(f"{Path(__file__).parent}/")
