"""Steps that hold their `jax.jit` inside: a partial or method of one, nnx's and equinox's objects.

They are recognised by their attributes, so that neither library need be installed.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxoverlap._jax import jits


class WrappedJit(NamedTuple):
    """A function from `jax.jit`, and the callable that it was found in.

    Attributes:
        jitted: the function.
        around: makes a callable like the one it was found in, around another function.
    """

    jitted: Any
    around: Callable[[Callable[..., Any]], Callable[..., Any]]


def find_jit(fn: Any) -> WrappedJit | None:
    """The function from `jax.jit` that `fn` is or holds; None if there is none to be found."""
    if isinstance(fn, types.MethodType):  # shows its function's attributes as its own
        fn = functools.partial(fn.__func__, fn.__self__)
    if jits.is_jitted(fn):
        return WrappedJit(fn, lambda new: new)
    equinox = type(fn).__module__.startswith("equinox.")
    if isinstance(fn, functools.partial) or (equinox and type(fn).__name__ == "Partial"):
        wrapped_jit = find_jit(fn.func)
        if wrapped_jit is None:
            return None
        bind = functools.partial(_bound, wrapped_jit.around, fn)
        return WrappedJit(wrapped_jit.jitted, bind)
    # A function may carry the name too, copied by functools.wraps, and would not look it up.
    inside = getattr(fn, "jitted_fn", None)
    if jits.is_jitted(inside) and not isinstance(fn, types.FunctionType):
        return WrappedJit(inside, functools.partial(_twin, fn, _twin_class(fn)))
    inside = getattr(fn, "_cached", None)
    if equinox and jits.is_jitted(inside):
        return WrappedJit(inside, functools.partial(_filtering, fn))
    return None


def jitted_alone(fn: Callable[..., Any]) -> WrappedJit:
    """Jit a function that is not jitted, by `jax.jit` without options.

    `jax.jit` hands it copies of its arguments' containers, so what it changes in them would be
    lost without a word. So such a function is refused when it is traced.
    """

    @functools.wraps(fn)
    def unchanging(*args: Any, **kwargs: Any) -> Any:
        _refuse_graphs(fn, (args, kwargs))
        before, structure = jax.tree.flatten((args, kwargs))
        results = fn(*args, **kwargs)
        after, changed = jax.tree.flatten((args, kwargs))
        if changed != structure or any(map(operator.is_not, before, after)):
            raise ValueError(
                f"{_name(fn)} is not jitted, and changes an argument in place: jax.jit, which "
                "overlap() would put around it, loses that. Return what changes; or jit the "
                "function by what keeps it (flax's nnx.jit), inside overlap()"
            )
        return results

    return WrappedJit(jax.jit(unchanging), lambda new: new)


def _refuse_graphs(fn: Callable[..., Any], arguments: Any) -> None:
    """Refuse flax's nnx modules and optimizers: `jax.jit` would lose their updates."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    graph = getattr(nnx, "Pytree", None) or nnx.Object  # its name before flax 0.12
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, (graph, nnx.State)))
    if objects := [type(leaf).__name__ for leaf in leaves if isinstance(leaf, graph)]:
        raise ValueError(
            f"{_name(fn)} takes nnx objects ({', '.join(dict.fromkeys(objects))}) and is not "
            "jitted itself: jax.jit, which overlap() would put around it, loses their updates. "
            "Jit it by flax's nnx.jit, inside: overlap(nnx.jit(step))"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def arguments_reach(
    wrapped_jit: WrappedJit, work: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call `work` with the arguments that reach the jit in a call with `args` and `kwargs`.

    nnx.jit takes its models apart on the way in and has to be tracing for `work` to trace; the way
    out, where it would put results back into them, is broken off.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Reached(work(*args, **kwargs))

    try:
        wrapped_jit.around(stop)(*args, **kwargs)
    except _Reached as reached:
        return reached.result
    raise AssertionError("the callable did not call the jit that was found in it")


class _Reached(BaseException):  # not to be caught by what stands between
    """Raised to carry a result out of a wrapper without running the rest of its code."""

    def __init__(self, result: Any):
        self.result = result


def _bound(around: Callable[..., Any], fn: Any, new: Callable[..., Any]) -> Any:
    args, keywords = fn.args, fn.keywords
    if isinstance(new, jax.stages.Compiled) and jits.is_jitted(fn.func):
        args, keywords = jits.dynamic_arguments(fn.func, args, keywords)
    return functools.partial(around(new), *args, **keywords)


def _twin_class(fn: Any) -> type:
    """Make a subclass of `fn`'s class whose objects are equal to `fn`.

    nnx.jit files what it knows of a running call under the object that was called, and the function
    inside its jit, which the twin shares, looks there.
    """

    def equal(self: Any, other: Any) -> bool:
        return other is fn or other is self

    members = {"__eq__": equal, "__hash__": lambda self: hash(fn)}
    return type(type(fn).__name__, (type(fn),), members)


def _twin(fn: Any, kind: type, new: Callable[..., Any]) -> Any:
    """Return a copy of `fn` whose jitted function is replaced by `new`; `fn` stays as it is."""
    twin = copy.copy(fn)
    twin.__class__ = kind
    twin.jitted_fn = new
    return twin


class _Shape(np.ndarray):
    """Holds a ShapeDtypeStruct for equinox, to which only an array is not static."""

    struct: jax.ShapeDtypeStruct


def _filtering(fn: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    """Return what filters arguments as equinox's `filter_jit` does, and calls `new` with arrays."""

    def held(value: Any) -> Any:
        if not isinstance(value, jax.ShapeDtypeStruct):
            return value
        shape = np.empty(()).view(_Shape)
        shape.struct = value
        return shape

    def given(value: Any) -> Any:
        return value.struct if isinstance(value, _Shape) else value

    def cached(donated: Any, others: Any, static: Any) -> Any:
        rest = () if isinstance(new, jax.stages.Compiled) else (static,)  # it takes none of these
        return new(*jax.tree.map(given, (donated, others)), *rest)

    twin = copy.copy(fn)
    object.__setattr__(twin, "_cached", cached)  # its class is a frozen dataclass

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(held, (args, kwargs))
        return twin(*args, **kwargs)

    return call
