"""Train steps with remats, drawn at random: scans, nested ones, unrolled layers, names, policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

L, B, D = 4, 16, 8
POLICIES = {
    "none": None,
    "all": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("first"),
    "dots": jax.checkpoint_policies.dots_saveable,
}
Body = Callable[[Any, Any, Any], Any]


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, (x, jnp.sign(x))), lambda saved, g: (3 * saved[0] ** 2 * g,))


def dropped(x, w, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x, 0)


def gathered(x, w, key):
    order = jnp.argsort(jnp.sum(w, 0))  # an integer residual
    return x[:, order] * 1.1


def looped(x, w, key):
    return jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x, w)[1].sum(0) + x


PARTS: dict[str, Body] = {
    "matmul": lambda x, w, key: x @ w,
    "twice": lambda x, w, key: jnp.tanh(x @ w) @ w.T,
    "named": lambda x, w, key: checkpoint_name(jnp.sin(x @ w), "first"),
    "gelu": lambda x, w, key: jax.nn.gelu(x),
    "softmax": lambda x, w, key: jax.nn.softmax(x @ w) + x,
    "cube": lambda x, w, key: cube(jnp.tanh(x)),
    "dropped": dropped,
    "gathered": gathered,
    "looped": looped,
}


@dataclass(frozen=True)
class Drawn:
    """A drawn step: its layers' parts, how layers follow each other, and what each remat keeps."""

    parts: tuple[str, ...]
    way: str
    policy: str
    reverse: bool
    seed: int

    @property
    def step(self) -> Any:
        """The jitted step(w, x, key) -> (w, value), which takes w's memory."""

        def step(w, x, key):
            if self.way != "micro-batches":
                value, g = jax.value_and_grad(self.loss)(w, x, key)
                return w - 0.1 * g, value

            def accumulated(so_far, x):
                made = jax.value_and_grad(self.loss)(w, x, key)
                return jax.tree.map(jnp.add, so_far, made), None

            rows = x.reshape(2, B // 2, D)
            value, g = jax.lax.scan(accumulated, (jnp.float32(0), jnp.zeros_like(w)), rows)[0]
            return w - 0.1 * g, value

        return jax.jit(step, donate_argnums=0)

    def layer(self, x, given):
        w, key = given
        for number, part in enumerate(self.parts):
            x = PARTS[part](x, w, jax.random.fold_in(key, number))
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
        return x, None

    def loss(self, w, x, key):
        remat = jax.checkpoint(self.layer, policy=POLICIES[self.policy])
        given = w, jax.random.split(key, L)
        if self.way in ("scan", "micro-batches"):
            x = jax.lax.scan(remat, x, given, reverse=self.reverse)[0]
        elif self.way == "unrolled":
            for number in range(L):
                x = remat(x, jax.tree.map(lambda a, n=number: a[n], given))[0]
        elif self.way == "nested":
            pairs = jax.tree.map(lambda a: a.reshape(2, L // 2, *a.shape[1:]), given)
            outer = jax.checkpoint(lambda x, given: jax.lax.scan(remat, x, given))
            x = jax.lax.scan(outer, x, pairs)[0]
        elif self.way == "through":  # the forward and the backward scan are in two outer ones
            rows = x.reshape(2, B // 2, D)
            run = lambda x: jax.lax.scan(remat, x, given)[0]  # noqa: E731
            return jax.lax.scan(lambda s, x: (s + jnp.mean(run(x) ** 2), None), 0.0, rows)[0]
        return jnp.mean(x**2)

    def arguments(self, mesh: Mesh | None = None) -> tuple[Any, ...]:
        rng = np.random.default_rng(self.seed)
        w = rng.standard_normal((L, D, D)).astype(np.float32) / 3
        x = rng.standard_normal((B, D)).astype(np.float32)
        key = jax.random.key(self.seed)
        if mesh is None:
            return jnp.asarray(w), jnp.asarray(x), key
        specs = P(None, "data", None), P("data", None), P()
        at = (NamedSharding(mesh, spec) for spec in specs)
        return tuple(jax.device_put(v, s) for v, s in zip((w, x, key), at, strict=True))


STEPS = st.builds(
    Drawn,
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4).map(tuple),
    way=st.sampled_from(["scan", "unrolled", "nested", "micro-batches", "through"]),
    policy=st.sampled_from(sorted(POLICIES)),
    reverse=st.booleans(),
    seed=st.integers(0, 100),
)
