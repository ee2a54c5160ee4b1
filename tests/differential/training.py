"""Build train steps around a loss: gradients, optimizers, schedules, results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.differential.world import Leaf, World


@dataclass
class Program:
    """A step of somebody, with the arguments that it is called with.

    Attributes:
        step: step(*state, *inputs, **static).
        state: trees of leaves, which are fed back.
        inputs: returns the trees of the n-th call.
        results: by result, the number of the state that it renews, or None, as the step returns
            it: a tuple, a dict, or a bare number.
        apply: returns a state's next value from its present one and its result, on hosts.
        static: static keyword arguments.
        donated: whether states may be donated; not where a result renews nothing.
        last: the name of the last input, if it has one.
    """

    step: Callable
    state: list[Any]
    inputs: Callable[[int], list[Any]]
    results: Any
    apply: Callable | None = None
    static: dict[str, Any] = field(default_factory=dict)
    donated: bool = True
    last: str | None = None

    def __post_init__(self) -> None:
        self.last = self.last or last_name(self.step)


def last_name(fn: Callable) -> str | None:
    """Return the name of a function's last argument, or None where it may not be used."""
    parameters = list(inspect.signature(fn).parameters.values())
    named = all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
    return parameters[-1].name if named and parameters else None


def descend(params: Any, grads: Any) -> Any:
    """Apply plain gradient descent on hosts, for a step that returns gradients."""
    return jax.tree.map(lambda p, g: (p - 0.1 * np.asarray(g)).astype(p.dtype), params, grads)


# -- optimizers -----------------------------------------------------------------------------------


def orthogonal(update: jax.Array) -> jax.Array:
    """Take a Newton-Schulz step on a matrix: Muon's direction, or its beginning."""
    if update.ndim != 2:
        return update
    x = update / (jnp.linalg.norm(update) + 1e-2)
    return 1.5 * x - 0.5 * (x @ x.T) @ x


def transformation(w: World) -> optax.GradientTransformation:
    """Draw an optimizer, optax's or one written beside. Epsilons are large: noise stays noise."""
    schedule = optax.linear_schedule(2e-2, 1e-2, 10) if w.chance("schedule", 0.3) else 1e-2
    kind = w.pick("optimizer", ("sgd", "momentum", "adam", "adam", "adamw"))
    if w.chance("muon", 0.06):
        kind = "muon"
    made = {
        "sgd": lambda: optax.sgd(schedule),
        "momentum": lambda: optax.sgd(schedule, momentum=0.9, nesterov=True),
        "adam": lambda: optax.adam(schedule, eps=1e-2),
        "adamw": lambda: optax.adamw(schedule, eps=1e-2, mask=_matrices),
        "muon": lambda: optax.chain(
            optax.trace(0.9),
            optax.stateless(lambda updates, _: jax.tree.map(orthogonal, updates)),
            optax.scale_by_learning_rate(schedule),
        ),
    }[kind]()
    if w.chance("clipped", 0.4):
        return optax.chain(optax.clip_by_global_norm(1.0), made)
    return made


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def optimizer_state(w: World, tx: optax.GradientTransformation, params: Any) -> Any:
    """Return tx.init as on placed parameters: moments lie as their parameters do.

    Counters are on no mesh, as tx.init leaves them, or on all of it, as jax.jit(tx.init) does. A
    counter that starts on no mesh and comes back on one is a second signature: one more compile.
    """
    counters = None if w.chance("counters on no mesh", 0.2) else P()
    known = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }  # fmt: skip
    state = jax.eval_shape(tx.init, jax.tree.map(lambda leaf: leaf.value, params))

    def laid(path: Any, like: jax.ShapeDtypeStruct) -> Leaf:
        value = np.zeros(like.shape, like.dtype)  # all of these optimizers begin with zeros
        name = jax.tree_util.keystr(path)
        for end, leaf in known.items():
            if name.endswith(end) and np.shape(leaf.value) == value.shape:
                return Leaf(value, leaf.spec)
        return Leaf(value, counters)

    return jax.tree_util.tree_map_with_path(laid, state)


# -- steps ----------------------------------------------------------------------------------------


KINDS = ("optax", "state dict", "sgd", "sgd", "sgd", "grad", "value_and_grad", "aux")


def trained(
    w: World,
    params: Any,
    loss: Callable,
    inputs: Callable[[int], list[Any]],
    kinds: Sequence[str] = KINDS,
) -> Program:
    """Build a step around loss(params, *inputs) in one of the ways that people write it."""
    kind = w.pick("step", kinds)
    if w.compute == jnp.float32 and w.chance("jacobian", 0.02):
        kind = "jacfwd of grad"
        w.said["step"] = kind
    program = STEPS.get(kind, _gradients)(w, params, loss, inputs)
    return replace(program, last=last_name(loss))


def _optax(w: World, params: Any, loss: Callable, inputs: Callable) -> Program:
    tx = transformation(w)
    norm = w.chance("reports the norm", 0.4)

    def train_step(params, opt_state, *batch, **named):
        value, grads = jax.value_and_grad(loss)(params, *batch, **named)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if norm:
            return params, opt_state, {"loss": value, "norm": optax.global_norm(grads)}
        return params, opt_state, value

    return Program(train_step, [params, optimizer_state(w, tx, params)], inputs, (0, 1, None))


def _state_dict(w: World, params: Any, loss: Callable, inputs: Callable) -> Program:
    """Build a step with all of its state in one dict, with a counter and a flag."""
    tx = transformation(w)
    skips = w.chance("skips bad steps", 0.3)
    state = {
        "params": params,
        "opt": optimizer_state(w, tx, params),
        "step": Leaf(0) if w.chance("python step", 0.15) else Leaf(np.int32(0), P()),
        "ok": Leaf(np.bool_(True), P()),
        "ema": None,
    }
    if w.chance("hands something through", 0.3):
        state["same"] = w.param("same", "DF")

    def train_step(state, *batch, **named):
        value, grads = jax.value_and_grad(loss)(state["params"], *batch, **named)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ok = jnp.isfinite(value) & state["ok"]
        if skips:
            kept = (state["params"], state["opt"])
            params, opt = jax.tree.map(
                lambda new, old: jnp.where(ok, new, old), (params, opt), kept
            )
        new = {**state, "params": params, "opt": opt, "step": state["step"] + 1, "ok": ok}
        return {"state": new, "metrics": {"loss": value}}

    return Program(train_step, [state], inputs, {"state": 0, "metrics": None})


def _sgd(w: World, params: Any, loss: Callable, inputs: Callable) -> Program:
    """Build a step that descends by hand, as on the first page of every tutorial."""
    bare = w.chance("returns parameters alone", 0.3)
    rate = 0.05 if w.chance("rate in the step", 0.5) else None

    def update(params, *batch, lr=rate, **named):
        value, grads = jax.value_and_grad(loss)(params, *batch, **named)
        new = jax.tree.map(lambda p, g: (p - lr * g).astype(p.dtype), params, grads)
        return new if bare else (new, value)

    static = {} if rate else {"lr": 0.03}
    return Program(update, [params], inputs, 0 if bare else (0, None), static=static)


def _gradients(w: World, params: Any, loss: Callable, inputs: Callable) -> Program:
    """Build a step that returns gradients alone; another jit applies them."""
    kind = w.said["step"]
    if kind == "grad":
        step = jax.grad(loss)
        return Program(step, [params], inputs, 0, apply=descend, donated=False)
    if kind == "aux":
        step = jax.grad(
            lambda p, *batch, **named: (loss(p, *batch, **named), {"n": jnp.int32(1)}), has_aux=True
        )
        return Program(step, [params], inputs, (0, None), apply=descend, donated=False)
    step = jax.value_and_grad(loss)
    return Program(step, [params], inputs, (None, 0), apply=descend, donated=False)


def _jacobian(w: World, params: Any, loss: Callable, inputs: Callable) -> Program:
    """Build a step that returns the Hessian's rows of one small direction, forward over reverse."""

    def step(params, *batch, **named):
        def along(scales):
            moved = jax.tree.map(lambda p: p * (1 + scales.mean()), params)
            return jax.grad(loss)(moved, *batch, **named)

        rows = jax.tree.map(lambda g: g.sum(-1), jax.jacfwd(along)(jnp.zeros(3)))
        return rows, jax.grad(loss)(params, *batch, **named)

    return Program(step, [params], inputs, (None, 0), apply=descend, donated=False)


STEPS = {
    "optax": _optax,
    "state dict": _state_dict,
    "sgd": _sgd,
    "jacfwd of grad": _jacobian,
}
