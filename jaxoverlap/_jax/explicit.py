"""Convert steps on explicit meshes to automatic axes, the only kind that the passes handle.

    a:f32[8@data,16] b:f32[16,32@model]
    c:f32[8@data,32@model] = dot_general a b
    d:f32[8@data,16] = reshard[dst_sharding=P(data, None)] ...

->  a:f32[8,16] b:f32[16,32]
    c:f32[8,32] = dot_general a b
    d:f32[8,16] = sharding_constraint[sharding=P(data, None)] ...

What the user states (`reshard`, `out_sharding=`) becomes a constraint, and so do the types of the
results. A type that JAX has inferred from others becomes one too, or is left to the partitioner, as
on an automatic mesh.

Written against jax 0.11.2 and 0.12.0, as `compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax._src import core, pjit
from jax._src.mesh import use_abstract_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat
from jaxoverlap._jax.compat import Jaxpr, JaxprEqn

_STATED = ("out_sharding", "sharding")  # parameters that state the sharding of a result


def automatic_mesh(mesh: Any) -> Any:
    """Return a mesh, abstract or of devices, whose explicit axes are automatic; the others stay."""
    types = tuple(AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    if types == mesh.axis_types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


def is_mixed(mesh: Mesh) -> bool:
    """Return whether some axes of a mesh are explicit, and some are not.

    There a type says but a part of a sharding. JAX keeps the explicit axes that a type does not
    name from sharding the value, and leaves the others to XLA; no constraint can state that.
    """
    kinds = {t == AxisType.Explicit for t in mesh.axis_types}
    return len(kinds) == 2


def why_not_automatic(jaxpr: Jaxpr) -> str | None:
    """Return why explicit shardings cannot be removed from a step's types; None if they can."""
    for var in _types(jaxpr):
        spec = var.aval.sharding.spec
        if spec.unreduced or spec.reduced:
            return f"a value's type is {spec}"
    return None


def automatic(
    jaxpr: Jaxpr,
    mesh: Mesh,
    *,
    inferred: bool,
    partitions_itself: Callable[[JaxprEqn], bool] = lambda eqn: False,
) -> Jaxpr:
    """Return a step without shardings in its types.

    Args:
        jaxpr: the step, on an explicit mesh.
        mesh: the mesh.
        inferred: whether types that JAX inferred become constraints too; if not, XLA's partitioner
            chooses those shardings.
        partitions_itself: whether an operation is one of those whose results JAX takes for
            replicated, whatever their operands are. In the backward pass JAX then asks for a
            replicated gradient of such a result, and that counts as inferred.
    """
    return _Untyped(automatic_mesh(mesh), inferred, partitions_itself).step(jaxpr)


def typed_as(jaxpr: Jaxpr, like: Jaxpr) -> Jaxpr:
    """Return a step with the types of arguments and results that another has.

    Its own meshes become abstract: JAX takes one mesh of devices in a step with an operation that
    partitions itself, and that is the arguments'.

    Args:
        jaxpr: from `automatic`, rewritten or not; any other step stays as it is.
        like: what `automatic` was given.
    """
    ours, theirs = (*jaxpr.invars, *jaxpr.outvars), (*like.invars, *like.outvars)
    if all(_mesh_of(v) == _mesh_of(typed) for v, typed in zip(ours, theirs, strict=True)):
        return jaxpr
    jaxpr = _without_devices(jaxpr)
    before, env = [], {}
    invars = [core.Var(v.aval) for v in like.invars]
    for typed, plain in zip(invars, jaxpr.invars, strict=True):
        if _mesh_of(typed) is None:
            env[plain] = typed
        else:
            before.append(_cast(typed, plain))
    argument = dict(zip(like.invars, invars, strict=True))
    after, outvars = [], []
    for typed, plain in zip(like.outvars, jaxpr.outvars, strict=True):
        if not compat.is_literal(typed) and typed in argument:
            outvars.append(argument[typed])
        elif compat.is_literal(plain) or _mesh_of(typed) is None:
            outvars.append(_renamed(env, plain))
        else:
            result = core.Var(typed.aval)
            after.append(_cast(plain, result))
            outvars.append(result)
    eqns = [e.replace(invars=[_renamed(env, v) for v in e.invars]) for e in jaxpr.eqns]
    eqns = [*before, *eqns, *after]
    return jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=like.debug_info)


def _without_devices(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr whose parameters name abstract meshes only."""

    def abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
        return mesh.abstract_mesh

    eqns = (compat.map_jaxprs(_without_devices, eqn) for eqn in jaxpr.eqns)
    return jaxpr.replace(eqns=[e.replace(params=_on_meshes(e.params, abstract)) for e in eqns])


def _on_meshes(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return an equation's parameters with other meshes, in shardings and by themselves."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            return value if value.empty else change(value)
        if isinstance(value, NamedSharding):
            return value.update(mesh=change(value.mesh))
        if isinstance(value, tuple) and any(isinstance(v, NamedSharding) for v in value):
            return tuple(map(changed, value))
        return value

    return {name: changed(value) for name, value in params.items()}


def _renamed(env: dict[Any, Any], atom: Any) -> Any:
    return atom if compat.is_literal(atom) else env.get(atom, atom)


def _cast(operand: Any, result: Any) -> JaxprEqn:
    """Return the equation that gives a value another type; it moves no data of that sharding."""
    target = result.aval.sharding
    with use_abstract_mesh(target.mesh):
        return core.new_jaxpr_eqn(
            [operand],
            [result],
            pjit.reshard_p,
            {"dst_sharding": target, "concrete_mesh": None},
            core.no_effects,
        )


def _mesh_of(var: Any) -> AbstractMesh | None:
    """Return the mesh of a type that names a sharding; None of any other."""
    mesh = getattr(getattr(var.aval, "sharding", None), "mesh", None)
    return mesh if mesh is not None and not mesh.empty and mesh._any_axis_explicit else None


def _plain_type(atom: Any) -> Any:
    """Return the type of a variable or a literal without a sharding."""
    mesh = _mesh_of(atom)
    if mesh is None:
        return atom.aval
    sharding = atom.aval.sharding
    free = PartitionSpec(*[None] * len(sharding.spec))
    return atom.aval.update(sharding=sharding.update(mesh=automatic_mesh(mesh), spec=free))


def _types(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the variables of a jaxpr and of those in it that have a sharding in their type."""
    for eqn in jaxpr.eqns:
        yield from (v for v in (*eqn.invars, *eqn.outvars) if _mesh_of(v) is not None)
        for inner in compat.jaxprs_in(eqn):
            yield from _types(inner)


def _with_explicit_axes(eqn: JaxprEqn) -> JaxprEqn:
    """Return a constraint over automatic axes that names the explicit ones of the type too.

    JAX does so where it lowers one: the type's axes come first.
    """
    sharding = eqn.params["sharding"]
    var: Any = eqn.outvars[0]
    if _mesh_of(var) is None or not isinstance(sharding, NamedSharding):
        return eqn
    specs = (compat.axes_by_dim(s, var.aval.ndim) for s in (var.aval.sharding.spec, sharding.spec))
    dims: list[Any] = [(*typed, *own) or None for typed, own in zip(*specs, strict=True)]
    for dim in eqn.params["unconstrained_dims"]:
        dims[dim] = PartitionSpec.UNCONSTRAINED
    sharding = sharding.update(spec=PartitionSpec(*dims))
    return eqn.replace(params={**eqn.params, "sharding": sharding})


def _says_more(eqn: JaxprEqn, result: Any) -> bool:
    """Return whether no operand of a result's shape has the sharding of its type."""
    operands: list[Any] = eqn.invars
    known = [(v.aval.shape, v.aval.sharding.spec) for v in operands if _mesh_of(v) is not None]
    return (result.aval.shape, result.aval.sharding.spec) not in known


class _Untyped:
    """Rewrite a step's equations one by one to types without explicit shardings."""

    def __init__(self, mesh: Mesh, inferred: bool, partitions_itself: Callable[[JaxprEqn], bool]):
        self.mesh, self.inferred, self.partitions_itself = mesh, inferred, partitions_itself
        self.read = set[Any]()  # by operations that partition themselves
        self.names: list[str] = []  # the name stacks of the equations around

    def step(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrite the step itself, and constrain its results to their types."""
        body = self.body(jaxpr)
        eqns, outvars = list(body.eqns), []
        results: list[Any] = jaxpr.outvars
        for old, new in zip(results, body.outvars, strict=True):
            if compat.is_literal(old) or _mesh_of(old) is None or old in jaxpr.invars:
                outvars.append(new)
            else:
                pinned = core.Var(new.aval)
                eqns.append(self.constraint(new, pinned, old.aval.sharding, jaxpr.eqns[-1]))
                outvars.append(pinned)
        return body.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        env: dict[Any, Any] = {}

        def new(atom: Any) -> Any:
            if compat.is_literal(atom):
                return core.Literal(atom.val, _plain_type(atom))
            if isinstance(atom, core.DropVar):
                return core.DropVar(_plain_type(atom))
            if atom not in env:
                env[atom] = core.Var(_plain_type(atom))
            return env[atom]

        invars = [new(v) for v in jaxpr.invars]
        constvars = [new(v) for v in jaxpr.constvars]
        eqns = []
        for eqn in filter(self.partitions_itself, jaxpr.eqns):
            self.read.update(v for v in eqn.invars if not compat.is_literal(v))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "reshard" and _mesh_of(eqn.outvars[0]) is None:
                env[eqn.outvars[0]] = new(eqn.invars[0])  # into `auto_axes`: states no sharding
            else:
                eqns += self.equation(eqn, new)
        outvars = [new(v) for v in jaxpr.outvars]
        return jaxpr.replace(
            invars=invars,
            constvars=constvars,
            consts=jaxpr.consts,
            eqns=eqns,
            outvars=outvars,
            debug_info=jaxpr.debug_info,  # JAX drops the names of arguments that are replaced
        )

    def equation(self, eqn: JaxprEqn, new: Callable[[Any], Any]) -> Iterator[JaxprEqn]:
        invars, outvars = [new(v) for v in eqn.invars], [new(v) for v in eqn.outvars]
        if eqn.primitive.name == "reshard":
            yield self.constraint(invars[0], outvars[0], eqn.params["dst_sharding"], eqn)
            return
        if eqn.primitive.name == "sharding_constraint":
            yield self.changed(_with_explicit_axes(eqn), invars, outvars)
            return
        stated = [p for p in _STATED if isinstance(eqn.params.get(p), NamedSharding)]
        full = not any(axes for p in stated for axes in compat.partitions(eqn.params[p].spec))
        by_jax = full and self.is_transposed(eqn) and self.read.issuperset(eqn.outvars)
        if stated:
            eqn = eqn.replace(params={**eqn.params, **dict.fromkeys(stated)})
        pinned = [
            _mesh_of(v) is not None
            and not isinstance(v, core.DropVar)
            and ((stated and not by_jax) or (self.inferred and (stated or _says_more(eqn, v))))
            for v in eqn.outvars
        ]
        free = [core.Var(v.aval) if p else v for v, p in zip(outvars, pinned, strict=True)]
        yield self.changed(eqn, invars, free)
        results: list[Any] = eqn.outvars
        for old, before, after in zip(results, free, outvars, strict=True):
            if before is not after:
                yield self.constraint(before, after, old.aval.sharding, eqn)

    def is_transposed(self, eqn: JaxprEqn) -> bool:
        """Return whether JAX made an equation by transposing another: no user stated its sharding.

        A remat's backward pass also has equations that it computes again.
        """
        names = [*self.names, str(eqn.source_info.name_stack)]
        again = any("rematted_computation" in name for name in names)
        return not again and any("transpose(" in name for name in names)

    def changed(self, eqn: JaxprEqn, invars: list[Any], outvars: list[Any]) -> JaxprEqn:
        self.names.append(str(eqn.source_info.name_stack))
        eqn = compat.map_jaxprs(self.body, eqn)
        self.names.pop()
        params = _on_meshes(eqn.params, automatic_mesh)
        return eqn.replace(invars=invars, outvars=outvars, params=params, ctx=self.context(eqn))

    def context(self, eqn: JaxprEqn) -> Any:
        mesh = eqn.ctx.cur_abstract_mesh
        with eqn.ctx.manager, use_abstract_mesh(automatic_mesh(mesh)):
            return core.JaxprEqnContext()

    def constraint(self, operand: Any, result: Any, target: Any, like: JaxprEqn) -> JaxprEqn:
        spec = target.spec
        if not target.mesh.are_all_axes_explicit:  # automatic axes may shard the other dims
            spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED if d is None else d for d in spec))
        sharding = NamedSharding(self.mesh, spec)
        params = {
            "sharding": sharding,
            "layout": None,
            "context_mesh": self.mesh,
            "unconstrained_dims": pjit.get_unconstrained_dims(sharding),
        }
        return like.replace(
            primitive=pjit.sharding_constraint_p,
            invars=[operand],
            outvars=[result],
            params=params,
            effects=core.no_effects,
            ctx=self.context(like),
        )
