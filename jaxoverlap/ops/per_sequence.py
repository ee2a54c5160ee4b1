"""Say of a function that it computes each sequence of a batch alone, so that it can be split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from jaxoverlap._jax import compat
from jaxoverlap._jax.operations import lowering
from jaxoverlap._util.expect import expect, is_integer
from jaxoverlap.passes.analysis.sequence_call import SEQUENCE_CALL, SequenceCall


def per_sequence[F: Callable[..., Any]](
    fn: F, *, argnums: int | Sequence[int] = 0, dim: int = 0
) -> F:
    """State that a function computes each sequence of its batch without the others.

        experts = jaxoverlap.per_sequence(jax.shard_map(experts, ...))
        y = experts(x, router, gate, up, down)     # x, y: [batch, sequence, width]

    `jaxoverlap.overlap` may then call it once for each half of the batch, so that what one half
    exchanges travels under the other half's matmuls. It cannot see this by itself where tokens
    are sorted, sent to the devices of their experts, and sorted back. A mixture of experts
    computes each token alone if its buffers have room for all tokens that can come; one that drops
    tokens which find no room does not.

    The function is rematerialized: only its arguments are kept for its gradient, as with
    `jax.checkpoint`. It has reverse mode only. Without `overlap` it computes what it always does.

    Args:
        fn: a function of arrays or pytrees of arrays, all of them positional, that works for any
            size of the batch that its `shard_map` divides.
        argnums: the numbers of the arguments that have the batch.
        dim: the batch dim of these arguments' and of all results' leaves. Other arguments, such as
            weights, are the same for all sequences.

    Raises:
        ValueError: when it is called: if a leaf has no such dim, if batch sizes differ, or if `fn`
            reads arrays that are not among its arguments.
    """
    expect(callable(fn), "fn", fn, "a function of arrays")
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    what = "the numbers of the arguments that have the batch, as in argnums=(0, 1)"
    expect(all(type(n) is int for n in numbers), "argnums", argnums, what)
    expect(is_integer(dim), "dim", dim, "the number of the batch's dim, counted from 0")

    @functools.wraps(fn)
    def called(*args: Any) -> Any:
        _check(numbers, len(args))
        leaves, tree = jax.tree.flatten(args)
        dims = [
            dim if number in numbers else None
            for number, arg in enumerate(args)
            for _ in jax.tree.leaves(arg)
        ]
        size = _batch(leaves, dims)
        out = jax.eval_shape(fn, *args)
        results, out_tree = jax.tree.flatten(out)
        if _batch(results, [dim] * len(results)) != size:
            raise ValueError(
                f"per_sequence: the results of {_name(fn)} have another batch size than its "
                f"arguments, {size}, in dim {dim}: {[r.shape for r in results]}; return what "
                "each sequence has, and add up over the batch outside"
            )
        forward = _Forward(fn, tree)
        call = SequenceCall(forward, tuple(dims), (dim,) * len(results))
        return jax.tree.unflatten(out_tree, _apply(call, *leaves))

    return called  # pyright: ignore[reportReturnType] # wraps keeps the signature


def _check(numbers: Sequence[int], count: int) -> None:
    if not numbers or any(isinstance(n, bool) or not 0 <= n < count for n in numbers):
        raise ValueError(
            f"per_sequence: argnums {tuple(numbers)} of a call with {count} positional arguments; "
            "give the numbers of those that have the batch, counted from 0"
        )


def _batch(leaves: Sequence[Any], dims: Sequence[int | None]) -> int:
    """Return the size of the batch that some leaves have."""
    sizes = {}
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is not None:
            shape = np.shape(leaf)
            sizes[shape] = shape[dim] if 0 <= dim < len(shape) else None
    found = set(sizes.values())
    if len(found) != 1 or None in found:
        raise ValueError(
            f"per_sequence: dim {max((d for d in dims if d is not None), default=0)} is to be the "
            f"batch of every array there, of one size, and shapes are {sorted(sizes)}; name the "
            "arguments that have the batch in argnums, and its dim in dim"
        )
    (size,) = found
    return int(size or 0)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


# -- the function and its gradient, of flat arguments ---------------------------------------------


class _Forward:
    """A function of flat arguments; two of one function and tree are equal."""

    def __init__(self, fn: Callable[..., Any], tree: Any):
        self.key = fn, tree

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.key))

    def __call__(self, *leaves: Any) -> list[Any]:
        fn, tree = self.key
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))


class _Backward(_Forward):
    """Its gradient: of its arguments, and of the gradients of its results."""

    def __call__(self, *leaves: Any) -> list[Any]:
        count = self.key[1].num_leaves
        primals, to_results = leaves[:count], leaves[count:]
        moving = [n for n, leaf in enumerate(primals) if _differentiable(leaf)]

        def of_moving(*some: Any) -> list[Any]:
            every = list(primals)
            for n, value in zip(moving, some, strict=True):
                every[n] = value
            return _Forward.__call__(self, *every)

        _, pull = jax.vjp(of_moving, *(primals[n] for n in moving))
        return list(pull(list(to_results)))


def _differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(call: SequenceCall, *leaves: Any) -> list[Any]:
    return _bind(call, leaves)


def _forward(call: SequenceCall, *leaves: Any) -> tuple[list[Any], tuple[Any, ...]]:
    return _bind(call, leaves), leaves


def _backward(call: SequenceCall, leaves: tuple[Any, ...], to_results: Any) -> tuple[Any, ...]:
    moving = [n for n, leaf in enumerate(leaves) if _differentiable(leaf)]
    back = SequenceCall(
        _Backward(*call.fn.key),  # pyright: ignore[reportFunctionMemberAccess] # a _Forward
        (*call.operands, *call.results),
        tuple(call.operands[n] for n in moving),
    )
    made = dict(zip(moving, _bind(back, (*leaves, *to_results)), strict=True))
    return tuple(made.get(n) for n in range(len(leaves)))


_apply.defvjp(_forward, _backward)


# -- the primitive --------------------------------------------------------------------------------


def _bind(call: SequenceCall, operands: Sequence[Any]) -> list[Any]:
    types = tuple(map(jax.typeof, operands))
    return sequence_call_p.bind(*operands, call=call, jaxpr=call.jaxpr(operands), types=types)


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, call: Any, **_: Any) -> Any:
    """Under `vmap` it is the plain function."""
    results = jax.vmap(call.fn, in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


def _evaluated(*operands: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return compat.evaluate(jaxpr, operands)


sequence_call_p = lowering.primitive(SEQUENCE_CALL)
sequence_call_p.def_impl(_evaluated)
sequence_call_p.def_abstract_eval(lambda *avals, jaxpr, **_: list(jaxpr.out_avals))
mlir.register_lowering(sequence_call_p, mlir.lower_fun(_evaluated, multiple_results=True))
batching.primitive_batchers[sequence_call_p] = _batched
