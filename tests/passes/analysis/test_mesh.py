from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.passes.analysis.mesh import find_mesh, unread

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual


def mesh_of(shape=(2, 4), names=("data", "model"), kinds=(AUTO, AUTO)) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=kinds)


MESH = mesh_of()
AT = NamedSharding(MESH, P("model"))
NOTHING = jax.make_jaxpr(lambda x: x)(1.0)


def find(arguments=(), parameters=(), jaxpr=NOTHING) -> Mesh:
    return find_mesh("step", arguments, parameters, jaxpr)


def constrained(wrap):
    """Return a jaxpr whose only word of a mesh is a constraint, deep inside `wrap`."""

    def pinned(x):
        return lax.with_sharding_constraint(x * 2, AT)

    return jax.make_jaxpr(lambda x: wrap(pinned, x))(jnp.ones(8))


def test_an_argument_tells_the_mesh():
    assert find([1.0, jax.ShapeDtypeStruct((8,), "float32", sharding=AT)]) == MESH
    assert find([jax.device_put(jnp.ones(8), AT)]) == MESH


def test_the_jits_shardings_and_its_context_tell_the_mesh():
    assert find(parameters=[None, AT]) == MESH
    assert find(parameters=[MESH]) == MESH


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f, x: f(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.checkpoint(f)(x),
        lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        lambda f, x: lax.while_loop(lambda c: c[0] < 1, lambda c: f(c), x),
        lambda f, x: lax.cond(x[0] > 0, f, lambda x: x, x),
        lambda f, x: lax.cond(x[0] > 0, lambda x: x, jax.jit(f), x),
    ],
    ids=["open", "jit", "remat", "scan", "while", "cond", "jit in cond"],
)
def test_a_constraint_tells_the_mesh_at_any_depth(wrap):
    assert find(jaxpr=constrained(wrap)) == MESH


def test_equal_meshes_are_one():
    other = NamedSharding(Mesh(MESH.devices, ("data", "model")), P("data"))
    assert find(parameters=[AT, other]) == MESH


def test_one_device_and_no_mesh_do_not_count():
    lone = jax.device_put(jnp.ones(8), jax.devices()[0])
    empty = Mesh(np.empty((), object), ())
    assert find([lone, jnp.ones(8)], [AT, empty]) == MESH
    with pytest.raises(ValueError, match="step has no mesh"):
        find([lone, jnp.ones(8)], [empty])


def test_two_meshes_are_refused():
    with pytest.raises(
        ValueError, match=r"step uses 2 meshes \({'data': 2, 'model': 4} and {'x': 8}\)"
    ):
        find(parameters=[AT, NamedSharding(mesh_of((8,), ("x",), (AUTO,)), P("x"))])


def test_one_device_is_refused():
    lone = jax.make_mesh((1,), ("x",), axis_types=(AUTO,), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="step runs on a mesh of one device"):
        find(parameters=[lone])


def test_only_manual_axes_are_not_read():
    assert unread(MESH) is None
    assert unread(mesh_of(kinds=(AUTO, EXPLICIT))) is None
    reason = unread(mesh_of(kinds=(EXPLICIT, MANUAL)))
    assert reason is not None
    assert reason.startswith("mesh axis model is Manual for the whole step:")
    assert "around the shard_map" in reason


def test_the_mesh_of_a_shard_map_is_asked_last():
    mapped = jax.shard_map(lambda x: x, mesh=MESH, in_specs=P(), out_specs=P())
    jaxpr = jax.make_jaxpr(jax.jit(mapped))(jnp.ones(4))
    assert find(jaxpr=jaxpr) == MESH
    other = mesh_of((8,), ("x",), (AUTO,))
    assert find(parameters=[NamedSharding(other, P())], jaxpr=jaxpr) == other
