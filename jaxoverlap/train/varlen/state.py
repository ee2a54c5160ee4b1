"""Check the train state that a step on batches of any lengths is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr

from jaxoverlap.train.arguments import check_automatic, check_floats

ENTRIES = "params", "optimizer", "step"


def check_state(state: Any, mesh: Mesh) -> None:
    """Raise a ValueError unless a state has its entries, of arrays or shapes on a mesh."""
    if not isinstance(state, dict) or not state.keys() >= set(ENTRIES):
        given = list(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"a state of {given}: expected a dict with {', '.join(ENTRIES)}")
    devices = set(mesh.devices.flat)
    for path, leaf in jax.tree.leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, Tracer):
            raise ValueError(
                "a state inside jax.jit or another transformation: expected arrays; call the step "
                "from a Python loop"
            )
        if sharding is None or sharding.device_set != devices:
            raise ValueError(
                f"the state has a {type(leaf).__name__} at {keystr(path)} that is not on "
                f"the {len(devices)} devices of the mesh: place the state with "
                "jax.device_put(state, NamedSharding(mesh, PartitionSpec())), or with shardings of "
                "your own"
            )
        if isinstance(sharding, NamedSharding):
            check_automatic(sharding.mesh)
    check_floats(state["params"])
    step = state["step"]
    if np.shape(step) or not jnp.issubdtype(step.dtype, np.integer):
        raise ValueError(
            f'state["step"] of dtype {step.dtype} and shape {np.shape(step)}: expected the number '
            "of the step, an array as jnp.int32(0)"
        )


def check_optimizer(state: dict[str, Any], optimizer: optax.GradientTransformation) -> None:
    """Raise a ValueError unless an optimizer could have made the state's entry."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        return {keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}

    found = shapes(state["optimizer"])
    expected = shapes(jax.eval_shape(optimizer.init, state["params"]))
    for name in expected | found:
        if found.get(name) != expected.get(name):
            raise ValueError(
                f'state["optimizer"]{name} has shape {found.get(name)}: expected '
                f"{expected.get(name)} (None: no such entry), as the init(params) of the step's "
                "optimizer gives; take the state of that optimizer, or start it anew"
            )


def check_unshared(state: Any) -> None:
    """Raise a ValueError for a state in which one array is twice: a step donates each leaf."""
    seen = dict[Any, Any]()
    for path, leaf in jax.tree.leaves_with_path(state):
        where = _address(leaf)
        if where in seen:
            raise ValueError(
                f"one array is both {keystr(seen[where])} and {keystr(path)} of the state, which "
                "a step donates: make one of them a copy, with jax.tree.map(jnp.copy, ...)"
            )
        seen[where] = path


def _address(leaf: jax.Array) -> Any:
    """Return what two arrays have in common that share memory on the first device."""
    if not leaf.size or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return id(leaf)
    shard = leaf.addressable_shards[0].data
    return shard.device, shard.unsafe_buffer_pointer()
