"""jaxoverlap.ring's matmuls and gradients are right, with the axis automatic around or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import ring
from tests.support.engine import AXIS, assert_close, equations, exact, normal, per_device

N = 4
SIZES = {"b": 2, "s": 8 * N, "d": 4 * N, "f": 4 * N, "h": 2 * N, "e": 3}
# A row has the function, its options, the spec of x and w, and the letters of which a device has
# only a part in x, in w and in y. Each device has an x and a w of its own.
ROWS = [
    ("all_gather_matmul", {}, "sd,df->sf", ("s", "", "")),
    ("all_gather_matmul", {"gather": "s"}, "bsd,dhe->bshe", ("s", "", "")),
    ("all_gather_matmul", {"gather": "d"}, "df,bsd->bsf", ("d", "", "")),
    ("matmul_reduce_scatter", {}, "sf,fd->sd", ("", "", "s")),
    ("matmul_reduce_scatter", {"scatter": "d"}, "bsf,bsd->fd", ("", "", "d")),
    ("matmul_all_reduce", {}, "sf,fd->sd", ("", "", "")),
    ("matmul_all_reduce", {"chunk": "f"}, "bsd,df->bsf", ("", "", "")),
    ("all_to_all_matmul", {}, "sd,df->sf", ("d", "", "s")),
    ("all_to_all_matmul", {"gather": "h", "split": "s"}, "bshd,hde->bse", ("h", "", "s")),
    ("all_to_all_matmul", {"gather": "s", "split": "d"}, "bsd,df->bsf", ("s", "d", "")),
    ("matmul_all_to_all", {}, "sd,df->sf", ("s", "", "f")),
    ("matmul_all_to_all", {"gather": "s", "split": "h"}, "bsd,dhe->bshe", ("s", "", "h")),
]


def plain(name: str, options: dict, spec: str, x, w):
    """Compute the same with JAX's own collectives and matmul."""
    lhs, _, out = spec.replace("->", ",").split(",")
    if name == "all_gather_matmul":
        dim = lhs.index(options.get("gather", lhs[-2]))
        return jnp.einsum(spec, lax.all_gather(x, AXIS, axis=dim, tiled=True), w)
    if name == "all_to_all_matmul":
        gather, split = options.get("gather", lhs[-1]), options.get("split", lhs[-2])
        x = lax.all_to_all(x, AXIS, lhs.index(split), lhs.index(gather), tiled=True)
        return jnp.einsum(spec, x, w)
    y = jnp.einsum(spec, x, w)
    if name == "matmul_all_reduce":
        return lax.psum(y, AXIS)
    if name == "matmul_reduce_scatter":
        dim = out.index(options.get("scatter", out[-2]))
        return lax.psum_scatter(y, AXIS, scatter_dimension=dim, tiled=True)
    gather, split = options.get("gather", out[-2]), options.get("split", out[-1])
    return lax.all_to_all(y, AXIS, out.index(split), out.index(gather), tiled=True)


def part(letters: str, held: str) -> tuple[int, ...]:
    return tuple(SIZES[c] // (N if c in held else 1) for c in letters)


def variants(name: str) -> list[str]:
    return ["direct", "sliced x 2"] if "all_to_all" in name else ["one_way", "two_way x 2"]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]} {r[2]}")
def test_numbers_and_gradients(row):
    name, options, spec, held = row
    lhs, rhs, out = spec.replace("->", ",").split(",")
    x, w, cotangent = (
        normal(N, *part(letters, h), seed=i).astype(np.float64)
        for i, (letters, h) in enumerate(zip((lhs, rhs, out), held, strict=True))
    )
    named = {} if not options else {"spec": spec}  # without options: x @ w

    def body(x, w, cotangent):
        def both(f):
            y, transpose = jax.vjp(f, x, w)
            return (y, *transpose(cotangent.astype(y.dtype)))

        function = getattr(ring, name)
        mine = [
            both(lambda x, w, v=v: function(x, w, AXIS, variant=v, **named, **options))
            for v in variants(name)
        ]
        return both(lambda x, w: plain(name, options, spec, x, w)), mine

    with jax.enable_x64(True):
        wanted, _ = per_device(N, body, x, w, cotangent)
    wanted = [np.asarray(a) for a in wanted]
    _, by_variant = per_device(N, body, *(a.astype(np.float32) for a in (x, w, cotangent)))
    for got in by_variant:
        for g, exactly in zip(got, wanted, strict=True):
            assert g.dtype == np.float32
            assert_close(g, exactly)


def test_gradients_are_rings():
    """A scatter's gradient gathers dy once, for both operands; a gather's has a ring for each."""
    x, w = normal(N, 8, 8), normal(N, 8, 8)

    def hops(function):
        def body(x, w):
            y, transpose = jax.vjp(lambda x, w: function(x, w, AXIS), x, w)
            return transpose(y)

        mesh = Mesh(np.array(jax.devices()[:N]), (AXIS,))
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        jaxpr = jax.make_jaxpr(mapped)(x.reshape(-1, 8), w.reshape(-1, 8)).jaxpr
        return [e.primitive.name for e in equations(jaxpr)].count("ppermute")

    assert hops(ring.matmul_reduce_scatter) == 2 * (N - 1)
    assert hops(ring.all_gather_matmul) == 3 * (N - 1)
    assert hops(ring.matmul_all_to_all) == 2 * (N - 1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_with_a_replicated_weight(check_vma: bool):
    """An operand that is the same on all devices gets the sum of their gradients, either way."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, N), ("data", AXIS))
    x, w = normal(2, 8 * N, 6), normal(6, 5, seed=1)

    def layer(x, w):
        return ring.all_gather_matmul(x, w, AXIS, spec="bsd,df->bsf", gather="s")

    def loss(x, w):
        y = jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(P("data", AXIS), P()),
            out_specs=P("data", None, AXIS),  # each device's whole result, side by side
            check_vma=check_vma,
        )(x, w)
        return (y**2).sum() / N, y

    grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)
    expected = exact("bsd,df->bsf", x, w)
    assert_close(y, np.concatenate([expected] * N, 2))
    assert_close(grads[0], 2 * exact("bsf,df->bsd", expected, w))
    assert_close(grads[1], 2 * exact("bsf,bsd->df", expected, x))


def test_precision_and_dtype_are_the_einsums():
    def body(x, w):
        f = ring.all_gather_matmul
        return f(x, w, AXIS, precision="highest", preferred_element_type=jnp.float32)

    x, w = normal(N, 2, 8, dtype=jnp.bfloat16), normal(N, 8, 8, dtype=jnp.bfloat16)
    got = per_device(N, body, x, w)
    assert got.dtype == jnp.float32
    for device in range(N):
        assert_close(got[device], exact("sd,df->sf", x.reshape(-1, 8), w[device]))


X, W = np.ones((N, 8, 8), np.float32), np.ones((N, 8, 8), np.float32)
MISTAKES = {
    r"spec 'sd\.df': expected two operands": {"spec": "sd.df"},
    r"letter f stands alone.*in two or in all three": {"spec": "sd,df->s"},
    r"letter d stands twice": {"spec": "dd,df->df"},
    r"x has 3 letters and 2 dims \(8, 8\)": {"spec": "bsd,df->bsf"},
    r"gather='f': expected one of the letters s, d": {"spec": "sd,df->sf", "gather": "f"},
    r"dim d.*size 32 in x, gathered from 4 devices, and 8 in w": {"spec": "sd,df->sf", "gather": "d"},
    r"variant 'round': expected a style \(one_way": {"variant": "round"},
    r"size 8 does not divide into 1 chunks of 3 pieces": {"variant": "one_way x 3"},
}  # fmt: skip


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes(problem: str):
    with pytest.raises(ValueError, match=problem):
        per_device(N, lambda x, w: ring.all_gather_matmul(x, w, AXIS, **MISTAKES[problem]), X, W)


def test_mistakes_of_other_functions():
    def fails(function, problem, x=X, w=W, **options):
        with pytest.raises(ValueError, match=problem):
            per_device(N, lambda x, w: function(x, w, AXIS, **options), x, w)

    odd = np.ones((N, 6, 8), np.float32)
    fails(ring.matmul_reduce_scatter, "dim . of .* size 6 .* multiple of the 4 devices", x=odd)
    fails(ring.matmul_all_reduce, "chunk='z'", chunk="z")
    fails(ring.all_to_all_matmul, "gather and split are both 's'", spec="sd,df->sf", gather="s", split="s")  # fmt: skip
    fails(ring.all_to_all_matmul, "an exchange has no ring", w=np.ones((N, 32, 8), np.float32), variant="one_way")  # fmt: skip
    fails(ring.matmul_all_to_all, "x has dtype int32", x=X.astype(np.int32))
    fails(ring.all_gather_matmul, "without a spec expected", w=np.ones((N, 8), np.float32))


def test_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"no manual mesh axis 'x' here: call this inside"):
        ring.all_gather_matmul(X[0], W[0], AXIS)


def test_it_is_exported():
    assert jaxoverlap.ring is ring
    assert jaxoverlap.Variant.parse("two_way x 2") == jaxoverlap.Variant("two_way", 2)
