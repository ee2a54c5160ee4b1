"""Parts of jax that may change: jaxprs. Calls are opened in `inlining`, jits are `jits`.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_compat.py` pins each behaviour that is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    ad_checkpoint,
    api,
    config,
    core,
    flattree,
    pjit,
    source_info_util,
)
from jax._src import shard_map as shard_maps
from jax._src.interpreters import partial_eval as pe
from jax._src.mesh import empty_abstract_mesh, use_abstract_mesh
from jax._src.named_sharding import UNSPECIFIED
from jax._src.state.types import AbstractRef
from jax.experimental.xla_metadata import set_xla_metadata

PLUGIN_LOGGER = "jax._src.xla_bridge"  # it logs why a plugin cannot start, with a traceback
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn

# Since jax 0.11 a jaxpr carries its constants, so closed and open jaxprs are one class.

# -- jaxprs ---------------------------------------------------------------------------------------


def is_jaxpr(value: Any) -> bool:
    """Return whether an equation parameter is a jaxpr."""
    return isinstance(value, core.Jaxpr)


def is_literal(atom: Any) -> bool:
    """Return whether an equation's operand is a literal: a number written into it."""
    return isinstance(atom, core.Literal)


def jaxpr_texts(jaxprs: Sequence[Any]) -> list[str]:
    """Print some jaxprs; a variable that several of them have gets one name in all."""
    context, settings = core.JaxprPpContext(), core.JaxprPpSettings()
    return [core.pp_jaxpr(jaxpr, context, settings).format(use_color=False) for jaxpr in jaxprs]


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    """Yield the operands that are variables, and no literals."""
    return (a for a in atoms if not is_literal(a))


def new_var(aval: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """A variable that no jaxpr has yet; `spec` is its sharding over the mesh's explicit axes."""
    mesh = aval.sharding.mesh
    if not mesh.empty and mesh._any_axis_explicit:
        aval = aval.update(sharding=aval.sharding.update(spec=spec))
    return core.Var(aval)


def typed_spec(var: Any) -> jax.sharding.PartitionSpec:
    """The sharding over explicit axes that a variable's type states."""
    return var.aval.sharding.spec


def stated_spec(var: Any) -> tuple[tuple[str, ...], ...] | None:
    """The sharding of a variable whose mesh has explicit axes only; None for another."""
    mesh = var.aval.sharding.mesh
    if mesh.empty or not mesh.are_all_axes_explicit:
        return None
    return axes_by_dim(typed_spec(var), var.aval.ndim)


def depends(jaxpr: Any) -> bool:
    """Return whether a jaxpr has effects, or results that depend on its inputs or constants."""
    live = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]  # keeps all constants
    read = variables(v for vs in (*(e.invars for e in live.eqns), live.outvars) for v in vs)
    return bool(live.effects) or not {*live.invars, *live.constvars}.isdisjoint(read)


def takes_mutable(jaxpr: Any) -> bool:
    """Return whether a jaxpr takes or closes over mutable arrays."""
    return any(isinstance(v.aval, AbstractRef) for v in (*jaxpr.invars, *jaxpr.constvars))


def partitions(spec: jax.sharding.PartitionSpec) -> tuple[Any, ...]:
    """Return what a spec says of each dim; newer JAX iterates over none with unreduced axes."""
    return tuple(getattr(spec, "partitions", spec))


def axes_by_dim(spec: jax.sharding.PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes on each dim of a value, major to minor; a spec may name fewer dims.

    Of a dim that is left to the partitioner no axes are known.
    """
    known = (None if e is jax.sharding.PartitionSpec.UNCONSTRAINED else e for e in partitions(spec))
    entries = (*known, *[None] * ndim)[:ndim]
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)


def states_some(var: Any) -> bool:
    """Return whether a type states the sharding over some axes of the mesh, but not over all."""
    mesh = var.aval.sharding.mesh
    return not mesh.empty and mesh._any_axis_explicit and not mesh.are_all_axes_explicit


def stated_axes(eqn: Any) -> tuple[str, ...] | None:
    """The mesh axes whose shardings the type of an equation's result states; None without a mesh.

    `jax.sharding.explicit_axes` and `auto_axes` make them others than those of the step's mesh.
    """
    meshes = (eqn.outvars[0].aval.sharding.mesh, eqn.ctx.cur_abstract_mesh)
    return next((_explicit(mesh) for mesh in meshes if not mesh.empty), None)


def _explicit(mesh: Any) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == jax.sharding.AxisType.Explicit)


def states_others(eqn: Any) -> bool:
    """Return whether a reshard's result states shardings over other mesh axes than its operand."""
    meshes = [v.aval.sharding.mesh for v in (eqn.invars[0], eqn.outvars[0])]
    before, after = (() if mesh.empty else _explicit(mesh) for mesh in meshes)
    return before != after


def type_text(var: Any) -> str:
    """The type of a variable or a literal, with all that JAX's types say; no device is in it."""
    aval = var.aval
    if not isinstance(aval, core.ShapedArray):  # a token, or a reference to an array
        inner = getattr(aval, "inner_aval", None)
        return f"{type(aval).__name__}({inner or ''})"
    weak = "~" if aval.weak_type else ""
    mesh = aval.sharding.mesh
    stated = "" if mesh.empty or not mesh._any_axis_explicit else f" {typed_spec(var)}"
    return f"{weak}{aval.dtype}{list(aval.shape)}{stated} {sorted(aval.mat.varying)}"


def in_host_memory(atom: Any) -> bool:
    """Return whether a value is in the host's memory, as offloaded residuals are."""
    space = getattr(atom.aval, "memory_space", jax.memory.Space.Device)
    return space == jax.memory.Space.Host


def host_var(var: Any) -> Any:
    """A new variable of the same type, in the host's memory."""
    return core.Var(var.aval.update(memory_space=jax.memory.Space.Host))


def has_numbers(var: Any) -> bool:
    """Return whether a value is an array of numbers; keys of random numbers are not."""
    return not jax.numpy.issubdtype(var.aval.dtype, jax.dtypes.extended)


def like_var(var: Any) -> Any:
    """A new variable of the same type."""
    return core.Var(var.aval)


def shaped_var(var: Any, shape: Sequence[int]) -> Any:
    """A new variable of the same dtype, of another shape."""
    return core.Var(core.ShapedArray(tuple(shape), var.aval.dtype))


def stacked_var(var: Any, length: int) -> Any:
    """A new variable for values of this type that a scan stacks."""
    return shaped_var(var, (length, *var.aval.shape))


def typed_stack_var(var: Any, length: int) -> Any:
    """A new variable for what a scan stacks of a value, with all that its type says."""
    return core.Var(core.unmapped_leading_aval(length, var.aval))


def sized_var(var: Any, dim: int, size: int) -> Any:
    """A new variable of the same type, but for the size of one dim."""
    shape = var.aval.shape
    return core.Var(var.aval.update(shape=(*shape[:dim], size, *shape[dim + 1 :])))


def squeezed_var(var: Any) -> Any:
    """A new variable of the same type without its dims of size 1, outside of manual code."""
    shape = tuple(size for size in var.aval.shape if size != 1)
    return core.Var(core.ShapedArray(shape, var.aval.dtype, weak_type=var.aval.weak_type))


def unused_var(var: Any) -> Any:
    """A result of the same type that nobody reads."""
    return core.DropVar(var.aval)


def is_dropped(var: Any) -> bool:
    """Return whether a result has no name, as nobody reads it."""
    return isinstance(var, core.DropVar)


def int_var() -> Any:
    """A new variable: an int32."""
    return core.Var(core.ShapedArray((), np.dtype(np.int32)))


def literal(value: np.generic) -> Any:
    """A number, as an equation's operand."""
    return core.Literal(value, core.ShapedArray((), value.dtype))


def with_binders(jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Any]) -> Jaxpr:
    """A jaxpr with other operands and results, which have no names."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(invars=list(invars), outvars=list(outvars), debug_info=debug_info)


def jaxpr_of(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr of some equations, with variables of its own."""
    env = {v: core.Var(v.aval) for v in invars}

    def own(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    made = []
    for eqn in eqns:
        read = [own(atom) for atom in eqn.invars]
        new = [v if is_dropped(v) else core.Var(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, new, strict=True))
        made.append(eqn.replace(invars=read, outvars=new))
    debug_info = core.DebugInfo("checkpoint", "recomputed", None, None)
    effects = core.join_effects(*(eqn.effects for eqn in made))
    return core.Jaxpr([], [*map(own, invars)], [*map(own, outvars)], made, effects, debug_info)


def new_remat(
    body: Jaxpr, invars: Sequence[Any], outvars: Sequence[Any], like: JaxprEqn
) -> JaxprEqn:
    """A `jax.checkpoint` that was differentiated, and that XLA may share with nothing.

    Args:
        body: the equations that it runs.
        invars, outvars: its operands and results.
        like: an equation whose source line, name stack and context it has.
    """
    params = dict(jaxpr=body, prevent_cse=False, differentiated=True, policy=None)
    return like.replace(
        primitive=ad_checkpoint.remat_p,
        invars=list(invars),
        outvars=list(outvars),
        params=params,
        effects=body.effects,
    )


def without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr of the same operands and results without equations that neither these need."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def without_dead_operands(remat: JaxprEqn) -> JaxprEqn:
    """A remat without equations in its body, and operands, that its results do not need."""
    body = remat.params["jaxpr"]
    live, used = pe.dce_jaxpr(body, [True] * len(body.outvars))
    invars = [atom for atom, uses in zip(remat.invars, used, strict=True) if uses]
    return remat.replace(invars=invars, params={**remat.params, "jaxpr": live})


def with_one_result(eqn: JaxprEqn, number: int) -> tuple[list[bool], JaxprEqn]:
    """An equation with one of its results and what that needs; which operands it still has."""
    used = [n == number for n in range(len(eqn.outvars))]
    read, alone = pe.dce_rules[eqn.primitive](used, [True] * len(eqn.invars), eqn)
    assert alone is not None
    return read, alone


def keeps_precision(eqn: JaxprEqn) -> bool:
    """Return whether a `reduce_precision` leaves a value all of its type's bits."""
    info = jax.numpy.finfo(eqn.outvars[0].aval.dtype)  # type: ignore[attr-defined]
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits == (info.nexp, info.nmant)


def numeric_context(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The parts of an equation's context that its results depend on: who computes, which bits."""
    return eqn.ctx.compute_type, eqn.ctx.threefry_partitionable


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr."""
    return core.eval_jaxpr(jaxpr, jaxpr.consts, *operands)


def evaluate_eqn(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation, whose type states no sharding."""
    params = {
        **eqn.params,
        **{name: None for name in ("sharding", "out_sharding") if name in eqn.params},
    }
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def stated_constraint(eqn: JaxprEqn) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes on each dim that a sharding constraint states; None if it leaves some open."""
    sharding = eqn.params["sharding"]
    if eqn.params["unconstrained_dims"] or not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    out: Any = eqn.outvars[0]
    return axes_by_dim(sharding.spec, out.aval.ndim)


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many are its carry."""
    consts, carry, _ = scan.params["ft_in"].unpack()
    return len(consts), len(carry)


def while_parts(loop: JaxprEqn) -> tuple[Jaxpr, int, int]:
    """Return a while loop's body, and how many operands its condition and its body alone have."""
    return loop.params["body_jaxpr"], loop.params["cond_nconsts"], loop.params["body_nconsts"]


def new_scan(
    scan: JaxprEqn,
    body: Jaxpr,
    counts: tuple[int, int],
    invars: Sequence[Any],
    outvars: Sequence[Any],
) -> JaxprEqn:
    """A scan with another body, another number of constants and another carry."""
    num_consts, num_carry = counts
    num_xs, num_ys = len(invars) - num_consts - num_carry, len(outvars) - num_carry
    groups = tuple(flattree.nones(n) for n in (num_consts, num_carry, num_xs))
    results = flattree.pack((flattree.nones(num_carry), flattree.nones(num_ys)))
    params = {**scan.params, "jaxpr": body, "ft_in": flattree.pack(groups), "ft_out": results}
    return scan.replace(invars=list(invars), outvars=list(outvars), params=params)


def jaxprs_in(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, tuple) else (value,))


def has_jaxprs(eqn: JaxprEqn) -> bool:
    """Return whether there is a jaxpr among an equation's parameters."""
    return any(True for _ in jaxprs_in(eqn))


def map_jaxprs(fn: Callable[[Jaxpr], Jaxpr], eqn: JaxprEqn) -> JaxprEqn:
    """`eqn` with `fn` of each of the jaxprs among its parameters."""

    def mapped(value: Any) -> Any:
        if is_jaxpr(value):
            return fn(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            new = tuple(fn(v) if is_jaxpr(v) else v for v in value)
            return value if all(map(operator.is_, new, value)) else _like(value, new)
        return value

    params = {key: mapped(value) for key, value in eqn.params.items()}
    changed = any(params[key] is not value for key, value in eqn.params.items())
    return eqn.replace(params=params) if changed else eqn


def _like(value: tuple, new: tuple) -> tuple:
    """`new` as the kind of tuple that `value` is: some primitives have named ones."""
    return type(value)(*new) if hasattr(value, "_fields") else new


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is a jit without shardings, layouts, donations, options or effects."""
    if eqn.primitive is not pjit.jit_p:
        return False
    params, inner = eqn.params, eqn.params["jaxpr"]
    free = all(isinstance(s, type(UNSPECIFIED)) for s in _positions(params))
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        free
        and not any(layouts)
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and params["inline"] is api.Inline.AUTO
        and not inner.effects
        and not inner.consts
    )


def _positions(params: dict[str, Any]) -> tuple[Any, ...]:
    return (*params["in_shardings"], *params["out_shardings"])


@contextlib.contextmanager
def in_shard_maps(maps: Sequence[JaxprEqn]) -> Iterator[None]:
    """Enter the bodies of shard_map equations, outer ones first, so that their axes have names.

    The mesh of such a body is not set: equations keep it (`JaxprEqn.ctx`).
    """
    with contextlib.ExitStack() as stack:
        for eqn in maps:
            params = eqn.params
            axes = shard_maps._extend_axis_env(params["mesh"], params["newly_manual_axes"])
            stack.enter_context(axes)
            stack.enter_context(config._check_vma(params["check_vma"]))
        yield


def is_collective(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a collective over a manual axis itself, not one around it."""
    named = any(isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)
    return named and eqn.primitive.name != "axis_index" and not has_jaxprs(eqn)


def ordered_effects(eqn: JaxprEqn) -> set[Any]:
    """Return the effects that fix an equation's position; effects that name a mesh axis do not."""
    return {effect for effect in eqn.effects if not isinstance(effect, core.NamedAxisEffect)}


def with_tag(eqn: JaxprEqn, **metadata: str) -> JaxprEqn:
    """`eqn` that lowers to an op with these frontend attributes."""
    with eqn.ctx.manager, set_xla_metadata(**metadata):
        return eqn.replace(ctx=core.JaxprEqnContext())


def in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    """An equation with one more name on its stack."""
    stack = eqn.source_info.name_stack.extend(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def in_no_context(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn` as it would be outside `explicit_axes`, `compute_on` and the like around it."""
    with use_abstract_mesh(empty_abstract_mesh):  # the caller may be in jax.set_mesh
        return eqn.replace(ctx=core.JaxprEqnContext())


def argument_names(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The names of a traced function's arguments, as in "weights['up']"; numbers if lost."""
    names = jaxpr.debug_info.arg_names or ()
    if len(names) != len(jaxpr.invars):
        return tuple(f"argument {n}" for n in range(len(jaxpr.invars)))
    return tuple(name or f"argument {n}" for n, name in enumerate(names))


def lined_as(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> JaxprEqn:
    """Return an equation with a source line of the user's: its own, or that of one around it.

    JAX loses the lines inside its own jits, as that of `jnp.cumsum`, which it traces once for all.

    Args:
        eqn: the equation.
        around: those whose bodies it is in, outer ones first.
    """
    for lined in (eqn, *reversed(around)):
        traceback = lined.source_info.traceback
        if source_info_util.user_frame(traceback) is not None:
            return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))
    return eqn


# Layers of these libraries write matmuls for the user, whose line is the one that calls the layer.
_LIBRARIES = ("flax", "optax", "equinox", "haiku")
for _library in map(importlib.util.find_spec, _LIBRARIES):
    for _folder in (_library and _library.submodule_search_locations) or ():
        source_info_util.register_exclusion(f"{_folder}{os.sep}")
# Scopes that JAX's tracing names, and this package where it inlines a call.
_OF_TRACING = re.compile(r"rematted_computation|checkpoint|.*[^\w\[\]./-].*")


def module_path(eqns: Sequence[JaxprEqn]) -> str:
    """The named scopes around an equation, as in "GPT.layers_0.mlp.up"; "" for none.

    flax's linen names a scope for each module, and flax's nnx does not.

    Args:
        eqns: those whose bodies it is in, outer ones first, and the equation itself.
    """
    scopes = (scope for eqn in eqns for scope in eqn.source_info.name_stack.stack)
    names = (scope.name for scope in scopes if isinstance(scope, source_info_util.Scope))
    return ".".join(n.replace("/", ".") for n in names if not _OF_TRACING.fullmatch(n))


def source_line(eqn: JaxprEqn) -> tuple[str, int, str]:
    """(file, line, function) of the user's code that made `eqn`; ("<unknown>", 0, "") if lost."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "<unknown>", 0, ""
    return frame.file_name, frame.start_line, frame.function_name


def to_host(value: Any) -> list[Any]:
    """A value in the host's memory; to trace it by `inlining.inline`."""
    return [jax.device_put(value, jax.memory.Space.Host)]


def to_device(value: Any) -> list[Any]:
    """A value of the host's memory on the device; to trace it by `inlining.inline`."""
    return [jax.device_put(value, jax.memory.Space.Device)]


def zeros_like(var: Any) -> Any:
    """An array of zeros of a variable's type."""
    aval = var.aval
    mesh = aval.sharding.mesh
    stated = None if mesh.empty or not mesh._any_axis_explicit else aval.sharding
    return jax.numpy.zeros(aval.shape, aval.dtype, out_sharding=stated)


def barrier(value: Any) -> list[Any]:
    """A value as it is, across which XLA moves nothing; to trace it by `inlining.inline`."""
    return [jax.lax.optimization_barrier(value)]
