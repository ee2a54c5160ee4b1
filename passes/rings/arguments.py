"""Check the arguments of matmuls written by hand, to name mistakes before JAX meets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap._jax import fused_attention, jits
from jaxoverlap.passes.analysis.einsum import LETTERS
from jaxoverlap.passes.rings.gradients import RingMatmul
from jaxoverlap.passes.rings.ring_attention import Attention
from jaxoverlap.plan.plan import Variant


def matmul(
    x: Array,
    w: Array,
    axis_name: str,
    spec: str | None,
    variant: str | Variant,
    precision: Any,
    dtype: Any,
) -> RingMatmul:
    """Make the matmul of a spec; what moves is not known yet."""
    if spec is None:
        if x.ndim < 2 or w.ndim != 2:
            raise ValueError(
                f"x of shape {x.shape} and w of shape {w.shape}: without a spec expected x "
                "[..., rows, inner] and w [inner, columns]; give the spec of other matmuls"
            )
        letters = LETTERS[: x.ndim + 1]
        spec = f"{letters[:-1]},{letters[-2:]}->{letters[:-2]}{letters[-1]}"
    lhs, rhs, out = _letters(spec, x, w)
    for name, operand in (("x", x), ("w", w)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {operand.dtype}: expected a floating-point one")
    dtype = jnp.result_type(x, w) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"preferred_element_type {dtype} of floating-point operands: expected a floating-point "
            "one, as each chunk's sum would be rounded; convert the result"
        )
    size, sent = size_of(axis_name), variant_of(variant)
    return RingMatmul(lhs, rhs, out, "", "", axis_name, size, sent, precision, dtype)


def _letters(spec: str, x: Array, w: Array) -> tuple[str, str, str]:
    """Return the letters of x, w and y."""
    example = "expected two operands and a result, as in 'bsd,df->bsf'"
    operands, arrow, out = spec.replace(" ", "").partition("->")
    lhs, comma, rhs = operands.partition(",")
    sides = (lhs, rhs, out)
    if not arrow or not comma or not all(c in LETTERS for side in sides for c in side):
        raise ValueError(f"spec {spec!r}: {example}")
    for letter in sorted({*lhs, *rhs, *out}):
        held = [side.count(letter) for side in sides]
        if max(held) > 1 or sum(held) < 2:
            raise ValueError(
                f"spec {spec!r}: letter {letter} stands {'twice' if max(held) > 1 else 'alone'}; "
                "expected each once in two or in all three of both operands and the result"
            )
    for name, letters, operand in (("x", lhs, x), ("w", rhs, w)):
        if len(letters) != operand.ndim:
            raise ValueError(
                f"spec {spec!r}: {name} has {len(letters)} letters and {operand.ndim} dims "
                f"{operand.shape}; expected a letter for each"
            )
    return sides


def moving(
    how: RingMatmul,
    moved: str | None,
    name: str,
    letters: str,
    default: int,
    split: str | None = None,
    split_default: int | None = None,
) -> RingMatmul:
    """Set the letters that move, by name or as dims of the side that has `letters`."""

    def letter(given: str | None, name: str, default: int) -> str:
        if given is None and len(letters) >= -default:
            return letters[default]
        if given is None or len(given) != 1 or given not in letters:
            raise ValueError(
                f"{name}={given!r}: expected one of the letters {', '.join(letters)} of "
                f"{how.forward!r}"
            )
        return given

    moved = letter(moved, name, default)
    split = "" if split_default is None else letter(split, "split", split_default)
    if moved == split:
        raise ValueError(f"{name} and split are both {moved!r}: expected two different letters")
    return replace(how, moved=moved, split=split)


def variant_of(variant: str | Variant) -> Variant:
    """Return a variant, parsed if it is a text; a plain one is an error."""
    parsed = Variant.parse(variant) if isinstance(variant, str) else variant
    if parsed.style == "plain":
        raise ValueError("variant plain: expected a ring; a plain collective is jax.lax's own")
    return parsed


def size_of(axis_name: str) -> int:
    """Count the devices of a manual mesh axis."""
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"no manual mesh axis {axis_name!r} here: call this inside jax.shard_map, with the "
            "axis among its axis_names"
        ) from error


def check_sizes(
    how: RingMatmul, x: Array, w: Array, *, gathered: str = "", divided: str = ""
) -> None:
    """Check that sizes agree once x is gathered and split, and that the divided dim divides."""
    n = how.axis_size
    sizes = dict(zip(how.x, x.shape, strict=True))
    if gathered:
        sizes[gathered] *= n
    given = dict(zip(how.w, w.shape, strict=True))
    whole = given | sizes
    if divided and whole[divided] % n:
        raise ValueError(
            f"dim {divided} of {how.forward!r} has size {whole[divided]} on each device: expected "
            f"a multiple of the {n} devices of axis {how.axis!r}"
        )
    if gathered and divided:
        sizes[divided] //= n
    for letter in how.w:
        if letter in sizes and sizes[letter] != given[letter]:
            of = {gathered: f", gathered from {n} devices", divided: ", split"}.get(letter, "")
            raise ValueError(
                f"dim {letter} of {how.forward!r} has size {sizes[letter]} in x{of}, and "
                f"{given[letter]} in w: expected the same; x is {x.shape} and w {w.shape} here"
            )


def check_attention(how: Attention, q: Array, k: Array, v: Array) -> None:
    """Check the shapes and the variant of attention."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}: expected [batch, sequence/N, heads, head] each")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{shapes}: expected k and v alike, with q's batch and head sizes")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{shapes}: expected kv heads ({k.shape[2]}) to divide {q.shape[2]} heads")
    if how.causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"{shapes}: a causal mask wants as many keys as queries on a device")
    if how.variant.style == "sliced":
        raise ValueError(f"variant {how.variant}: expected one_way, two_way or direct")
    if how.kernel:
        _check_fused(how, q, k, v)


def with_kernel(how: Attention, implementation: str | None, balanced: bool) -> Attention:
    """Set what computes a block of attention: cuDNN's kernel, or, for None and "xla", matmuls."""
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation={implementation!r}: expected None, 'xla' or 'cudnn'")
    if implementation != "cudnn":
        return how
    balanced = balanced and how.causal and how.axis_size > 1
    return how._replace(kernel=fused_attention.CUDNN, balanced=balanced)


def _check_fused(how: Attention, q: Array, k: Array, v: Array) -> None:
    """Check what cuDNN's kernel wants, and its halves under a causal mask."""
    given = f"implementation='cudnn' with q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}"
    if why := fused_attention.refusal(q, k, v):
        raise ValueError(f"{given}: {why}; change that, or give implementation='xla'")
    if how.causal and how.variant.slices > 1:
        raise ValueError(f"{given}, variant {how.variant}: expected no slices with a causal mask")
    if how.balanced and q.shape[1] % 2:
        raise ValueError(
            f"{given}: expected an even sequence on each device, of which a causal ring exchanges "
            "halves; pad it, or give balanced=False"
        )
    mesh = jax.sharding.get_abstract_mesh()
    free = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
    if free:
        raise ValueError(
            f"{given} inside a shard_map with axes {', '.join(free)} not manual: XLA cannot "
            "partition cuDNN's kernel there; expected all axes among its axis_names"
        )


def check_projected(how: Attention, q: Array, k: Array, v: Array, wo: Array) -> None:
    """Check the shapes of attention whose heads are split, and of its projection."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, wo {wo.shape}"
    if not q.ndim == k.ndim == v.ndim == 4 or wo.ndim != 3:
        raise ValueError(
            f"{shapes}: expected q, k and v [batch, sequence, heads/N, head] and wo "
            "[heads/N, head, d]; reshape a wo [heads/N * head, d]"
        )
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{shapes}: expected k and v alike, with q's batch and head sizes")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{shapes}: expected kv heads ({k.shape[2]}) to divide {q.shape[2]} heads; where there "
            "are fewer kv heads than devices, give each device those that its heads read"
        )
    if wo.shape[:2] != q.shape[2:]:
        raise ValueError(
            f"{shapes}: expected wo to have q's heads and head size {q.shape[2:]}; give the rows "
            "of the projection that belong to this device's heads"
        )
    for name, operand in (("q", q), ("k", k), ("v", v), ("wo", wo)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {operand.dtype}: expected a floating-point one")
    if how.causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"{shapes}: a causal mask wants as many keys as queries; drop the mask")
    if q.shape[1] % how.axis_size:
        raise ValueError(
            f"{shapes}: expected a sequence that the {how.axis_size} devices of axis {how.axis!r} "
            f"divide, not {q.shape[1]}; pad it"
        )


def varying(axis_name: str, *arrays: Array) -> list[Array]:
    """Mark arrays as different on every device, as `shard_map(check_vma=True)` requires.

    The gradient of one that is the same on all devices is then summed, outside the ring.
    """
    axes = {axis_name}.union(*map(jits.varying_axes, arrays))
    same = [tuple(axes - jits.varying_axes(a)) for a in arrays]
    return [lax.pcast(a, on, to="varying") if on else a for a, on in zip(arrays, same, strict=True)]
