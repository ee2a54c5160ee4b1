"""Average the gradients of scanned layers inside the backward scan.

    carry, dw = scan[reverse] body carry xs          # dw [layers, ...]: all averages come after it

->  carry, dw_last = body carry xs[last]
    carry, pending, means = scan[reverse] (         # one layer less
        lambda (carry, pending, means), i:
            means[i + 1] = average pending           # overlapped with the layer below
            carry, pending = body carry xs[i]
    ) carry dw_last means
    means[0] = average pending

The program that is changed is the differentiated one, so it knows nothing of the model: a gradient
that leaves the program as a scan's stacked output, through casts and constraints at most, was
complete when its iteration ended. A collective cannot outlive the iteration in which it starts, so
an average is at the head of the next iteration and has all of that one to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.train.compression.averager import LeafState, Reduced

_PASSED_ON = {"convert_element_type", "sharding_constraint", "copy", "copy_p"}

# (gradients of one position, states of one position, position) -> means and states
Reduce = Callable[[dict[int, jax.Array], dict[int, LeafState], Any], dict[int, Reduced]]


Hooks = dict[int, int]  # of a scan: which stacked output is the gradient of which leaf


@dataclass(frozen=True)
class Backward:
    """A differentiated program, and the scans in it whose gradients are averaged inside.

    Attributes:
        jaxpr: the program, flattened.
        hooks: by the number of the scan's equation, what is averaged in it.
        refused: for each requested leaf that is not averaged in a scan, the reason.
    """

    jaxpr: Any
    hooks: dict[int, Hooks]
    refused: dict[int, str]

    def run(
        self, operands: Sequence[Any], states: Mapping[int, LeafState], reduce: Reduce
    ) -> tuple[list[Any], dict[int, Reduced]]:
        """Run the program.

        Returns:
            Its outputs, in which averaged gradients are placeholders, and the averaged leaves.
        """
        values = dict(zip(self.jaxpr.invars, operands, strict=True))
        done, waiting = dict[int, Reduced](), list[Any]()

        def read(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else values[atom]

        for number, eqn in enumerate(self.jaxpr.eqns):
            if number not in self.hooks:
                waiting.append(eqn)
                continue
            self._run_plain(waiting, values)
            waiting = []
            hooks = self.hooks[number]
            reached = {leaf: states[leaf] for leaf in hooks.values()}
            outs, reduced = _run_scan(eqn, [read(v) for v in eqn.invars], hooks, reached, reduce)
            values |= zip(eqn.outvars, outs, strict=True)
            done |= reduced
        self._run_plain(waiting, values)
        return [read(v) for v in self.jaxpr.outvars], done

    def _run_plain(self, eqns: list[Any], values: dict[Any, Any]) -> None:
        """Run some equations, and add what they define to the values."""
        if not eqns:
            return
        known = set(values)
        inputs = list(
            dict.fromkeys(v for e in eqns for v in compat.variables(e.invars) if v in known)
        )
        outputs = [v for e in eqns for v in e.outvars]
        part = compat.with_binders(self.jaxpr.replace(eqns=eqns), inputs, outputs)
        found = compat.evaluate(part, [values[v] for v in inputs])
        values |= zip(outputs, found, strict=True)


def find(program: Any, gradients: Mapping[int, int]) -> Backward:
    """Find the scans in which gradients are complete.

    Args:
        program: the jaxpr of the loss and its gradients.
        gradients: for each leaf that is wanted, the number of the program's output that is its
            gradient.
    """
    jaxpr = flatten(program, take_over=False)
    uses = DefUse(jaxpr.eqns, jaxpr.outvars)
    hooks, refused = dict[int, Hooks](), dict[int, str]()
    for leaf, output in gradients.items():
        var = jaxpr.outvars[output]
        while (eqn := uses.maker(var)) is not None and len(uses.readers(var)) == 1:
            if eqn.primitive.name not in _PASSED_ON:
                break
            var = eqn.invars[0]
        if eqn is None or eqn.primitive.name != "scan":
            name = "an argument" if eqn is None else eqn.primitive.name
            refused[leaf] = f"its gradient is made by {name}, not by a scan over layers"
        elif len(uses.readers(var)) != 1:
            refused[leaf] = "its gradient has other readers inside the program"
        else:
            _, carries = compat.scan_counts(eqn)
            index = eqn.outvars.index(var) - carries
            if index < 0:
                refused[leaf] = "its gradient is summed up over the scan's iterations"
                continue
            hooks.setdefault(uses.made[var], {})[index] = leaf
    return Backward(jaxpr, hooks, refused)


def _run_scan(
    scan: Any,
    operands: list[Any],
    wanted: Hooks,
    states: dict[int, LeafState],
    reduce: Reduce,
) -> tuple[list[Any], dict[int, Reduced]]:
    """Run a scan one iteration late, so that averages overlap with the next iteration."""
    consts_count, carries = compat.scan_counts(scan)
    consts = operands[:consts_count]
    carry = operands[consts_count : consts_count + carries]
    xs = operands[consts_count + carries :]
    length, backwards = scan.params["length"], scan.params["reverse"]
    body_jaxpr = scan.params["jaxpr"]

    def body(carry: Sequence[Any], position: Any) -> tuple[list[Any], list[Any]]:
        x = [lax.dynamic_index_in_dim(one, position, keepdims=False) for one in xs]
        out = compat.evaluate(body_jaxpr, [*consts, *carry, *x])
        return out[:carries], out[carries:]

    def reduced(pending: Any, states: Any, means: Any, position: Any) -> tuple[Any, Any]:
        one = jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, position, keepdims=False), states)
        done = reduce(pending, one, position)
        states = _put(states, {leaf: d.state for leaf, d in done.items()}, position)
        return states, _put(means, {leaf: d.mean for leaf, d in done.items()}, position)

    first = length - 1 if backwards else 0
    carry, outs = body(carry, first)
    pending = {leaf: outs[output] for output, leaf in wanted.items()}
    others = {n: out for n, out in enumerate(outs) if n not in wanted}
    stacks = _put(jax.tree.map(lambda o: _empty(o, length), others), others, first)
    means = jax.tree.map(lambda o: _empty(o, length), pending)
    states = {
        leaf: state._replace(finite=tuple(jnp.ones(length, jnp.float32) for _ in state.finite))
        for leaf, state in states.items()
    }
    before = 1 if backwards else -1  # from a position to the one that ran before it

    def step(loop: Any, position: Any) -> tuple[Any, None]:
        carry, pending, states, means, stacks = loop
        states, means = reduced(pending, states, means, position + before)
        carry, outs = body(carry, position)
        stacks = _put(stacks, {n: outs[n] for n in stacks}, position)
        pending = {leaf: outs[output] for output, leaf in wanted.items()}
        return (carry, pending, states, means, stacks), None

    loop = (carry, pending, states, means, stacks)
    if length > 1:
        positions = jnp.arange(length - 1) + (0 if backwards else 1)
        loop, _ = lax.scan(step, loop, positions, reverse=backwards)
    carry, pending, states, means, stacks = loop
    states, means = reduced(pending, states, means, 0 if backwards else length - 1)
    outs = [means[wanted[n]] if n in wanted else stacks[n] for n in range(len(outs))]
    return [*carry, *outs], {leaf: Reduced(means[leaf], states[leaf]) for leaf in means}


def _empty(like: Any, length: int) -> jax.Array:
    return jnp.zeros((length, *like.shape), like.dtype)


def _put(stacks: Any, values: Any, position: Any) -> Any:
    """Return stacks with a value put at a position."""
    return jax.tree.map(
        lambda s, v: lax.dynamic_update_index_in_dim(s, v.astype(s.dtype), position, 0),
        stacks,
        values,
    )
