"""Check that a step is the one that a plan was made for.

A plan names matmuls by their number, so on another step it would do other things than were meant.
The plan is compared with the step before its edits are applied.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh, NamedSharding

from jaxoverlap._jax import compat, jits
from jaxoverlap._util.text import human_bytes
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.hardware.topology import axis_domains, cluster_of
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.fingerprint import fingerprint, memory_text
from jaxoverlap.passes.analysis.jaxprs import Dot, dots
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.planning.entries import letters_of, skip_of, source_of
from jaxoverlap.passes.rewriting.prefetch import joined_bytes
from jaxoverlap.plan.edits import GatherAhead, MakeRing, ScatterLookup
from jaxoverlap.plan.plan import Decision, MadeFor, Plan, Reason, Skip
from jaxoverlap.plan.table import mesh_text

_PACKAGES = ("jaxoverlap", "jax", "jaxlib")
_SHOWN = 3  # matmuls and arguments that differ


def made_for(call: jits.Call, mesh: Mesh, cluster: Cluster | None) -> MadeFor:
    """Describe the step, mesh and versions that a plan for these arguments is made for.

    Args:
        call: the jit's view of the call.
        mesh: the step's mesh.
        cluster: the mesh's GPUs, if named.
    """
    params, jaxpr = call.params, call.params["jaxpr"]
    arguments = tuple(map(_type_and_sharding, jaxpr.invars, argument_shardings(call)))
    results = tuple(map(_type_and_sharding, jaxpr.outvars, params["out_shardings"]))
    step = (fingerprint(jaxpr), arguments, results, params["donated_invars"], params["keep_unused"])
    known = cluster or cluster_of(mesh)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return MadeFor(
        step=hashlib.sha256(repr(step).encode()).hexdigest(),
        arguments=arguments,
        results=results,
        axis_types={axis: kind.name for axis, kind in kinds},
        domains=axis_domains(mesh, cluster) if known else {},
        devices=mesh.devices.flat[0].device_kind,
        cluster=str(known) if known else None,
        versions={package: _version(package) for package in _PACKAGES},
    )


def argument_shardings(call: jits.Call) -> list[Any]:
    """List the shardings of a step's arguments: the jit's own, or what they are bound to."""
    bound = zip(call.params["in_shardings"], map(jits.bound_sharding, call.flat), strict=True)
    return [own if isinstance(own, jax.sharding.Sharding) else at for own, at in bound]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # jaxoverlap, run from the checkout
        return "not installed"


def _type_and_sharding(var: Any, sharding: Any) -> str:
    """Write a value's type, and the mesh axes on its dims: "float32[16, 32@model]"."""
    aval = var.aval
    if not hasattr(aval, "shape"):
        return compat.type_text(var)
    dims = [str(size) for size in aval.shape]
    memory = ""
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        for d, axes in enumerate(compat.axes_by_dim(spec, len(dims))):
            dims[d] += f"@{'+'.join(axes)}" if axes else ""
        partial = str(spec) if spec.unreduced or spec.reduced else ""
        memory = " ".join(filter(None, ("", partial, memory_text(sharding))))
    elif dims:  # where a number lies is of no account
        named = isinstance(sharding, jax.sharding.Sharding)
        memory = f", {type(sharding).__name__}" if named else ", anywhere"
    return f"{'weak ' * aval.weak_type}{aval.dtype}[{', '.join(dims)}]{memory}"


def cluster_for(plan: Plan, mesh: Mesh) -> Cluster | None:
    """Return the cluster to name for a step that follows a plan, if the user names none.

    It is the plan's own, so that links count as they did for the plan; None where the devices are
    another cluster (`check` will say so), or where the plan went by what they say of themselves.
    """
    wanted, own = plan.made_for, cluster_of(mesh)
    if wanted is None or wanted.cluster is None:
        return None
    if own is not None and (
        str(own) != wanted.cluster or axis_domains(mesh, None) == wanted.domains
    ):
        return None
    with contextlib.suppress(ValueError):  # a chip of the user's own: only he can name it
        named = parse_cluster(wanted.cluster)
        return named if named.num_devices == mesh.size else None


def check(plan: Plan, name: str, origin: MadeFor, mesh: Mesh, call: jits.Call, jaxpr: Any) -> None:
    """Refuse a plan that was made for something else.

    Args:
        plan: the plan.
        name: the step's name.
        origin: what a plan for this step is made for.
        mesh, call: the step's mesh and its call.
        jaxpr: the step, flattened.

    Raises:
        ValueError: with all that differs.
    """
    if plan.made_for is None:
        raise UserError(
            "the plan does not say which step it was made for: take one that explain() or tune() "
            "gave, and change that"
        )
    differ = [*_around(plan, origin, mesh)]
    if plan.made_for.step != origin.step:
        inside = [*_matmuls(plan, jaxpr), *_values(plan.made_for, origin, call)]
        short = plan.made_for.step[:12], origin.step[:12]
        what = "the step" if inside else "the step, though not its matmuls, arguments or results"
        differ += [f"{what}: {_two(*short)}", *inside]
    if differ:
        lines = "".join(f"\n  {line}" for line in differ)
        raise UserError(
            f"the plan was made for something else than {name} as it is here; this differs:{lines}"
            "\nTune again, or give the plan that was made for this"
        )


def _two(planned: object, here: object) -> str:
    return f"the plan's {planned}, here {here}"


def _around(plan: Plan, origin: MadeFor, mesh: Mesh) -> Iterator[str]:
    """Yield a line for each difference in versions, mesh and cluster."""
    wanted = plan.made_for
    assert wanted is not None
    for package in {**wanted.versions, **origin.versions}:
        then, now = (made.versions.get(package, "absent") for made in (wanted, origin))
        if then != now:
            yield f"version of {package}: {_two(then, now)}"
    if list(plan.mesh.items()) != list(mesh.shape.items()):
        yield f"mesh: {_two(mesh_text(plan.mesh), mesh_text(mesh.shape))}"
    elif wanted.axis_types != origin.axis_types:
        yield f"types of the mesh's axes: {_two(wanted.axis_types, origin.axis_types)}"
    if wanted.devices != origin.devices:
        yield f"devices: {_two(wanted.devices, origin.devices)}"
    if wanted.cluster != origin.cluster:
        line = f"cluster: {_two(wanted.cluster or 'not known', origin.cluster or 'not known')}"
        if wanted.cluster and wanted.devices == origin.devices:
            line += "; if it is that one, name it in overlap(cluster=)"
        yield line
    elif wanted.domains != origin.domains and plan.mesh.keys() == mesh.shape.keys():
        yield f"NVLink domains along each axis: {_two(wanted.domains, origin.domains)}"


def _matmuls(plan: Plan, jaxpr: Any) -> list[str]:
    """List the first matmuls that differ."""
    pairs = itertools.zip_longest(plan.entries, dots(jaxpr))
    lines = []
    for then, now in pairs:
        was = then and f"{then.einsum} x {then.runs} ({then.source})"
        is_ = now and f"{letters_of(now)} x {now.runs} ({source_of(now)})"
        if not then or not now or (then.einsum, then.runs) != (letters_of(now), now.runs):
            number = then.site if then else now.index if now else 0
            lines.append(f"matmul {number}: {_two(was or 'none', is_ or 'none')}")
    return _first(lines, "matmuls")


def _values(wanted: MadeFor, origin: MadeFor, call: jits.Call) -> list[str]:
    """List the first arguments and results that differ."""
    names = call.params["jaxpr"].debug_info.safe_arg_names(len(origin.arguments))
    lines = []
    for kind, labels in (("argument", names), ("result", None)):
        then, now = getattr(wanted, f"{kind}s"), getattr(origin, f"{kind}s")
        for i, (was, is_) in enumerate(itertools.zip_longest(then, now, fillvalue="none")):
            if was != is_:
                label = labels[i] if labels and i < len(labels) and labels[i] else str(i)
                lines.append(f"{kind} {label}: {_two(was, is_)}")
    return _first(lines, "arguments and results")


def _first(lines: list[str], what: str) -> list[str]:
    more = [f"and {len(lines) - _SHOWN} {what} more"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


def facts_of(plan: Plan, jaxpr: Any, mesh: Mesh, options: Mapping[str, Any]) -> dict[str, str]:
    """Map names to the facts that identify a rewritten step's program, for processes to compare.

    No fact depends on the host, and source lines are left out: comments may differ.

    Args:
        plan: what was done.
        jaxpr: the rewritten step.
        mesh: its mesh.
        options: all compiler options.
    """
    origin = plan.made_for
    assert origin is not None
    order = [(device.id, device.process_index) for device in mesh.devices.flat]
    return {
        "step": plan.step,
        **{f"version of {package}": version for package, version in origin.versions.items()},
        "mesh": mesh_text(plan.mesh),
        "order of the mesh's devices": _short(repr(order)),
        "cluster": origin.cluster or "not known",
        **{f"edit {number}": str(edit) for number, edit in enumerate(plan.edits)},
        **{f"XLA option {name}": str(value) for name, value in sorted(options.items())},
        "hash of the step": origin.step[:12],
        "hash of the rewritten step": fingerprint(jaxpr)[:12],
    }


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- what came of it ------------------------------------------------------------------------------


def followed(plan: Plan, edited: EditedStep, name: str, origin: MadeFor) -> Plan:
    """Return a plan that was followed, with its evidence as the step is now.

    Source lines may have moved, and edits may have been left out or changed by hand.

    Args:
        plan: the plan.
        edited: the step after its edits.
        name: the step's name.
        origin: what a plan for this step is made for.
    """
    rings = edited.facts.get(MakeRing)
    decisions = rings.decisions if rings else {}
    before = {entry.site: entry for entry in plan.entries}
    entries = (
        _entry(dot, decisions, before.get(dot.index)) for dot in edited.matmuls if not plan.plain
    )
    return msgspec.structs.replace(
        plan,
        step=name,
        entries=plan.entries if plan.plain else tuple(entries),
        made_for=origin,
        applied=applied(edited),
    )


def applied(edited: EditedStep) -> tuple[str, ...]:
    """Return lines that say what the edits of a step gather ahead and scatter."""
    scattered = map(str, edited.facts.get(ScatterLookup, ()))
    ahead = edited.facts.get(GatherAhead)
    if ahead is None or not ahead.gathers:
        return tuple(scattered)
    joined = joined_bytes(edited)
    as_one = f", all of a layer's in one ({human_bytes(joined)})" if joined else ""
    gathers = f"{ahead.gathers} gathers of scanned weights run one step of their scan ahead"
    return (f"{gathers}{as_one}.", *scattered)


def _entry(
    dot: Dot, decisions: Mapping[int, Decision], before: Decision | Skip | None
) -> Decision | Skip:
    """Return the entry of a matmul: what is done with it, with the plan's reasons if it is that."""
    now, skip = decisions.get(dot.index), skip_of(dot, Reason("not ringed", "by the plan"))
    if now is None:
        if isinstance(before, Skip):
            return msgspec.structs.replace(skip, why=before.why)
        if before is None or before.num_chunks > 1 or before.ring not in decisions:
            return skip
        return msgspec.structs.replace(before, source=skip.source, module=skip.module)
    if not isinstance(before, Decision) or before.variant != now.variant:
        return now
    return msgspec.structs.replace(now, why=before.why, others=before.others)
