"""A compiled step needs no more memory than `memory=` states, or the refusal is right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options, pod_mesh
from tests.search.test_kept import needs
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

WIDTH, INNER, ROWS = 512, 2048, 8192
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
PARTS = {
    "mlp": lambda x, up, down: x + jnp.sin(jax.nn.gelu(x @ up) @ down),
    "gated": lambda x, up, down: x + (jax.nn.silu(x @ up) * jnp.tanh(x @ up)) @ down,
    "softmax": lambda x, up, down: x + jax.nn.softmax(x @ up) @ down,
    "narrow": lambda x, up, down: jnp.tanh(x + x * jnp.mean(x, -1, keepdims=True)),
}


def drawn(parts: tuple[str, ...], layers: int, scanned: bool, policy: str) -> tuple[Any, Any]:
    """Return a step of equal layers, and the shapes of its arguments, on eight GPUs."""
    mesh = pod_mesh("h100-sxm:1x8", {"fsdp": 4, "tp": 2})

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        for part in parts:
            x = PARTS[part](x, *w)
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("fsdp"))), None

    def loss(w: Any, x: Any) -> Any:
        run = jax.checkpoint(layer, policy=POLICIES[policy], prevent_cse=not scanned)
        if scanned:
            return jnp.mean(jax.lax.scan(run, x, w)[0].astype(jnp.float32) ** 2)
        for n in range(layers):
            x, _ = run(x, jax.tree.map(lambda leaf, n=n: leaf[n], w))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def shape(*dims: int, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            dims, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P(*spec))
        )

    w = (
        shape(layers, WIDTH, INNER, spec=(None, "fsdp", "tp")),
        shape(layers, INNER, WIDTH, spec=(None, "tp", "fsdp")),
    )
    return jax.jit(jax.grad(loss)), (w, shape(ROWS, WIDTH, spec=("fsdp",)))


def check(parts: tuple[str, ...], layers: int, scanned: bool, policy: str, share: float) -> bool:
    """Compile a step within a share of the most memory that one needs; False if it is refused."""
    most = needs(*drawn(parts, layers, scanned, "everything"), compiler_options())
    budget = int(share * most / 1e6) * 1_000_000
    step, args = drawn(parts, layers, scanned, policy)
    try:
        within = needs(jaxoverlap.overlap(step, memory=f"{budget // 1_000_000}MB"), args)
    except ValueError as error:
        assert "a device needs" in str(error), error
        least = needs(*drawn(parts, layers, scanned, "nothing"), compiler_options())
        assert least > 0.97 * budget, f"{least} bytes are enough, {budget} were refused: {error}"
        return False
    assert within <= budget
    return True


DRAWN = given(
    parts=st.lists(st.sampled_from([*PARTS]), min_size=1, max_size=2).map(tuple),
    layers=st.sampled_from((2, 4, 6)),
    scanned=st.booleans(),
    policy=st.sampled_from([*POLICIES]),
    share=st.floats(0.3, 1.0),
)


@marked(pods)
@pytest.mark.rotating
@settings(max_examples=1, deadline=None)
@DRAWN
@example(("mlp",), 2, False, "everything", 1.0)  # by the estimate recomputing it frees nothing
def test_a_drawn_step_stays_within_its_budget(parts, layers, scanned, policy, share):
    check(parts, layers, scanned, policy, share)


@marked(pods)
@pytest.mark.nightly
@settings(max_examples=100, deadline=None)
@DRAWN
def test_100_drawn_steps_stay_within_their_budgets(parts, layers, scanned, policy, share):
    check(parts, layers, scanned, policy, share)
