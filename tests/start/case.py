"""A small step that donates its state, candidates for it, and what slows them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.plan.plan import Plan
from jaxoverlap.start import at_once
from jaxoverlap.start.at_once import AtOnce
from jaxoverlap.start.candidates import Offer, Offers
from jaxoverlap.start.contender import Contender
from jaxoverlap.start.record import PLAIN, Trials

HIDDEN, FF, BATCH = 16, 32, 16
AXES = (("data", 2), ("model", 4))
VARIANTS = ("one_way", "two_way", "direct")
MOST_S = 100  # that a search and compilations may take on a busy machine


def make_mesh(axes: Mapping[str, int] = dict(AXES)) -> jax.sharding.Mesh:
    """Return a mesh over the first devices; of several hosts too, where `jax.make_mesh` refuses."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_step(mesh: jax.sharding.Mesh, rate: float = 0.1) -> Any:
    """Return a step of SGD with momentum; data, tensor and sequence parallel; donates its state."""
    inner = NamedSharding(mesh, P("data", "model"))
    stream = NamedSharding(mesh, P(("data", "model")))

    def loss(w, x):
        h = lax.with_sharding_constraint(x @ w["up"], inner)
        y = lax.with_sharding_constraint(jnp.tanh(h) @ w["down"], stream)
        return jnp.mean((y - jnp.sin(x)) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x):
        value, gradients = jax.value_and_grad(loss)(state["w"], x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        w = jax.tree.map(lambda a, m: a - rate * m, state["w"], momentum)
        return {"w": w, "momentum": momentum, "count": state["count"] + 1}, value

    return train_step


def arguments(mesh: jax.sharding.Mesh, seed: int = 0) -> tuple[Any, jax.Array]:
    """Return a state and a batch."""
    rng = np.random.default_rng(seed)
    columns, rows = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("model"))

    def placed(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        full = rng.standard_normal(shape).astype("f") / 4
        return jax.make_array_from_callback(shape, sharding, lambda index: full[index])

    def weights() -> dict[str, jax.Array]:
        return {"up": placed((HIDDEN, FF), columns), "down": placed((FF, HIDDEN), rows)}

    scalar = NamedSharding(mesh, P())
    count = jax.make_array_from_callback((), scalar, lambda _: np.zeros((), "i"))
    state = {"w": weights(), "momentum": weights(), "count": count}
    return state, placed((BATCH, HIDDEN), NamedSharding(mesh, P(("data", "model"))))


@functools.cache
def plans(axes: tuple[tuple[str, int], ...] = AXES) -> dict[str, Plan]:
    """Return a plan for each variant of rings."""
    mesh = make_mesh(dict(axes))
    step, args = make_step(mesh), arguments(mesh)
    made = {v: jaxoverlap.overlap(step, granularity=v).explain(*args) for v in VARIANTS}
    assert all(plan.rings for plan in made.values())
    return made


def offer(
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str] = VARIANTS,
    axes: tuple[tuple[str, int], ...] = AXES,
) -> None:
    """Have these variants offered, without a search."""
    offers = Offers(offers=tuple(Offer(name=name, plan=plans(axes)[name]) for name in names))
    monkeypatch.setattr(at_once, "offers_of", lambda call, options: offers)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> None:
    """Have each program take so many seconds longer, by its name."""
    real_run = AtOnce.run

    def run(self: AtOnce, call: Any, plain: Callable[[], Any]) -> Any:
        def slowed() -> Any:
            time.sleep(seconds.get(PLAIN, 0))
            return plain()

        return real_run(self, call, slowed)

    monkeypatch.setattr(AtOnce, "run", run)
    replace_run(
        monkeypatch,
        lambda name, run: lambda flat: (time.sleep(seconds.get(name, 0)), run(flat))[1],
    )


def replace_run(monkeypatch: pytest.MonkeyPatch, other: Callable[[str, Any], Any]) -> None:
    """Have each candidate run as `other` makes of its name and what it runs."""
    real = at_once.contender.contender

    def contender(call: Any, options: Any, offer: Offer, *args: Any) -> Contender:
        one = real(call, options, offer, *args)
        return dataclasses.replace(one, run=other(offer.name, one.run)) if one.run else one

    monkeypatch.setattr(at_once.contender, "contender", contender)


def train(
    step: Any, state: Any, x: jax.Array, until: Callable[[int], bool]
) -> tuple[Any, list[float]]:
    """Run steps until one ends by its number."""
    losses, began = [], time.monotonic()
    while True:
        state, loss = step(state, x)
        losses.append(float(loss))
        if until(len(losses)):
            return state, losses
        assert time.monotonic() < began + MOST_S, step.trials
        if len(losses) > 1:
            time.sleep(0.005)


def decided(step: Any) -> Callable[[int], bool]:
    """Return what ends some steps after the trials have."""

    def over(number: int) -> bool:
        since = step.trials[0].since
        return since is not None and number > since + 3

    return over


def trials_of(cache: Path, mesh: jax.sharding.Mesh, **options: Any) -> tuple[Trials, list[float]]:
    """Train until the trials are over; return their record, and the losses."""
    said = list[Trials]()
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=cache, on_trials=said.append, **options
    )
    _, losses = train(step, *arguments(mesh), decided(step))
    assert [one.taken for one in said] == [step.trials[0].taken]
    return step.trials[0], losses
