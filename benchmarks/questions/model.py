"""The train step of the questions: a transformer as people train it, in plain JAX.

RMSNorm, rotary positions, grouped queries, cuDNN's attention, a gated MLP or experts whose tokens
go by ragged all-to-alls, float32 masters cast to bfloat16, global clipping and AdamW; each layer is
rematerialized by a policy of `jax.checkpoint`, and layers run in one scan. Every weight and
activation has its sharding; an axis that the mesh lacks is left out:

    activation         shape                              sharding
    residual stream    [batch, sequence, hidden]          (batch, "tp" or "context", None)
    q, k, v, attended  [batch, sequence, heads, size]     (batch, None, "tp" or "context", None)
    inner              [batch, sequence, mlp]             (batch, None, "tp") or (batch, "context")

"batch" is ("replica", "fsdp"), with "expert" where there is one. Weights are sharded over "fsdp",
and over "tp" as Megatron has it; over "context" and "expert" too as FSDP. A context axis shards the
sequence, and the heads inside attention (Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.questions.fp8 import SCALES, fp8_einsum
from models import ragged
from models.layers import rotate


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer and of its batch.

    Attributes:
        layers, hidden, heads, mlp: as everywhere.
        kv_heads: heads of keys and values; 0: as many as `heads`.
        size: of a head; 0: hidden / heads.
        gated: whether the MLP has a gate (SwiGLU); GELU where it has none.
        vocab: tokens; of images the classes.
        batch, sequence: of the step, over all GPUs.
        experts, choices: of a mixture, which `mlp` is the width of one expert in; 0: none.
        room: slots of a device for tokens that come to its experts, as a multiple of an even load;
            None: as many as can come.
        pixels: values of a patch of an image; 0: tokens of text, under a causal mask.
        fp8: whether matmuls with a layer's weights are in fp8, by delayed scaling.
        micro_batches: batches that the step accumulates gradients of, in a scan.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int
    vocab: int
    batch: int
    sequence: int
    kv_heads: int = 0
    size: int = 0
    gated: bool = True
    experts: int = 0
    choices: int = 0
    room: float | None = 1.5
    pixels: int = 0
    fp8: bool = False
    micro_batches: int = 1

    @property
    def head(self) -> int:
        return self.size or self.hidden // self.heads

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's matrices."""
        d, f, e = self.hidden, self.mlp, self.experts
        one = (e,) if e else ()
        shapes = {"q": (d, self.heads * self.head), "k": (d, self.keys * self.head)}
        shapes |= {"v": shapes["k"], "out": (self.heads * self.head, d)}
        shapes |= {"up": (*one, d, f), "down": (*one, f, d)}
        shapes |= {"gate": (*one, d, f)} if self.gated else {}
        return shapes | ({"router": (d, e)} if e else {})

    @property
    def weights(self) -> int:
        """The number of weights."""
        layer = sum(math.prod(shape) for shape in self.layer_shapes.values())
        return self.layers * layer + self.hidden * (self.vocab + (self.pixels or self.vocab))

    @property
    def model_flops(self) -> float:
        """The operations of a step without recomputation, causal attention by half its square.

        Matmuls count 6 for each weight that a token meets and each token (arXiv:2204.02311, B).
        """
        active = sum(
            shape[-1] * shape[-2] * (self.choices if len(shape) == 3 else 1)
            for shape in self.layer_shapes.values()
        )
        tokens = self.batch * self.sequence
        scores = 12 * self.heads * self.head * self.sequence / (1 if self.pixels else 2)
        ends = 6 * self.hidden * (self.pixels or self.vocab)
        return tokens * (self.layers * (6 * active + scores) + ends)


# -- shardings ------------------------------------------------------------------------------------


def specs(mesh: Mesh) -> dict[str, P]:
    """Return the sharding of every activation and weight on a mesh, by name."""
    axes = mesh.axis_names

    def having(*names: str) -> tuple[str, ...] | None:
        return tuple(name for name in names if name in axes) or None

    batch, fsdp = having("replica", "fsdp", "expert"), having("fsdp", "context", "expert")
    tp, text, heads = having("tp"), having("tp", "context"), having("tp", "context")
    by_text = None if tp else having("context")
    column, row = P(fsdp, tp), P(tp, fsdp)
    own = having("expert")
    return {
        "tokens": P(batch, having("context")),
        "stream": P(batch, text, None),
        "heads": P(batch, None, heads, None),
        "flat": P(batch, by_text, tp),
        "inner": P(batch, by_text, tp),
        "logits": P(batch, by_text, tp),
        "pooled": P(batch, None),
        **{name: column for name in ("q", "k", "v", "gate", "up", "head")},
        **{name: row for name in ("out", "down", "embedding")},
        **({n: P(own, having("fsdp"), None) for n in ("up", "gate", "down")} if own else {}),
        **{"router": P(), "patches": P(None, fsdp), "classes": P(fsdp, None)},
    }


def shapes(model: Model) -> dict[str, Any]:
    """Return the shapes of all weights."""
    n, d = model.layers, model.hidden
    layers: dict[str, Any] = {name: (n, *s) for name, s in model.layer_shapes.items()}
    layers |= {"attention_norm": (n, d), "mlp_norm": (n, d)}
    ends: dict[str, Any] = {"norm": (d,)}
    if model.pixels:
        ends |= {"patches": (model.pixels, d), "classes": (d, model.vocab)}
    else:
        ends |= {"embedding": (model.vocab, d), "head": (d, model.vocab)}
    scales = {name: (n, SCALES) for name in model.layer_shapes} if model.fp8 else {}
    return {"layers": layers, "scales": scales, **ends}


def abstract_args(model: Model, mesh: Mesh) -> tuple[Any, ...]:
    """Return (weights, optimizer's state, inputs, targets) as shapes with shardings."""
    at = specs(mesh)

    def leaf(path: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        name = path[-1].key
        spec = at.get(name, P())
        if path[0].key != "layers" or name not in at:
            spec = P() if path[0].key == "scales" else spec
        else:
            spec = P(None, *spec)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    weights = jax.tree_util.tree_map_with_path(
        leaf, shapes(model), is_leaf=lambda x: isinstance(x, tuple)
    )
    trained, replicated = _trained(weights), NamedSharding(mesh, P())
    state = jax.eval_shape(optimizer().init, trained)
    moments = jax.tree.map(
        lambda s: s if s.ndim else jax.ShapeDtypeStruct((), s.dtype, sharding=replicated),
        optax.tree.map_params(optimizer(), lambda _, w: w, state, trained),
    )

    def array(spec: P, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch, sequence = model.batch, model.sequence
    if model.pixels:
        images = array(at["stream"], batch, sequence, model.pixels, dtype=jnp.bfloat16)
        return weights, moments, images, array(P(at["tokens"][0]), batch)
    tokens = array(at["tokens"], batch, sequence)
    return weights, moments, tokens, tokens


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))


# -- the step -------------------------------------------------------------------------------------


def make_step(
    model: Model, mesh: Mesh, policy: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the jitted step(weights, moments, inputs, targets) -> (weights, moments, loss).

    Args:
        model: its sizes.
        mesh: with axes of the module's text, all automatic or all explicit.
        policy: what the remat of a layer keeps; None: nothing.
    """
    net = _Net(model, mesh, policy)

    def step(weights: Any, moments: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        loss, gradients = net.gradients(weights, inputs, targets)
        trained = _trained(weights)
        updates, moments = optimizer().update(_trained(gradients), moments, trained)
        new: Any = optax.apply_updates(trained, updates)
        return {**new, "scales": gradients["scales"]}, moments, loss

    at = jax.tree.map(lambda leaf: leaf.sharding, abstract_args(model, mesh))
    out = (*at[:2], NamedSharding(mesh, P()))
    return jax.jit(step, in_shardings=at, out_shardings=out, donate_argnums=(0, 1))


def _trained(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that the optimizer has: the scales of fp8 become what was measured."""
    return {name: leaf for name, leaf in tree.items() if name != "scales"}


class _Net:
    """A model on a mesh: its loss and gradients."""

    def __init__(self, model: Model, mesh: Mesh, policy: Callable[..., Any] | None):
        self.model, self.mesh, self.policy = model, mesh, policy
        self.at = specs(mesh)
        self.explicit = AxisType.Explicit in mesh.axis_types
        if model.experts:
            activation = jax.nn.silu if model.gated else jax.nn.gelu
            self.mixed = ragged.experts(mesh, axis="expert", activation=activation, room=model.room)

    def pin(self, x: jax.Array, name: str) -> jax.Array:
        return self.to(x, self.at[name])

    def to(self, x: jax.Array, spec: P) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        if self.explicit:
            return jax.sharding.reshard(x, sharding)
        return lax.with_sharding_constraint(x, sharding)

    def matmul(self, spec: str, x: jax.Array, w: jax.Array, name: str, scales: Any = None) -> Any:
        """Multiply, and pin the product: over an explicit mesh JAX must be told its sharding."""
        if scales is not None:
            return self.pin(fp8_einsum(spec, x, w, scales), name)
        if self.explicit:
            return jnp.einsum(spec, x, w, out_sharding=NamedSharding(self.mesh, self.at[name]))
        return self.pin(jnp.einsum(spec, x, w), name)

    def gathered(self, w: jax.Array, name: str) -> jax.Array:
        """Return a weight in bfloat16; an explicit mesh has FSDP's gather written out."""
        w = w.astype(jnp.bfloat16)
        if not self.explicit:
            return w
        return self.to(w, P(*(None if entry == ("fsdp",) else entry for entry in self.at[name])))

    def gradients(self, weights: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        """Return the loss and the gradients, of all micro-batches in turn where there are some."""
        n = self.model.micro_batches
        if n == 1:
            return jax.value_and_grad(self.loss)(weights, inputs, targets)

        def split(x: jax.Array) -> jax.Array:
            # Each device keeps its own sequences: the batch is dealt to micro-batches in turn.
            parts = x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)
            spec = P(None, *self.at["tokens"])
            return lax.with_sharding_constraint(parts, NamedSharding(self.mesh, spec))

        def one(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(self.loss)(weights, *batch)
            ), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
        summed = lax.scan(one, zero, (split(inputs), split(targets)))[0]
        return jax.tree.map(lambda x: x / n, summed)

    def loss(self, weights: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy, in nats."""
        layer = jax.checkpoint(self.layer, prevent_cse=False, policy=self.policy)
        stacked = weights["layers"], weights["scales"]
        x = lax.scan(layer, self.embedded(weights, inputs), stacked)[0]
        x = norm(x, weights["norm"])
        if self.model.pixels:
            pooled = self.pin(jnp.mean(x, axis=1, dtype=jnp.float32).astype(x.dtype), "pooled")
            logits = self.pin(pooled @ self.gathered(weights["classes"], "classes"), "pooled")
        else:
            head = self.gathered(weights["head"], "head")
            logits = self.matmul("bsd,dv->bsv", x, head, "logits")
        wide = logits.astype(jnp.float32)
        at_target = jnp.sum(wide * jax.nn.one_hot(targets, self.model.vocab), axis=-1)
        return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - at_target)

    def embedded(self, weights: Any, inputs: jax.Array) -> jax.Array:
        if self.model.pixels:
            patches = self.gathered(weights["patches"], "patches")
            return self.matmul("bsp,pd->bsd", inputs, patches, "stream")
        table = weights["embedding"].astype(jnp.bfloat16)
        table = self.to(table, P(self.at["embedding"][0], None))
        if self.explicit:
            return table.at[inputs].get(out_sharding=NamedSharding(self.mesh, self.at["stream"]))
        return self.pin(table[inputs], "stream")

    def layer(self, x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        """x + attention(norm(x)), then x + mlp(norm(x)); `own` are its weights and fp8's scales."""
        model, (weights, scales) = self.model, own

        def times(spec: str, x: jax.Array, name: str, to: str) -> jax.Array:
            w = self.gathered(weights[name], name)
            return self.matmul(spec, x, w, to, scales.get(name))

        y = norm(x, weights["attention_norm"])
        q, k, v = (self.heads(times("bsd,de->bse", y, name, "flat")) for name in "qkv")
        if not model.pixels:
            q, k = rotate(q), rotate(k)
        q, k, v = (self.pin(one, "heads") for one in (q, k, v))
        flat = self.pin(self.attended(q, k, v).reshape(*x.shape[:2], -1), "flat")
        x = self.pin(x + times("bse,ed->bsd", flat, "out", "stream"), "stream")
        y = norm(x, weights["mlp_norm"])
        if model.experts:
            return self.pin(x + self.mixture(y, weights), "stream"), None
        inner = times("bsd,df->bsf", y, "up", "inner")
        if model.gated:
            inner = jax.nn.silu(times("bsd,df->bsf", y, "gate", "inner")) * inner
        else:
            inner = jax.nn.gelu(inner)
        y = times("bsf,fd->bsd", self.pin(inner, "inner"), "down", "stream")
        return self.pin(x + y, "stream"), None

    def heads(self, x: jax.Array) -> jax.Array:
        return self.pin(x.reshape(*x.shape[:2], -1, self.model.head), "heads")

    def attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attend, by cuDNN where the mesh has GPUs."""
        fused = functools.partial(
            jax.nn.dot_product_attention,
            is_causal=not self.model.pixels,
            implementation="cudnn" if self.mesh.devices.flat[0].platform == "gpu" else "xla",
        )
        if not self.explicit:
            return self.pin(fused(q, k, v), "heads")
        # JAX takes what cuDNN gives for replicated on an explicit mesh: each device would do all.
        automatic: Any = jax.sharding.auto_axes(fused)
        return automatic(q, k, v, out_sharding=NamedSharding(self.mesh, self.at["heads"]))

    def mixture(self, y: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        """Send every token to its experts and back, by ragged all-to-alls."""
        likely = jax.nn.softmax((y @ weights["router"].astype(y.dtype)).astype(jnp.float32))
        share, chosen = lax.top_k(likely, self.model.choices)
        share = (share / jnp.sum(share, -1, keepdims=True)).astype(y.dtype)
        matrices = [weights[n].astype(y.dtype) for n in ("up", "down", "gate") if n in weights]
        return self.mixed(y, share, chosen, *matrices)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last dim."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


# -- what a layer keeps ---------------------------------------------------------------------------

Policy = Callable[..., Any]
_POLICIES = jax.checkpoint_policies
_DOTS = _POLICIES.dots_with_no_batch_dims_saveable


def attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep what cuDNN's attention gives: its output, and the logarithms of its sums."""
    return primitive.name.startswith("dot_product_attention_fwd")


def dots_and_attention(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keep that, and matmuls with weights."""
    return bool(attention(primitive) or _DOTS(primitive, *avals, **params))


KEPT: Mapping[str, Policy | None] = {
    "full": None,
    "attention": attention,
    "dots": _DOTS,
    "dots + attention": dots_and_attention,
    "all dots": _POLICIES.dots_saveable,
}
