"""What `_shardy` takes for granted of jax and Shardy, each on its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import _compat, _shardy
from jaxoverlap.passes import jaxprs

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS = NamedSharding(MESH, P("model")), NamedSharding(MESH, P(None, "model"))
X, W = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)


def tagged_lowering(step, *args, **options):
    """A lowered step whose first matmul has the tag that is read below."""
    traced = jax.jit(step, **options).trace(*args)

    def tag(dot):
        return [_compat.with_tag(dot.eqn, site=str(dot.index))]

    jaxpr = jaxprs.map_dots(traced.jaxpr, tag)
    params = _compat.with_jaxpr(_compat.traced_params(traced), jaxpr, {})
    return _compat.traced_with(traced, params).lower()


READ = {
    "an argument of the function": lambda x, w: x @ w,
    "a constraint": lambda x, w: lax.with_sharding_constraint(x, ROWS) @ w,
    "an operation's result": lambda x, w: jnp.sin(x) @ w,
    "an argument of a while": lambda x, w: lax.scan(
        lambda c, _: (jnp.tanh(c), c @ w), x, None, length=2
    )[1],
    "the result of a while": lambda x, w: lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), x) @ w,
    "a value around a branch": lambda x, w: lax.cond(
        x.sum() > 0, lambda: x @ w, lambda: jnp.zeros((16, 64))
    ),
}


@pytest.mark.parametrize("where", READ)
def test_shardy_keeps_a_values_sharding_where_it_is_looked_for(where: str):
    lowered = tagged_lowering(READ[where], X, W, in_shardings=(ROWS, COLUMNS))
    found = _shardy.propagate(lowered, "site")
    assert found["0"][:2] == ((("model",), ()), ((), ("model",)))


def test_other_tags_and_untagged_matmuls_are_not_read():
    lowered = tagged_lowering(lambda x, w: x @ w, X, W, in_shardings=(ROWS, COLUMNS))
    assert set(_shardy.propagate(lowered, "colour")) == set()
    plain = jax.jit(lambda x, w: x @ w, in_shardings=(ROWS, COLUMNS)).lower(X, W)
    assert _shardy.propagate(plain, "site") == {}


def test_a_value_without_a_sharding_is_whole():
    lowered = tagged_lowering(
        lambda x, w: x @ w, X, W, in_shardings=(NamedSharding(MESH, P()),) * 2
    )
    assert _shardy.propagate(lowered, "site") == {"0": _shardy.Read(*[((), ())] * 3)}
