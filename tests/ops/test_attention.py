"""Ring attention and the vocabulary-parallel cross-entropy, by their rules."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, Skip
from jaxoverlap._jax import fused_attention
from tests.support.attention import stand_in, stand_in_backward
from tests.support.pods import needs_plugin

operation = importlib.import_module("jaxoverlap.ops.attention")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def array(mesh: Mesh, spec: P, *shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(
            x, y, rtol=tolerance, atol=tolerance * max(np.abs(y).max(), 1e-3)
        )


def losses(fn: Any) -> Any:
    return jax.value_and_grad(
        lambda *qkv: jnp.mean(jnp.sin(fn(*qkv).astype(jnp.float32))), (0, 1, 2)
    )


def on_host(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), tree)


PLACES = {  # of q, and of k and v
    "sequence": (P("data", "model"), P("data", "model")),
    "sequence over two": (P(None, ("data", "model")), P(None, ("data", "model"))),
    "queries alone": (P("data", "model"), P("data")),
    "keys alone": (P("data"), P("data", "model")),
    "heads": (P("data", None, "model"), P("data", None, "model")),
    "head size": (P("data", None, None, "model"), P("data", None, None, "model")),
    "sequence and heads": (P(None, "model", "data"), P(None, "model", "data")),
    "nothing": (P(), P()),
}


@pytest.mark.parametrize("position", PLACES)
def test_attention_is_jaxs(mesh: Mesh, position: str):
    number = list(PLACES).index(position)
    causal, kv_heads = number % 2 == 0, (8, 4)[number // 2 % 2]
    q_at, k_at = PLACES[position]
    q = array(mesh, q_at, 4, 32, 8, 16)
    k, v = (array(mesh, k_at, 4, 32, kv_heads, 16, seed=s) for s in (1, 2))
    step = jax.jit(losses(lambda *qkv: jaxoverlap.attention(*qkv, is_causal=causal)))
    compiled = step.lower(q, k, v).compile()
    forward, backward = jaxoverlap.decisions(compiled)
    ringed = position in ("sequence", "sequence and heads")
    assert isinstance(forward, Decision if ringed else Skip)
    assert isinstance(backward, Decision if ringed else Skip)
    plain = losses(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal))
    close(compiled(q, k, v), jax.jit(plain)(*on_host((q, k, v))), 1e-4)


def test_attention_moves_what_its_decision_says(mesh: Mesh):
    at = P("data", "model")
    qkv = [array(mesh, at, 4, 32, 8, 16, seed=s) for s in range(3)]
    compiled = jax.jit(losses(jaxoverlap.attention)).lower(*qkv).compile()
    report = jaxoverlap.audit(compiled)
    assert {c.kind for c in report.collectives if c.kind != "all-reduce"} == {"collective-permute"}
    said = sum(d.bytes_moved for d in jaxoverlap.decisions(compiled) if isinstance(d, Decision))
    assert sum(c.bytes_moved for c in report.collectives if c.ring) == said


def test_attention_in_scan_vmap_remat_and_twice(mesh: Mesh):
    q, k, v = (array(mesh, P(None, "data", "model"), 3, 4, 32, 8, 16, seed=s) for s in range(3))

    def of(attend: Any) -> Any:
        def scanned(q: Any, k: Any, v: Any) -> Any:
            def body(x: Any, qkv: Any) -> Any:
                return x + attend(*qkv), None

            return jax.lax.scan(jax.checkpoint(body), jnp.zeros_like(q[0]), (q, k, v))[0]

        return losses(scanned), losses(jax.vmap(attend))

    ours, theirs = of(jaxoverlap.attention), of(jax.nn.dot_product_attention)
    for mine, plain in zip(ours, theirs, strict=True):
        close(jax.jit(mine)(q, k, v), jax.jit(plain)(*on_host((q, k, v))), 1e-4)

    def twice(attend: Any) -> Any:
        loss = losses(attend)
        return jax.grad(lambda *qkv: sum(jnp.sum(g**2) for g in loss(*qkv)[1]), (0, 1, 2))

    one = q[0], k[0], v[0]
    mine, plain = twice(jaxoverlap.attention), twice(jax.nn.dot_product_attention)
    close(jax.jit(mine)(*one), jax.jit(plain)(*on_host(one)), 1e-3)


def test_attention_with_other_arguments_is_jaxs(mesh: Mesh):
    q, k, v = (array(mesh, P("data", "model"), 4, 32, 8, 16, seed=s) for s in range(3))
    mask = jnp.tril(jnp.ones((1, 1, 32, 32), bool))
    close(
        jaxoverlap.attention(q, k, v, mask=mask), jax.nn.dot_product_attention(q, k, v, mask=mask)
    )
    out, residual = jaxoverlap.attention(q, k, v, return_residual=True)
    assert residual.shape == (4, 32, 8)
    assert out.shape == q.shape
    close(jaxoverlap.attention(q[0], k[0], v[0]), jax.nn.dot_product_attention(q[0], k[0], v[0]))


def test_attention_takes_and_refuses_what_jaxs_does(mesh: Mesh):
    q, k, v = (array(mesh, P("data", "model"), 4, 32, 8, 16, seed=s) for s in range(3))
    ours, theirs = jaxoverlap.attention, jax.nn.dot_product_attention
    of = [jax.jit(lambda s, *qkv, fn=fn: fn(*qkv, scale=s)) for fn in (ours, theirs)]
    close(of[0](0.3, q, k, v), of[1](0.3, q, k, v))
    assert ours(q[:0], k[:0], v[:0]).shape == (0, 32, 8, 16)
    for wrong in ((q.astype(jnp.bfloat16), k, v), (q, k[:1], v[:1])):
        with pytest.raises(ValueError) as said:
            ours(*wrong)
        with pytest.raises(ValueError) as wanted:
            theirs(*wrong)
        assert str(said.value) == str(wanted.value)


FUSED = {  # of q, and of k and v; whether it is a ring with a causal mask, and without
    "sequence": (P("data", "model"), P("data", "model"), (True, True)),
    "sequence over two": (P(None, ("data", "model")), P(None, ("data", "model")), (False, False)),
    "queries alone": (P("data", "model"), P("data"), (True, False)),
    "heads": (P("data", None, "model"), P("data", None, "model"), (False, False)),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", FUSED)
def test_fused_attention_is_jaxs(mesh: Mesh, monkeypatch: Any, position: str, causal: bool):
    """With a stand-in for cuDNN's kernel, which this machine does not have."""
    kernel = fused_attention.BlockKernel(stand_in, stand_in_backward)
    monkeypatch.setattr(fused_attention, "CUDNN_LOCAL", kernel)
    monkeypatch.setattr(fused_attention, "refusal", lambda q, k, v: None)
    q_at, k_at, ringed = FUSED[position]
    q = array(mesh, q_at, 4, 32, 8, 16)
    k, v = (array(mesh, k_at, 4, 32, 4, 16, seed=s) for s in (1, 2))

    def attend(*qkv: Any) -> Any:
        return jaxoverlap.attention(*qkv, is_causal=causal, implementation="cudnn")

    compiled = jax.jit(losses(attend)).lower(q, k, v).compile()
    kinds = [isinstance(d, Decision) for d in jaxoverlap.decisions(compiled)]
    assert kinds == [ringed[not causal]] * 2
    plain = losses(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal))
    close(compiled(q, k, v), jax.jit(plain)(*on_host((q, k, v))), 1e-4)


def test_a_balanced_ring_is_jaxs(mesh: Mesh, monkeypatch: Any):
    kernel = fused_attention.BlockKernel(stand_in, stand_in_backward)
    monkeypatch.setattr(fused_attention, "CUDNN_LOCAL", kernel)
    monkeypatch.setattr(fused_attention, "refusal", lambda q, k, v: None)
    monkeypatch.setattr(operation, "_balance_pays", lambda *_: True)
    q = array(mesh, P("data", "model"), 4, 32, 8, 16)
    k, v = (array(mesh, P("data", "model"), 4, 32, 4, 16, seed=s) for s in (1, 2))

    def attend(*qkv: Any) -> Any:
        return jaxoverlap.attention(*qkv, is_causal=True, implementation="cudnn")

    compiled = jax.jit(losses(attend)).lower(q, k, v).compile()
    plain = losses(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True))
    close(compiled(q, k, v), jax.jit(plain)(*on_host((q, k, v))), 1e-4)
    hops = [c for c in jaxoverlap.audit(compiled).collectives if c.kind == "collective-permute"]
    # A ring there, with two arrays a hop, and back, with four; and exchanges of halves.
    assert sum(hop.runs for hop in hops) == 3 * (2 + 4) + 2 * (5 + 9)


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize(("pod", "sequence", "balanced"), [
    ("h100-sxm:1x4", 16384, True), ("h100-sxm:4x1", 16384, False), ("h100-sxm:4x1", 131072, True),
])  # fmt: skip
def test_a_causal_ring_is_balanced_where_that_is_estimated_to_pay(pod, sequence, balanced):
    mesh = jaxoverlap.pod_mesh(pod, {"x": 4})
    q, k = (
        jax.ShapeDtypeStruct(
            (1, sequence, h, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x"))
        )
        for h in (32, 8)
    )

    def attend(*qkv: Any) -> Any:
        return jaxoverlap.attention(*qkv, is_causal=True, implementation="cudnn")

    compiled = jax.jit(attend).lower(q, k, k).compile()
    (decision,) = jaxoverlap.decisions(compiled)
    ring = 3 * 2 * k.size // 4 * 2
    exchanged = 2 * (q.size + k.size) // 4 * 2
    assert decision.bytes_moved == ring + (exchanged if balanced else 0)
    assert compiled.as_text().count('"__cudnn$fmhaSoftmax"') == 4


def test_fused_attention_that_the_kernel_does_not_take_is_jaxs(mesh: Mesh):
    q = array(mesh, P("data", "model"), 4, 32, 8, 16)
    for fn in (jaxoverlap.attention, jax.nn.dot_product_attention):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"cuDNN|fp16/bf16"):
            fn(q, q, q, implementation="cudnn")


# -- cross-entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [("model",), ("data", "model"), ()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_is_optaxs(mesh: Mesh, vocabulary: tuple[str, ...], dtype: str):
    batch = None if "data" in vocabulary else "data"
    logits = array(mesh, P(batch, None, vocabulary or None), 4, 16, 64, dtype=dtype)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 64, (4, 16)))

    def of(fn: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda z: jnp.mean(fn(z, labels).astype(jnp.float32) ** 2))
        )

    compiled = of(jaxoverlap.softmax_cross_entropy_with_integer_labels).lower(logits).compile()
    theirs = of(optax.softmax_cross_entropy_with_integer_labels)(on_host(logits))
    close(compiled(logits), theirs, 2e-5 if dtype == "float32" else 3e-2)
    moved = [c for c in jaxoverlap.audit(compiled).collectives]
    assert all(c.kind == "all-reduce" for c in moved)  # no logits move
    assert max((c.bytes_moved for c in moved), default=0) <= 2 * 4 * 16 * 4 * 2


def test_cross_entropy_axis_where_vmap_and_twice(mesh: Mesh):
    logits = array(mesh, P("data", "model"), 4, 64, 16)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 32, (4, 16)))
    kept = (jnp.arange(64) < 32)[None, :, None]

    def of(fn: Any) -> Any:
        def loss(z: Any) -> Any:
            return jnp.mean(fn(z, labels, axis=1, where=kept) ** 2)

        def mapped(z: Any) -> Any:
            return jnp.mean(jax.vmap(fn, (1, 0))(jnp.moveaxis(z, 1, 2), labels.T) ** 2)

        twice = jax.grad(lambda z: jnp.sum(jax.grad(mapped)(z) ** 2))
        return jax.jit(
            lambda z: (jax.value_and_grad(loss)(z), jax.value_and_grad(mapped)(z), twice(z))
        )

    ours = of(jaxoverlap.softmax_cross_entropy_with_integer_labels)(logits)
    close(ours, of(optax.softmax_cross_entropy_with_integer_labels)(on_host(logits)), 1e-4)


@pytest.mark.parametrize(
    "vocabulary, labels",
    [(256, np.uint8([0, 127, 128, 255])), (512, np.uint8([1, 2, 254, 255])),
     (512, np.int8([0, 1, 126, 127])), (64, np.int32([-1, -64, 3, 5])),
     (64, np.int32([-65, -100, 64, 1000]))],
    ids=["bytes", "uint8", "int8", "from the end", "outside"],
)  # fmt: skip
def test_cross_entropy_reads_labels_as_optax_does(mesh: Mesh, vocabulary: int, labels: Any):
    logits = array(mesh, P(None, ("data", "model")), 4, vocabulary)

    def of(fn: Any) -> Any:
        return jax.jit(lambda z, y: (*jax.vjp(lambda z: fn(z, y), z)[1](jnp.ones(4)), fn(z, y)))

    ours, theirs = (
        of(fn)(logits, labels)
        for fn in (
            jaxoverlap.softmax_cross_entropy_with_integer_labels,
            optax.softmax_cross_entropy_with_integer_labels,
        )
    )
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


def test_cross_entropy_over_several_dims_and_of_rows_that_do_not_count(mesh: Mesh):
    logits = array(mesh, P("data", None, "model"), 4, 2, 32)
    labels = jnp.asarray([0, 31, 32, 63])
    ours = jaxoverlap.softmax_cross_entropy_with_integer_labels
    theirs = optax.softmax_cross_entropy_with_integer_labels
    close(jax.jit(lambda z: ours(z, labels, axis=(1, 2)))(logits), theirs(logits, labels, (1, 2)))
    labels, rows = jnp.zeros((4, 2), int), jnp.asarray([[True, False]] * 4)
    of = [
        jax.jit(jax.value_and_grad(lambda z, fn=fn: jnp.mean(fn(z, labels, where=rows))))
        for fn in (ours, theirs)
    ]
    close(of[0](logits), of[1](logits))


def test_cross_entropy_names_what_does_not_fit():
    entropy = jaxoverlap.softmax_cross_entropy_with_integer_labels
    with pytest.raises(ValueError, match="expected a floating-point one"):
        entropy(jnp.ones((2, 3), int), jnp.ones(2, int))
    with pytest.raises(ValueError, match="expected integers"):
        entropy(jnp.ones((2, 3)), jnp.ones(2))
    with pytest.raises(ValueError, match="labels of the logits' shape without it"):
        entropy(jnp.ones((2, 3)), jnp.ones(3, int))
