"""Split a stage's backward pass: gradients of its input first, those of its weights later.

Zero-bubble schedules run the two as passes of their own (Qi et al., arXiv 2401.10241): B for the
input, which the stage before waits for, and W for the weights, which nobody waits for. Both are
parts of one jaxpr, that of `jax.vjp`. B has the equations that the input's gradient needs, W the
rest; what W reads of B is kept between them, as the cotangent of each matmul's result. Loops over
layers are split alike, into two loops. Nothing is computed twice but what is of the weights alone
(a cast), so that no pass keeps a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxoverlap._jax import compat, inlining

Tree = Any
_OPENED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_REMAT = ("checkpoint", "remat", "remat2")


class StagePasses(NamedTuple):
    """The three passes of a stage, which hand each other lists of arrays.

    Attributes:
        forward: (weights, x) -> (y, saved), saved until W.
        inputs: (weights, saved, dy) -> (dx, kept), kept from B until W.
        weights: (weights, saved, kept) -> gradients of the weights.
    """

    forward: Callable[[Tree, Tree], tuple[Tree, list[Any]]]
    inputs: Callable[[Tree, list[Any], Tree], tuple[Tree, list[Any]]]
    weights: Callable[[Tree, list[Any], list[Any]], Tree]


def split(
    backward: Callable[[Tree, Tree, Tree], tuple[Tree, Tree, Tree]], *like: Tree
) -> StagePasses:
    """Return the passes of a function (weights, x, dy) -> (y, dx, gradients of the weights).

    Args:
        backward: traced once; y may not depend on dy.
        like: weights, x and dy, arrays or shapes.

    A value that a `jax.checkpoint` computes again for the gradients is computed in B.
    """
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(*like)
    body, trees = closed.jaxpr, [jax.tree.structure(tree) for tree in shapes]
    weights, x, dy = _parts(body.invars, [len(jax.tree.leaves(tree)) for tree in like])
    eqns, late, renamed = _opened(body.eqns, set(dy))
    y, dx, dw = _parts([renamed(v) for v in body.outvars], [t.num_leaves for t in trees])

    early = [eqn for eqn in eqns if not late & set(eqn.outvars)]
    b, w = _divided([eqn for eqn in eqns if late & set(eqn.outvars)], dx, dw)
    of_x = _reached(early, x)
    read = _unique([*_read(b), *_read(w), *_vars(dx), *_vars(dw)])
    saved = [v for v in read if v in of_x]
    of_b = {*dy, *(v for eqn in b for v in eqn.outvars)}
    kept = [v for v in _unique([*_read(w), *_vars(dw)]) if v in of_b]
    alone = [eqn for eqn in early if not of_x & set(eqn.outvars)]

    def part(given: Sequence[Any], made: Sequence[Any], eqns: Sequence[Any]) -> Callable:
        operands = [*body.constvars, *weights, *given]
        jaxpr = compat.without_dead(compat.jaxpr_of(operands, made, eqns))
        return lambda *args: compat.evaluate(jaxpr, [*closed.consts, *args])

    run_f = part(x, [*y, *saved], early)
    run_b = part([*saved, *dy], [*dx, *kept], [*alone, *b])
    run_w = part([*saved, *kept], dw, [*alone, *w])

    def forward(weights: Tree, x: Tree) -> tuple[Tree, list[Any]]:
        found = run_f(*jax.tree.leaves(weights), *jax.tree.leaves(x))
        return trees[0].unflatten(found[: len(y)]), found[len(y) :]

    def inputs(weights: Tree, saved: list[Any], dy: Tree) -> tuple[Tree, list[Any]]:
        found = run_b(*jax.tree.leaves(weights), *saved, *jax.tree.leaves(dy))
        return trees[1].unflatten(found[: len(dx)]), found[len(dx) :]

    def of_weights(weights: Tree, saved: list[Any], kept: list[Any]) -> Tree:
        return trees[2].unflatten(run_w(*jax.tree.leaves(weights), *saved, *kept))

    return StagePasses(forward, inputs, of_weights)


def _opened(eqns: Sequence[Any], late: set[Any]) -> tuple[list[Any], set[Any], Callable]:
    """Return equations with calls replaced by their bodies, and which variables come late.

    Args:
        eqns: of a jaxpr.
        late: variables that the backward pass alone has, the cotangents.

    Returns:
        The equations, all late variables, and what a variable of the jaxpr is called in them.
    """
    names, late, made = dict[Any, Any](), set(late), list[Any]()

    def renamed(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else names.get(atom, atom)

    def add(eqn: Any, inside: bool) -> None:
        is_late = inside or any(v in late for v in _vars(eqn.invars))
        name = eqn.primitive.name
        plain = name not in ("jit", "pjit") or compat.is_plain_jit(eqn)
        bodies = list(compat.jaxprs_in(eqn))
        if name in _OPENED and plain and len(bodies) == 1 and not bodies[0].consts:
            inner, results = inlining.opened(eqn, bodies[0])
            for one in inner:
                one = one.replace(invars=[renamed(v) for v in one.invars])
                add(one, inside or (is_late and name in _REMAT))
            for var, atom in zip(eqn.outvars, results, strict=True):
                names[var] = renamed(atom)
            return
        made.append(eqn)
        if is_late:
            late.update(eqn.outvars)

    for eqn in eqns:
        add(eqn.replace(invars=[renamed(v) for v in eqn.invars]), False)
    return made, late, renamed


def _divided(
    eqns: Sequence[Any], first: Sequence[Any], later: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the equations that `first` needs, and those that only `later` does."""
    needed, wanted = set(_vars(first)), set(_vars(later))
    one, other = list[Any](), list[Any]()
    for eqn in reversed(eqns):
        now = [v in needed for v in eqn.outvars]
        then = [v in wanted for v in eqn.outvars]
        if any(now):
            if eqn.primitive.name == "scan" and any(
                w and not n for n, w in zip(now, then, strict=True)
            ):
                eqn, rest = _divided_scan(eqn, now, then)
                other += rest
                wanted.update(_read(rest))
            one.append(eqn)
            needed.update(_vars(eqn.invars))
        elif any(then):
            other.append(eqn)
            wanted.update(_vars(eqn.invars))
    return one[::-1], other[::-1]


def _divided_scan(scan: Any, now: Sequence[bool], then: Sequence[bool]) -> tuple[Any, list[Any]]:
    """Return a scan of the results wanted now, and one, or none, of those wanted then.

    What the second body reads of the first is stacked by the first.
    """
    body, (n_consts, n_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    eqns, _, renamed = _opened(body.eqns, set())
    outs = [renamed(v) for v in body.outvars]
    consts, carry, xs = _parts(body.invars, [n_consts, n_carry, len(body.invars)])
    operands = dict(zip(body.invars, scan.invars, strict=True))

    wanted = list(now)
    while True:  # until no carry is needed by what is wanted that is not wanted itself
        first, _ = _divided(eqns, [v for v, w in zip(outs, wanted, strict=True) if w], [])
        made = {v for eqn in first for v in eqn.outvars}
        needs = {*_read(first), *_vars(v for v, w in zip(outs, wanted, strict=True) if w)}
        more = [
            w or (i < n_carry and carry[i] in needs) or (i >= n_carry and t and outs[i] in made)
            for i, (w, t) in enumerate(zip(wanted, then, strict=True))
        ]
        if more == wanted:
            break
        wanted = more

    late = [i for i, (w, t) in enumerate(zip(wanted, then, strict=True)) if t and not w]
    left = [eqn for eqn in eqns if not made & set(eqn.outvars)]
    while True:  # and the carries that these need
        results = [outs[i] for i in late]
        _, second = _divided(left, [], results)
        reads = {*_read(second), *_vars(results)}
        more_late = [i for i, v in enumerate(carry) if v in reads and not wanted[i]]
        if set(more_late) <= set(late):
            break
        late = sorted({*late, *more_late})
    shared = made | {v for v, w in zip(carry, wanted, strict=False) if w}
    crossing = [v for v in _unique([*_read(second), *_vars(results)]) if v in shared]
    stacks = [compat.stacked_var(v, scan.params["length"]) for v in crossing]

    def loop(eqns: list[Any], chosen: Sequence[int], extra: Sequence[Any], given: Any) -> Any:
        """Make a scan of some results; `extra` ys more, and `given`, stacks that it reads."""
        carried = [i for i in chosen if i < n_carry]
        ys = [i for i in chosen if i >= n_carry]
        read = {*_read(eqns), *_vars(outs[i] for i in chosen), *extra}
        own = [v for v in consts if v in read]
        mine = [v for v in xs if v in read]
        inner = compat.jaxpr_of(
            [*own, *(carry[i] for i in carried), *mine, *(crossing if given else ())],
            [*(outs[i] for i in carried), *(outs[i] for i in ys), *extra],
            eqns,
        )
        invars = [
            *(operands[v] for v in own),
            *(operands[carry[i]] for i in carried),
            *(operands[v] for v in mine),
            *given,
        ]
        made = [scan.outvars[i] for i in (*carried, *ys)]
        counts = (len(own), len(carried))
        return compat.new_scan(scan, inner, counts, invars, [*made, *(stacks if extra else ())])

    head = loop(first, [i for i, w in enumerate(wanted) if w], crossing, ())
    return head, [loop(second, late, (), stacks)] if late else []


def _parts(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Return consecutive parts of some sizes; the last takes what there is."""
    found, at = [], 0
    for size in sizes:
        found.append(list(items[at : at + size]))
        at += size
    return found


def _vars(atoms: Iterable[Any]) -> list[Any]:
    return list(compat.variables(atoms))


def _read(eqns: Iterable[Any]) -> list[Any]:
    return [v for eqn in eqns for v in _vars(eqn.invars)]


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _reached(eqns: Iterable[Any], begin: Iterable[Any]) -> set[Any]:
    """Return the variables that depend on some, and these."""
    found = set(begin)
    for eqn in eqns:
        if any(v in found for v in _vars(eqn.invars)):
            found.update(eqn.outvars)
    return found
