"""Objects that users print say what they are: no public class shows an address in memory alone."""

from __future__ import annotations

import importlib
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.train import LocalUpdates, co2
from jaxoverlap.train.compression import data_parallel, power_sgd, uniform
from tests.support.edited import mesh_of

MODULES = (
    "jaxoverlap",
    "jaxoverlap.train",
    "jaxoverlap.train.compression",
    "jaxoverlap.train.varlen",
    "jaxoverlap.train.zeroth_order",
)
UNNAMED = {"Compressor", "Log"}  # a protocol, an open file


def public_classes() -> dict[str, type]:
    found = {}
    for module in map(importlib.import_module, MODULES):
        values = (getattr(module, name) for name in dir(module))
        classes = (
            v for v in values if inspect.isclass(v) and v.__module__.startswith("jaxoverlap")
        )
        found |= {one.__name__: one for one in classes}
    return found


def test_no_public_class_prints_an_address_alone():
    classes = public_classes()
    unnamed = {n: c for n, c in classes.items() if c.__repr__ is object.__repr__}
    silent = {name for name, one in unnamed.items() if one.__str__ is object.__str__}
    assert silent == UNNAMED and {"Overlapped", "DataParallel", "ZOStep", "VarlenStep"} <= {
        *classes
    }


def test_an_overlapped_step_says_what_it_became():
    mesh = mesh_of({"data": 2, "model": 4})

    def array(*spec):
        return jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P(*spec)))

    def matmul(x, w):
        return x @ w

    step = jaxoverlap.overlap(jax.jit(matmul))
    assert repr(step).startswith("overlap(matmul): not called yet; print(step.explain(")
    step(array("data", "model"), array(None, "model"))
    assert str(step).startswith("overlap(matmul):\n  on data 2 x model 4: ")
    assert "of 1 matmuls become rings by rule" in repr(step)
    plain = jaxoverlap.overlap(jax.jit(matmul))
    with pytest.warns(UserWarning, match="has no mesh"):
        plain(jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert "\n  overlap() changes nothing: matmul has no mesh" in repr(plain)


def test_training_over_workers_says_how_they_average():
    mesh = mesh_of({"data": 8})
    local = LocalUpdates(lambda state, batch: (state, batch), mesh, outer=co2(every=4))
    assert repr(local) == "LocalUpdates: 8 workers along data, averages uncompressed"
    sync = uniform(power_sgd(4))
    step = data_parallel(jax.value_and_grad(jnp.sum), optax.sgd(0.1), mesh, sync=sync)
    assert repr(step).startswith("DataParallel: 8 workers along data, averages by Sync(")
