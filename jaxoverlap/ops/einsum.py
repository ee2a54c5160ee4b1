"""Matmuls that answer XLA's partitioner with a ring: `dot_general`, `einsum` and `matmul`.

    y = jaxoverlap.einsum("bsd,df->bsf", x, w)
    q, k, v = jaxoverlap.einsum("bsd,dnh->bsnh", x, (wq, wk, wv))     # x is gathered once
    nnx.Linear(4096, 16384, dot_general=jaxoverlap.dot_general, rngs=rngs)

They compute what `jax.lax.dot_general`, `jax.numpy.einsum` and `jax.numpy.matmul` do, inside `jit`
on a mesh of automatic axes; their gradients of any order, batches and transposes are operations of
the same kind. Where there is no such mesh (eager calls, one device, explicit axes, the body of a
`shard_map`, `jax.export`) they are those functions.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from jaxoverlap.ops.primitive import bind, numbers_of
from jaxoverlap.passes.analysis.matmul_group import Product


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Compute `jax.lax.dot_general`, with a ring where the operands' shardings imply a collective.

    Give it to a layer that takes a `dot_general`: `nnx.Linear(..., dot_general=)`, `linen.Dense`,
    `MultiHeadAttention(qkv_dot_general=, out_dot_general=)`.

    Args:
        lhs, rhs: the operands.
        dimension_numbers: ((lhs, rhs) contracted dims, (lhs, rhs) batch dims).
        precision, preferred_element_type: as in `jax.lax.dot_general`.
        out_sharding: as there; with one the operation is that function.

    Returns:
        The batch dims, then lhs's free dims, then rhs's.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if out_sharding is not None or stays_plain(lhs, rhs):
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
    product = _product(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    return bind([[product]], lhs, rhs)[0]


@overload
def einsum(
    spec: str,
    x: ArrayLike,
    w: Sequence[ArrayLike],
    /,
    *,
    optimize: Any = ...,
    precision: Any = ...,
    preferred_element_type: Any = ...,
    out_sharding: Any = ...,
) -> tuple[Array, ...]: ...
@overload
def einsum(
    spec: str,
    /,
    *operands: ArrayLike,
    optimize: Any = ...,
    precision: Any = ...,
    preferred_element_type: Any = ...,
    out_sharding: Any = ...,
) -> Array: ...
@overload
def einsum(
    x: Array | np.ndarray,
    /,
    *operands: Any,
    optimize: Any = ...,
    precision: Any = ...,
    preferred_element_type: Any = ...,
    out_sharding: Any = ...,
) -> Any: ...
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array | tuple[Array, ...]:
    """Compute `jax.numpy.einsum`, with a ring where the operands' shardings imply a collective.

    | spec | x | right sides | result |
    | --- | --- | --- | --- |
    | "bsd,df->bsf" | [b, s, d] | w: [d, f] | [b, s, f] |
    | "bsd,dnh->bsnh" | [b, s, d] | (wq, wk, wv): [d, n, h] each | three of [b, s, n, h] |

    Args:
        subscripts: as in `jax.numpy.einsum`: a text, or the first operand of the interleaved form,
            `einsum(x, [0, 1], w, [1, 2], [0, 2])`.
        operands: the operands, in the interleaved form each with its labels. A tuple or list in
            place of the second of two is several right sides of one left side: that is gathered
            once for all of them, as is what their gradients share, and the gradients that they send
            back travel as one sum.
        optimize: the order in which three or more operands are contracted, as there.
        precision, preferred_element_type: as there.
        out_sharding: as there; with one the operation is that function.

    Raises:
        ValueError: if the spec does not fit the operands.
    """
    spec, operands = (
        (subscripts, operands)
        if isinstance(subscripts, str)
        else _from_interleaved((subscripts, *operands))
    )
    several = len(operands) == 2 and isinstance(operands[1], list | tuple)
    rights = [jnp.asarray(w) for w in operands[1]] if several else []
    given = [jnp.asarray(x) for x in ((operands[0], *rights) if several else operands)]
    plain = out_sharding is not None or stays_plain(*given)
    letters = None if plain else _letters(spec, given)
    if several and not rights:
        raise ValueError(f"einsum {spec!r}: expected one right side or more, got none")
    if letters is None:
        usual = functools.partial(
            jnp.einsum,
            spec,
            optimize=optimize,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            _dot_general=lax.dot_general if plain else dot_general,
        )
        return tuple(usual(given[0], w) for w in rights) if several else usual(*given)
    lhs, rhs, out = letters
    if optimize != "auto":  # two operands are contracted in one order; what is none is an error
        jnp.einsum_path(spec, *given[:2], optimize=optimize)
    for w in given[1:]:
        _check_sizes(spec, lhs, given[0], rhs, w)
    numbers, made = numbers_of(lhs, rhs, out)
    swapped, made_swapped = numbers_of(rhs, lhs, out)
    transposed = made != out and made_swapped == out
    products = []
    for number, w in enumerate(given[1:], 1):
        pair = (w, given[0], swapped) if transposed else (given[0], w, numbers)
        product = _product(*pair, precision, preferred_element_type or jnp.result_type(*pair[:2]))
        left, right = (number, 0) if transposed else (0, number)
        products.append([replace(product, lhs=left, rhs=right)])
    order = tuple((made_swapped if transposed else made).index(c) for c in out)
    results = tuple(lax.transpose(y, order) for y in bind(products, *given))
    return results if several else results[0]


def matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Compute `x @ w`, with a ring where the operands' shardings imply a collective.

    Args:
        x: [..., rows, inner], or [inner].
        w: [..., inner, columns], or [inner].
        precision, preferred_element_type, out_sharding: as in `jax.numpy.matmul`.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if out_sharding is not None or stays_plain(x, w) or not x.ndim or not w.ndim:
        return jnp.matmul(x, w, out_sharding=out_sharding, **options)
    result = jax.eval_shape(functools.partial(jnp.matmul, **options), x, w)  # raises as `x @ w`
    batch = string.ascii_letters[3 : 3 + max(x.ndim, w.ndim, 2) - 2]
    x, lhs = _batch_dims(x, batch)
    w, rhs = _batch_dims(w, batch)
    out = "".join(c for c in batch if c in lhs + rhs)
    rows, columns = "a" * (x.ndim > len(lhs) + 1), "c" * (w.ndim > len(rhs) + 1)
    spec = f"{lhs}{rows}b,{rhs}b{columns}->{out}{rows}{columns}"
    return einsum(spec, x, w, **options).reshape(result.shape)


def _batch_dims(array: Array, batch: str) -> tuple[Array, str]:
    """Leave out an operand's batch dims of size 1, which are broadcast; return the others' names.

    Args:
        array: the operand.
        batch: the names of all batch dims; an operand has the last of them.
    """
    dims = max(array.ndim - 2, 0)
    names = batch[len(batch) - dims :]
    ones = [d for d in range(dims) if array.shape[d] == 1]
    return array.squeeze(ones), "".join(c for d, c in enumerate(names) if d not in ones)


def stays_plain(*operands: Array) -> bool:
    """Return whether an operation stays plain, as in manual code and on explicit axes."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in operands]
    return any(
        kind != AxisType.Auto for mesh in meshes if not mesh.empty for kind in mesh.axis_types
    )


def _product(
    lhs: Array, rhs: Array, numbers: Any, precision: Any, preferred_element_type: Any
) -> Product:
    """Make a matmul of two operands as `lax.dot_general` reads its arguments here and now."""
    traced = jax.make_jaxpr(
        lambda a, b: lax.dot_general(a, b, numbers, precision, preferred_element_type)
    )(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs)))
    (eqn,) = traced.eqns
    dims = tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"])
    made: Any = traced.out_avals[0]
    return Product(0, 1, dims, eqn.params["precision"], made.dtype)


def _from_interleaved(given: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the spec and the operands of `einsum`'s interleaved form.

    Args:
        given: operands, each followed by its labels; the labels of the result may follow.
    """
    operands, labels = tuple(given[0 : len(given) // 2 * 2 : 2]), list(given[1::2])
    labels += [given[-1]] if len(given) % 2 else []
    labels = [side.tolist() if isinstance(side, np.ndarray) else side for side in labels]
    if not operands or not all(map(_are_labels, labels)):
        raise ValueError(
            "einsum without a spec: expected operands that are each followed by a list of labels, "
            "as in einsum(x, [0, 1], w, [1, 2], [0, 2])"
        )
    known = sorted({label for side in labels for label in side if label is not Ellipsis})
    if len(known) > len(string.ascii_letters):
        raise ValueError(f"einsum of {len(known)} labels: expected {len(string.ascii_letters)}")
    names = dict(zip(known, sorted(string.ascii_letters), strict=False)) | {Ellipsis: "..."}
    sides = ["".join(names[label] for label in side) for side in labels]
    out = f"->{sides.pop()}" if len(given) % 2 else ""
    return ",".join(sides) + out, operands


def _are_labels(side: Any) -> bool:
    """Return whether an argument of the interleaved form names the dims of an operand."""
    return isinstance(side, Sequence) and all(
        isinstance(label, int | str) or label is Ellipsis for label in side
    )


def _letters(spec: str, operands: Sequence[Array]) -> tuple[str, str, str] | None:
    """Return the letters of a matmul of two operands; None for any other einsum.

    An ellipsis becomes letters of its own.
    """
    lhs, comma, rest = spec.replace(" ", "").partition(",")
    rhs, arrow, out = rest.partition("->")
    if not comma or not arrow or "," in rhs:
        return None
    if "..." in spec:
        sides = _without_ellipsis((lhs, rhs, out), operands)
        if sides is None:
            return None
        lhs, rhs, out = sides
    ndims = {(x.ndim, w.ndim) for x in operands[:1] for w in operands[1:]}
    fits = {(len(lhs), len(rhs))} == ndims and (lhs + rhs + out).isalpha()
    once = all(len(set(side)) == len(side) for side in (lhs, rhs, out))
    known = set(out) <= set(lhs) | set(rhs) and (set(lhs) ^ set(rhs)) <= set(out)
    if not (fits and once and known) or _broadcast(lhs, rhs, operands):
        return None
    return lhs, rhs, out


def _broadcast(lhs: str, rhs: str, operands: Sequence[Array]) -> bool:
    """Return whether a letter has size 1 in one operand alone, where it is then repeated."""
    sizes = dict(zip(lhs, operands[0].shape, strict=True))
    return any(
        1 in (size, sizes.get(letter, size)) and size != sizes.get(letter, size)
        for w in operands[1:]
        for letter, size in zip(rhs, w.shape, strict=True)
    )


def _without_ellipsis(
    sides: tuple[str, str, str], operands: Sequence[Array]
) -> tuple[str, str, str] | None:
    """Give the dims of an ellipsis that one operand has letters; None where both have some."""
    fresh = [c for c in string.ascii_letters if not any(c in side for side in sides)]
    hidden = [
        x.ndim - len(side.replace("...", "")) if "..." in side else 0
        for side, x in zip(sides, operands, strict=False)
    ]
    if min(hidden) < 0 or all(hidden) or len({x.ndim for x in operands[1:]}) > 1:
        return None
    letters = "".join(fresh[: max(hidden)])
    lhs, rhs, out = (
        side.replace("...", letters if n else "")
        for side, n in zip(sides, (*hidden, 1), strict=True)
    )
    return lhs, rhs, out


def _check_sizes(spec: str, lhs: str, x: Array, rhs: str, w: Array) -> None:
    """Check that the dims of one letter have one size."""
    sizes = dict(zip(lhs, x.shape, strict=True))
    for letter, size in zip(rhs, w.shape, strict=True):
        if sizes.get(letter, size) != size:
            raise ValueError(
                f"einsum {spec!r}: letter {letter} has size {sizes[letter]} in {x.shape} and "
                f"{size} in {w.shape}; expected the same"
            )
