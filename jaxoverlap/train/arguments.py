"""Check what users give: rates, names, functions, meshes, states, and how to overlap.

Each check returns the value, of Python's own type, or raises a ValueError that states its name,
what was given and what was expected.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import number, whole
from jaxoverlap.api import overlap as overlap_of
from jaxoverlap.train.dtypes import is_narrow

# Steps at which a schedule is looked at when it is given; its other values can only be looked at
# when their steps come.
LOOKED_AT = (0, 1, 2, 10, 100, 1000, 10_000, 100_000, 1_000_000)


def seed(name: str, value: Any) -> int:
    """Return a seed of 32 bits: of a larger one jax.random.key takes the low bits alone."""
    return whole(name, value, 0, 2**32 - 1)


def rate(name: str, value: Any) -> Any:
    """Return a learning rate above 0, or a schedule of finite ones that are 0 or more."""
    if not callable(value):
        return number(name, value, above=0)
    for step in LOOKED_AT:
        try:
            found = float(np.asarray(value(np.int32(step))))
        except TypeError as error:
            raise ValueError(
                f"{name}: a schedule that cannot be called with a step ({error}): expected "
                "(number of the step) -> rate, as optax's are"
            ) from error
        if not (math.isfinite(found) and found >= 0):
            raise ValueError(
                f"{name}: a schedule that is {found} at step {step}: expected finite rates of 0 or "
                "more"
            )
    return value


def floating(name: str, value: Any) -> Any:
    """Return a dtype of floats of 16 bits or more."""
    try:
        found = jnp.dtype(value)
    except TypeError:
        found = None
    fits = found is not None and jnp.issubdtype(found, jnp.floating) and not is_narrow(found)
    expect(fits, name, value, "a dtype of floats of 16 bits or more, as jnp.float32")
    return found


def keys(name: str, value: Any) -> tuple[str, ...]:
    """Return keys of a tree, given as a sequence."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    expect(listed, name, value, f"a sequence of keys, as ({str(value)!r},)")
    return tuple(value)


def function(name: str, value: Any, call: str) -> Callable[..., Any]:
    """Return a function.

    Args:
        name: of the argument.
        value: that was given.
        call: how it will be called, for the error.
    """
    expect(callable(value), name, value, f"a function, {call}")
    return value


def transformation(name: str, value: Any) -> optax.GradientTransformation:
    """Return an optax transformation."""
    made = all(callable(getattr(value, method, None)) for method in ("init", "update"))
    what = "an optax transformation, as optax.sgd(0.1) makes (with its parentheses)"
    expect(made, name, value, what)
    return value


def check_is(value: Any, kind: type, comes_from: str) -> None:
    """Raise a ValueError unless a state is of its type."""
    if not isinstance(value, kind):
        raise ValueError(
            f"a state of type {type(value).__name__}: expected a {kind.__name__}; give what "
            f"{comes_from} gives"
        )


def check_like(found: Any, wanted: Any, what: str, who: str) -> None:
    """Raise a ValueError for the first leaf in which a tree differs from the one that is wanted.

    Args:
        found, wanted: trees of arrays or shapes.
        what: is compared, for the error.
        who: makes the tree that is wanted, for the error.
    """
    has, needs = _described(found), _described(wanted)
    for path in needs | has:
        one, other = has.get(path, "nothing"), needs.get(path, "nothing")
        if one != other:
            raise ValueError(f"{what} has {one} at {path}: expected {other}, as {who}")
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        raise ValueError(
            f"{what} has its leaves in containers of other types: expected those that {who}; "
            "restore a checkpoint to what abstract() gives, and keep types in a train step"
        )


def _described(tree: Any) -> dict[str, str]:
    """Return dtype and shape of each leaf by its path."""
    return {
        jax.tree_util.keystr(path) or "the root": f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_not_traced(state: Any) -> None:
    """Raise a ValueError for a state that is traced."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, Tracer):
            raise ValueError(
                "this was called inside jax.jit or another transformation: expected arrays, as it "
                "is compiled by itself and changes its programs; call it from a Python loop"
            )


def check_arrays(state: Any) -> None:
    """Raise a ValueError for a state that is traced, or has leaves that are not on devices."""
    check_not_traced(state)
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"the state has a {type(leaf).__name__} of shape {np.shape(leaf)}: expected arrays "
                "on the mesh; restore a checkpoint to what abstract() gives"
            )


def warn_of_raw_keys(state: Any) -> None:
    """Warn of leaves that look like untyped keys of `jax.random.PRNGKey`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        dtype, shape = getattr(leaf, "dtype", None), np.shape(leaf)
        if dtype == np.uint32 and shape in ((2,), (4,)):
            warnings.warn(
                f"the train state has a uint32{list(shape)} at {jax.tree_util.keystr(path)}: if it "
                "is a key of jax.random.PRNGKey, all workers get the same one and with it the "
                "same dropout masks; use jax.random.key, whose keys differ between workers",
                stacklevel=3,
            )


def check_floats(params: Any) -> None:
    """Raise a ValueError unless all parameters are of floats, which alone can be averaged.

    What workers send has the parameters' dtypes: floats of 8 bits would lose most of it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"a parameter of dtype {dtype} at {jax.tree_util.keystr(path) or 'the root'}: "
                "only floats are averaged; keep counters, keys and the like apart from the "
                "parameters (in a train state, beside those that params= names)"
            )
        if is_narrow(dtype):
            raise ValueError(
                f"a parameter of dtype {dtype} at {jax.tree_util.keystr(path) or 'the root'}: "
                "expected floats of 16 bits or more, as averages and small updates are lost in "
                "fewer; keep it in bfloat16 or float32, and cast it in the step"
            )


def check_finite(params: Any) -> None:
    """Raise a ValueError for parameters that are not finite: how far one came is no number then.

    Values of tracers and shapes are not known, and are not looked at.
    """
    check_floats(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, Tracer | jax.ShapeDtypeStruct) or jnp.isfinite(leaf).all():
            continue
        raise ValueError(
            f"the parameter at {jax.tree_util.keystr(path) or 'the root'} has elements that are "
            "infinite or not a number: expected finite ones, whose changes are averaged; keep "
            "masks and running maxima beside the parameters (in what params= does not name)"
        )


def check_automatic(mesh: Mesh | AbstractMesh) -> None:
    """Raise a ValueError for a mesh with explicit or manual axes."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"a mesh of axis types {mesh.axis_types}: expected automatic axes; make it with "
            "jax.make_mesh(..., axis_types=(AxisType.Auto,) * number of axes)"
        )


def check_shared(shape: tuple[int, ...], dim: int, count: int, who: str) -> None:
    """Raise a ValueError for a batch that so many workers or devices cannot share evenly.

    Args:
        shape: of an array; one without the dim is everyone's.
        dim: of the batch.
        count, who: the workers or devices, in words: "workers along 'data'".
    """
    if len(shape) > dim and shape[dim] % count:
        raise ValueError(
            f"a batch of shape {shape}: {shape[dim]} rows are not a multiple of the {count} {who}, "
            "which share them evenly; change either"
        )


def check_workers(mesh: Mesh, axis: str) -> None:
    """Raise a ValueError for a mesh without the workers' axis, or with axes not automatic."""
    what = "a jax.sharding.Mesh; make it with jax.make_mesh"
    expect(isinstance(mesh, Mesh), "mesh", mesh, what)
    if axis not in mesh.shape:
        raise ValueError(
            f"axis={axis!r}: the mesh has the axes {', '.join(mesh.axis_names)}; name the one "
            "along which the workers lie"
        )
    check_automatic(mesh)


def overlap_options(overlap: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options for `jaxoverlap.overlap`; None for no overlap."""
    if isinstance(overlap, bool):
        return {} if overlap else None
    what = 'True, False, or options of jaxoverlap.overlap as a mapping, as {"halves": 2}'
    expect(isinstance(overlap, Mapping), "overlap", overlap, what)
    known = inspect.signature(overlap_of).parameters.keys() - {"fn"}
    if unknown := [name for name in overlap if name not in known]:
        raise ValueError(
            f"overlap={dict(overlap)!r}: jaxoverlap.overlap has no option "
            f"{', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}"
        )
    overlap_of(**overlap)  # checks the values
    return dict(overlap)
