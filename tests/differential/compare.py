"""Compare a drawn step under overlap() with the plain one, in all that a user could notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxoverlap
from jaxoverlap.plan.decisions import Variant
from jaxoverlap.step.options import Options
from tests.differential.case import TYPED, Case, draw
from tests.differential.layouts import drawn_layouts
from tests.differential.training import Program
from tests.differential.world import World

TOGETHER = 10  # seeds a test
# Seeds on whose plain step XLA ends the process: a check in how it shards dots.
ABORTS = frozenset({1308})
# How steps that state shardings are overlapped, so that all kinds of edits are made on such meshes.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"halved": True},
    {"laid_out": True},
    {"laid_out": True, "halved": True},
    {"options": Options(layers_ahead=True, rings=False, layouts=None, halves=None)},
    {"options": Options(layers_ahead=True, halves=2)},
    {"options": Options(late_sums=True, layouts=None, halves=None)},
    {"options": Options(late_sums=True, halves=2)},
    {"options": Options(granularity=Variant("two_way"), fsdp="ring")},
    {"options": Options(granularity=Variant("sliced", 2), halves=2)},
)
HARMLESS = ("overlap() changes nothing", "overlap() rewrites nothing")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **more: _compiled.append(more["fun_name"]) if event == _COMPILED else None
)


@dataclass
class Call:
    """Results and costs of one call; values are on the host, as the next call donates."""

    tree: Any
    values: list[np.ndarray]
    facts: list[dict[str, Any]]
    shardings: list[Any]
    deleted: list[bool]
    traces: int
    compiles: int


@dataclass
class Run:
    """Calls of one step, each with the outputs of the one before."""

    calls: list[Call] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True)
class Comparison:
    """Differences and notes that were found in a case.

    Attributes:
        differences: how the overlapped step differs from the plain one; empty if all is well.
        notes: findings that are no failure of the overlapped step: plain refuses, or is wrong.
        ringed: the number of matmuls that were put into rings.
        error: the error that overlap() raised where plain did not.
    """

    differences: list[str]
    notes: list[str]
    ringed: int = 0
    error: Exception | None = None


def differing(
    seeds: range,
    *,
    always: bool = False,
    laid_out: bool = False,
    halved: bool = False,
    among: Sequence[Callable[[World], Program]] = (),
    mixed: bool = False,
    options: Options | None = None,
) -> dict[int, list[str]]:
    """Return the differences by seed, if any; `python -m tests.differential --seed N` runs one."""
    differences = {
        seed: compared(
            draw(seed, among=among, mixed=mixed),
            always=always,
            laid_out=laid_out,
            halved=halved,
            options=options,
        ).differences
        for seed in seeds
        if seed not in ABORTS
    }
    jax.clear_caches()
    return {seed: texts for seed, texts in differences.items() if texts}


def typed_case(seed: int) -> tuple[Case, dict[str, Any]]:
    """Draw a step that states shardings, and the arguments of `compared` that say what is edited."""
    return draw(seed, among=TYPED), WAYS[seed % len(WAYS)]


def differences(case: Case) -> list[str]:
    """List the differences of a case's overlapped step from its plain one."""
    return compared(case).differences


def compared(
    case: Case,
    *,
    always: bool = False,
    laid_out: bool = False,
    halved: bool = False,
    options: Options | None = None,
) -> Comparison:
    """Compare a case's two steps; the reference is run where values differ, or `always`.

    Where overlapped and plain agree on a value, the overlapped step is as right as the plain one.

    Args:
        case: the case.
        always: whether to run the reference in any case.
        laid_out: whether the overlapped step gets layouts drawn from the case's name.
        halved: whether its rows are cut in halves, if they can be.
        options: those of the overlapped step, in place of the two before.
    """
    plain = _run(case, case.fn)
    again = case.built(False)
    if plain.error is not None:  # a refused step has no jaxpr to draw layouts for
        ours = _run(again, _overlapped(again, halved=halved, options=options))
        refused = _same_refusal(plain.error, ours.error)
        return Comparison(refused, [f"plain refuses: {_first(plain.error)}"])
    overlapped = _overlapped(again, laid_out=laid_out, halved=halved, options=options)
    ours = _run(again, overlapped)
    ringed = _ringed(overlapped)
    if ours.error is not None:
        texts = [
            f"call {n + 1}: {text}"
            for n, (a, b) in enumerate(zip(plain.calls, ours.calls, strict=False))
            for text in _facts_apart(a, b)
        ]
        return Comparison([*texts, f"raises {_first(ours.error)}"], [], ringed, ours.error)
    texts = [f"warns: {text}" for text in ours.warned if text not in plain.warned]
    notes: list[str] = []
    half = case.computes_in_half
    apart = any(
        a.tree == b.tree and _wrong(a, b, half, strict=True)
        for a, b in zip(plain.calls, ours.calls, strict=True)
    )
    reference = _reference(case).calls if always or apart else ours.calls
    for n, (a, b, exact) in enumerate(zip(plain.calls, ours.calls, reference, strict=True)):
        texts += [f"call {n + 1}: {text}" for text in _facts_apart(a, b)]
        if a.tree == b.tree:
            off, theirs = _wrong(exact, b, half, plain=a), _wrong(exact, a, half)
            texts += [
                f"call {n + 1}: {at} off by {by}" for at, by in off.items() if at not in theirs
            ]
            notes += [
                f"call {n + 1}: plain is wrong: {at} off by {by}, overlapped by {off.get(at, 'nothing')}"
                for at, by in theirs.items()
            ]
    return Comparison(texts, notes, ringed)


def _overlapped(
    case: Case,
    *,
    laid_out: bool = False,
    halved: bool = False,
    options: Options | None = None,
) -> jaxoverlap.Overlapped:
    fn = case.step if case.bare else case.fn
    if options is not None:
        return jaxoverlap.Overlapped(fn, options)
    if laid_out:
        pins = drawn_layouts(case)
        return jaxoverlap.Overlapped(fn, Options(pins=pins, halves=2 if halved else "auto"))
    return jaxoverlap.overlap(fn, on_error="raise", halves=2 if halved else "auto")


def _ringed(overlapped: jaxoverlap.Overlapped) -> int:
    """Count the matmuls that were put into rings, in all signatures."""
    seen = [overlapped._seen.get(key) for key in overlapped._seen.cache_keys()]
    return sum(len(program.plan.decisions) for program in seen if program and program.plan)


def _reference(case: Case) -> Run:
    single = case.built(True)
    run = _run(single, single.fn)
    if run.error is not None:
        raise AssertionError(f"the reference of {case.name} fails") from run.error
    return run


def _same_refusal(error: Exception, ours: Exception | None) -> list[str]:
    text = _first(ours) if ours else "does not"
    return [] if text == _first(error) else [f"plain raises {_first(error)}; overlapped {text}"]


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# -- running --------------------------------------------------------------------------------------


def _run(case: Case, fn: Callable) -> Run:
    run, name = Run(), f"jit({case.name})"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for call in _calls(case, fn, name):
                run.calls.append(call)  # those before an error count too
        except Exception as error:
            run.error = error
    run.warned = [_told(w) for w in caught if not str(w.message).startswith(HARMLESS)]
    return run


def _told(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {str(warning.message).splitlines()[0][:160]}"


def _calls(case: Case, fn: Callable, name: str) -> Iterator[Call]:
    state = case.first_state()
    for n in range(case.calls):
        traces, compiles = case.traces, _compiled.count(name)
        result, given = case.call(fn, state, n)
        leaves, tree = jax.tree.flatten(result)
        yield Call(
            tree=tree,
            values=[np.asarray(leaf) for leaf in leaves],
            facts=[_facts(leaf) for leaf in leaves],
            shardings=[getattr(leaf, "sharding", None) for leaf in leaves],
            deleted=[
                isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(given)
            ],
            traces=case.traces - traces,
            compiles=_compiled.count(name) - compiles,
        )
        state = case.fed_back(state, result)


def _facts(leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, jax.Array):
        return {"type": type(leaf)}
    return {
        "dtype": leaf.dtype,
        "weak type": leaf.weak_type,
        "shape": leaf.shape,
        "memory kind": leaf.sharding.memory_kind,
        "committed": leaf.committed,
        "type of sharding": type(leaf.sharding).__name__,
        "type": jax.typeof(leaf),
    }


# -- comparing ------------------------------------------------------------------------------------


def _facts_apart(plain: Call, ours: Call) -> list[str]:
    if plain.tree != ours.tree:
        return [f"tree {ours.tree}, plain {plain.tree}"]
    texts = [
        f"{what} {theirs}, plain {own}"
        for what, own, theirs in (
            ("traces", plain.traces, ours.traces),
            ("compiles", plain.compiles, ours.compiles),
        )
        if own != theirs
    ]
    if plain.deleted != ours.deleted:
        kept = sum(a and not b for a, b in zip(plain.deleted, ours.deleted, strict=True))
        more = sum(b and not a for a, b in zip(plain.deleted, ours.deleted, strict=True))
        texts.append(f"donation: {kept} kept that plain deletes, {more} deleted that plain keeps")
    names = [jax.tree_util.keystr(path) for path in _paths(plain.tree)]
    for name, a, b, at, here in zip(
        names, plain.facts, ours.facts, plain.shardings, ours.shardings, strict=True
    ):
        apart = {key for key in a if a[key] != b.get(key)}
        texts += [f"{name} {key} {b.get(key)}, plain {a[key]}" for key in a if key in apart]
        # A type may name the sharding, so that both differ.
        if apart <= {"type"} and at is not None and not _alike(at, here, len(a["shape"])):
            texts.append(f"{name} sharding {_said(here)}, plain {_said(at)}")
    return texts


def _paths(tree: Any) -> list[Any]:
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(whole)]


def _alike(plain: Any, ours: Any, ndim: int) -> bool:
    """Return whether two shardings do the same and mean the same axes."""
    if not ours.is_equivalent_to(plain, ndim):
        return False
    if not isinstance(plain, jax.sharding.NamedSharding):
        return True
    return plain.mesh == ours.mesh and _axes(plain, ndim) == _axes(ours, ndim)


def _axes(sharding: Any, ndim: int) -> list[tuple[str, ...]]:
    """Return the axes of each dim, less those of one device."""
    entries = (*sharding.spec, *[None] * ndim)[:ndim]
    held = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    return [tuple(a for a in axes if sharding.mesh.shape[a] > 1) for axes in held]


def _said(sharding: Any) -> str:
    return str(getattr(sharding, "spec", sharding))


def _wrong(
    exact: Call, call: Call, half: bool, *, strict: bool = False, plain: Call | None = None
) -> dict[str, str]:
    """Return by leaf how far a call's values are off, where that is more than rounding.

    Rounding is up to a tolerance, or three times what a right plain step is off: the gradient of a
    softmax over two experts is a small difference, and off by 5e-2 in bfloat16 under plain XLA.
    """
    tolerance = (6e-2 if half else 2e-4) / (4 if strict else 1)
    scales = [_size(v) for v in exact.values if _is_floating(v)]
    # A gradient that is zero but for rounding is as large as the rounding of what it is summed of.
    floor = (1e-3 if half else 1e-6) * max(scales, default=0.0) / (4 if strict else 1)
    errors = {}
    own = plain.values if plain else exact.values
    for path, e, p, value in zip(_paths(exact.tree), exact.values, own, call.values, strict=True):
        name = jax.tree_util.keystr(path)
        if e.shape != value.shape:
            continue  # `_facts_apart` reports it
        if not _is_floating(e):
            if not np.array_equal(e, value):
                errors[name] = "whole numbers"
            continue
        off = _size(np.float64(value) - np.float64(e))
        rounding = 3 * _size(np.float64(p) - np.float64(e)) if p.shape == e.shape else 0.0
        if not off <= max(tolerance * _size(e) + floor, rounding):
            errors[name] = f"{off / (_size(e) or 1.0):.1e}"
    return errors


def _is_floating(value: np.ndarray) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _size(value: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.float64(value))))) if value.size else 0.0
