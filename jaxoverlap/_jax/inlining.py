"""Inline equations into a jaxpr: those of a call's body, or those of a function traced for it.

Written against jax 0.11.2 and 0.12.0, as `compat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import config, core, source_info_util

from jaxoverlap._jax.compat import Jaxpr, JaxprEqn, is_jaxpr
from jaxoverlap._jax.jits import Cache


def opened(
    eqn: JaxprEqn, body: Jaxpr, *, relined: bool = False
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a call's body on its operands, and the atoms that are its results.

    Every variable is a new one, so that a body may be opened several times. Equations that
    JAX's own code has traced (`jnp.cumsum`) get the source line of the call; all, if `relined`.
    """
    env: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))

    def outer(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    name = eqn.params.get("name", eqn.primitive.name)
    above = eqn.source_info.name_stack.extend(f"jit({name})")
    made = []
    for inner in body.eqns:
        invars = [outer(v) for v in inner.invars]
        outvars = [v if isinstance(v, core.DropVar) else core.Var(v.aval) for v in inner.outvars]
        env.update(zip(inner.outvars, outvars, strict=True))
        info = inner.source_info.replace(name_stack=above + inner.source_info.name_stack)
        if relined or source_info_util.user_frame(info.traceback) is None:
            info = info.replace(traceback=eqn.source_info.traceback)
        made.append(inner.replace(invars=invars, outvars=outvars, source_info=info))
    return made, [outer(v) for v in body.outvars]


def opened_jit(eqn: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a plain jit's body on its operands, and the atoms that are its results."""
    return opened(eqn, eqn.params["jaxpr"])


def inline(
    fn: Callable[..., Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    like: JaxprEqn,
    *,
    alike: Hashable = None,
    scope: str = "",
) -> list[JaxprEqn]:
    """Equations that compute `fn` of `invars` into `outvars`.

    Each carries the source line and the name stack of `like`, the equation that it replaces, so
    that profiles and the scheduled module still point at the user's code.

    Args:
        fn: the function.
        invars, outvars: the variables that it reads, and those that it computes.
        like: the equation that these replace.
        alike: a key that equal functions share, or None: of functions with equal keys, given
            values of the same types, one is traced.
        scope: a name to put on the stack.
    """
    avals = [v.aval for v in invars]
    structs = tuple(map(struct, avals))
    with like.ctx.manager, mesh_of_types(avals), source_info_util.reset_name_stack():
        body = _traced(fn, structs, alike)
    assert not body.consts, "a ring closes over nothing"
    for made, wanted in zip(body.outvars, outvars, strict=True):
        assert _type(made) == _type(wanted), f"{_type(made)} in the place of {_type(wanted)}"
    env: dict[Any, Any] = dict(zip(body.invars, invars, strict=True))
    env |= dict(zip(body.outvars, outvars, strict=True))
    assert len(env) == len(body.invars) + len(outvars), "every result is computed in the body"

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    def given(var: Any) -> Any:  # a new one, as the same trace may stand here again
        return var if isinstance(var, core.DropVar) else env.setdefault(var, core.Var(var.aval))

    above = like.source_info.name_stack
    above = above.extend(scope) if scope else above
    return [
        _located(inner, like, above).replace(
            invars=[read(v) for v in inner.invars], outvars=[given(v) for v in inner.outvars]
        )
        for inner in body.eqns
    ]


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """A type as JAX traces for it; with the sharding only where it is a part of that."""
    mesh = aval.sharding.mesh
    typed = not mesh.empty and (mesh._any_axis_explicit or mesh._any_axis_manual)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if typed else None,
        manual_axis_type=aval.mat,
    )


@contextlib.contextmanager
def mesh_of_types(avals: Sequence[Any]) -> Iterator[None]:
    """Set the mesh that the types name, if none is set, for `auto_axes` and `shard_map`."""
    meshes = (aval.sharding.mesh for aval in avals)
    typed = next((m for m in meshes if not m.empty and m._any_axis_explicit), None)
    if typed is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(typed):
        yield


_PACKAGE = str(Path(__file__).parents[1])
_TRACES: Cache[Jaxpr] = Cache()
_MAX_TRACES = 512


def _traced(fn: Callable[..., Any], structs: tuple[Any, ...], alike: Hashable) -> Jaxpr:
    """Trace a function, or return the jaxpr of an earlier one with an equal `alike`."""
    key = (alike, structs, config.trace_context())
    body = None if alike is None else _TRACES.get(key)
    if body is None:
        body = jax.make_jaxpr(fn)(*structs)
        if alike is not None:
            _TRACES.put(key, body, at_most=_MAX_TRACES)
    return body


def _type(var: Any) -> tuple[Any, ...]:
    """Return a value's shape, dtype and varying axes, which a rewrite must not change."""
    return var.aval.shape, var.aval.dtype, sorted(var.aval.mat.varying)


def _located(inner: JaxprEqn, eqn: JaxprEqn, above: Any) -> JaxprEqn:
    """`inner` with `eqn`'s source line, and its name stack below another."""
    stack = above + inner.source_info.name_stack
    info = eqn.source_info.replace(name_stack=stack)
    return inner.replace(source_info=info, params=_params_relined(inner, eqn))


def _params_relined(inner: JaxprEqn, eqn: JaxprEqn) -> dict[str, Any]:
    """Parameters with relined jaxprs; of branches, which hold a user's equations, only our own."""

    def relined(value: Any) -> Any:
        if is_jaxpr(value):
            return _relined(value, eqn)
        if isinstance(value, tuple) and value and all(map(is_jaxpr, value)):
            return tuple(_relined(v, eqn, of_user=False) for v in value)
        return value

    return {name: relined(value) for name, value in inner.params.items()}


def _relined(jaxpr: Any, eqn: JaxprEqn, *, of_user: bool = True) -> Any:
    """A nested jaxpr whose equations carry `eqn`'s source line; name stacks are relative."""
    eqns = [
        e.replace(
            source_info=e.source_info.replace(traceback=eqn.source_info.traceback),
            params=_params_relined(e, eqn),
        )
        if of_user or _is_ours(e)
        else e
        for e in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns)


def _is_ours(eqn: JaxprEqn) -> bool:
    """Return whether an equation was traced in this package's own code."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return frame is None or frame.file_name.startswith(_PACKAGE)
