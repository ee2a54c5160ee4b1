"""Draw a train step from a seed, with its jit settings and the way it is called."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tests.differential import models, others, signals, typed
from tests.differential.training import Program
from tests.differential.world import Leaf, World

# Order and weights are part of the draw: a program that is added here changes all seeds.
PROGRAMS: tuple[tuple[Callable[[World], Program], int], ...] = (
    (models.language_model, 2), (models.regression, 4), (models.residual_scan, 4),
    (models.mixer, 3), (models.experts, 2), (models.two_towers, 2), (models.adapters, 2),
    (models.accumulated, 2), (models.recurrent, 1), (models.branches, 3), (models.decoding, 3), (models.dropped_out, 2),
    (others.data_parallel, 3), (others.manual_mlp, 3), (others.vocabulary_parallel, 2),
    (others.zero, 2), (others.graph, 6), (others.power, 2),
)  # fmt: skip
GRAPHS = (others.graph,)  # of matmuls: they compile soonest
SIGNALS = signals.PROGRAMS  # drawn apart, so that seeds of the others stay
TYPED = (typed.typed,)  # the same
MAY_BE_EXPLICIT = (models.regression, models.residual_scan, others.graph)
MIXED_CHANCE = 0.4  # of the explicit steps on several axes
CALLS = 3


@dataclass
class Case:
    """A drawn step with its program, its jit settings and the way it is called.

    Attributes:
        name: the step's name, made of its program's and the seed.
        mesh: the mesh that it runs on.
        program: the step and its arguments.
        settings: the keyword arguments that the user gives to jit.
        built: builds the same case again, with traces of its own; on one device if given True.
        said: the draws, by label.
        ambient: whether the user sets the mesh.
        by_keyword: whether the last input goes by its name.
        bound: whether static arguments are bound by functools.partial.
        from_host: whether inputs come as numpy arrays, which in_shardings place.
        bare: whether the user leaves jit to overlap().
        calls: how often it is called.
    """

    name: str
    mesh: Mesh
    program: Program
    settings: dict[str, Any]
    built: Callable[[bool], Case]
    said: dict[str, str] = field(default_factory=dict)
    ambient: bool = False
    by_keyword: bool = False
    bound: bool = False
    from_host: bool = False
    bare: bool = False
    calls: int = CALLS
    traces: int = 0

    def __post_init__(self) -> None:
        @functools.wraps(self.program.step)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return self.program.step(*args, **kwargs)

        step.__name__ = step.__qualname__ = self.name
        self.step = step
        self.fn = jax.jit(step, **self.settings)

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"  {k}: {v}" for k, v in self.said.items())])

    @property
    def computes_in_half(self) -> bool:
        return "bfloat16" in self.said.get("dtype", "")

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the context in which the user calls the step."""
        with jax.set_mesh(self.mesh) if self.ambient else contextlib.nullcontext():
            yield

    def first_state(self) -> list[Any]:
        return self._placed(self.program.state)

    def call(self, fn: Callable, state: list[Any], n: int) -> tuple[Any, list[Any]]:
        """Make the n-th call of the step, by `fn`; return its result and all it was given."""
        inputs = self.program.inputs(n)
        if self.from_host:
            inputs = jax.tree.map(lambda leaf: np.array(leaf.value), inputs)
        else:
            inputs = self._placed(inputs)
        keywords = dict(self.program.static)
        given = [*state, *inputs]
        if self.by_keyword and inputs and self.program.last:
            *inputs, keywords[self.program.last] = inputs
        if self.bound:
            fn = functools.partial(fn, **self.program.static)
        with self.context():
            return fn(*state, *inputs, **keywords), given

    def fed_back(self, state: list[Any], result: Any) -> list[Any]:
        """Return the state of the next call."""
        results = self.program.results
        if results is None:
            return state
        if isinstance(results, int):
            results, result = (results,), (result,)
        pairs = (
            [(results[key], result[key]) for key in results]
            if isinstance(results, dict)
            else zip(results, result, strict=True)
        )
        new = list(state)
        for at, value in pairs:
            if at is not None and (apply := self.program.apply):
                applied = apply(jax.tree.map(np.asarray, state[at]), value)
                new[at] = jax.tree.map(
                    lambda v, old: jax.device_put(v, old.sharding), applied, state[at]
                )
            elif at is not None:
                new[at] = value
        return new

    def _placed(self, trees: list[Any]) -> list[Any]:
        return jax.tree.map(lambda leaf: leaf.placed(self.mesh), trees)


def draw(
    seed: int,
    *,
    alone: bool = False,
    among: Sequence[Callable[[World], Program]] = (),
    pod: bool = False,
    mixed: bool = False,
) -> Case:
    """Draw the step of a seed.

    Args:
        seed: the seed.
        alone: whether it runs on one device, on a mesh with the same axes, all of size 1.
        among: the programs to draw from, alike often; none for PROGRAMS by their weights.
        pod: whether its mesh is of H100s that are not there, to compile it for.
        mixed: whether one of the mesh's axes is automatic and the others are explicit; drawn too.
    """
    w = World(seed, alone=alone, pod=pod)
    weighted = [(maker, 1) for maker in among] or PROGRAMS
    makers, weights = zip(*weighted, strict=True)
    chances = [n / sum(weights) for n in weights]
    maker = makers[int(w.rng("program").choice(len(makers), p=chances))]
    if mixed or (maker in MAY_BE_EXPLICIT and w.rng("explicit").random() < 0.2):
        w.explicit, w.said["explicit"] = True, "yes"
        if len(w.sizes) > 1 and (mixed or w.rng("mixed").random() < MIXED_CHANCE):
            w.automatic = frozenset((w.pick("automatic", [*w.sizes]),))
    calls = CALLS
    if maker in TYPED:
        typed.draw_axes(w)
        calls = w.pick("calls", (1, 1, 2))
    mesh = w.mesh()
    with jax.set_mesh(mesh) if w.ambient else contextlib.nullcontext():
        program = maker(w)
    settings, stated = _settings(w, program, mesh)
    return Case(
        name=f"{maker.__name__}_{seed}",
        mesh=mesh,
        program=program,
        settings=settings,
        built=lambda alone: draw(seed, alone=alone, among=among, pod=pod, mixed=mixed),
        said=w.said,
        ambient=w.ambient,
        by_keyword=not stated and w.chance("last input by name", 0.15),
        bound=bool(program.static) and w.chance("partial", 0.3),
        from_host=stated and None not in settings["in_shardings"] and w.chance("from hosts", 0.4),
        bare=not settings,
        calls=calls,
    )


def _settings(w: World, program: Program, mesh: Mesh) -> tuple[dict[str, Any], bool]:
    """Draw jit's settings; say whether in_shardings are among them, which rule out keywords."""
    settings: dict[str, Any] = {}
    if program.static:
        settings["static_argnames"] = tuple(program.static)
    if program.donated and program.state and w.chance("donates", 0.6):
        numbers = tuple(range(len(program.state)))
        settings["donate_argnums"] = numbers[:1] if w.chance("donates the first", 0.2) else numbers
    stated = not program.static and w.chance("in_shardings", 0.3)
    if stated:
        free = w.rng("in_shardings free")

        def at(tree: Any) -> Any:
            return None if free.random() < 0.15 else _shardings(tree, mesh)

        settings["in_shardings"] = tuple(map(at, [*program.state, *program.inputs(0)]))
    known = _results(program, mesh)
    kind = "closed" if stated else w.pick("out_shardings", ("open", "open", "partly", "closed"))
    if known is not None and kind != "open":
        settings["out_shardings"] = known if kind == "closed" else _opened(w, known)
    w.said["jit"] = ", ".join(settings) or "nothing"
    if settings:  # less optimized code compiles sooner
        settings["compiler_options"] = {"xla_backend_optimization_level": 0}
    return settings, stated


def _shardings(tree: Any, mesh: Mesh) -> Any:
    """Return NamedShardings, leaf by leaf; None for what nothing commits."""

    def one(leaf: Leaf) -> NamedSharding | None:
        return None if leaf.spec is None else NamedSharding(mesh, leaf.spec)

    return jax.tree.map(one, tree)


def _results(program: Program, mesh: Mesh) -> Any:
    """Return out_shardings that give states back as they came; None for what is not fed back."""

    def one(at: int | None) -> Any:
        return None if at is None else _shardings(program.state[at], mesh)

    results = program.results
    if isinstance(results, dict):
        return {key: one(at) for key, at in results.items()}
    return tuple(map(one, results)) if isinstance(results, tuple) else one(results)


def _opened(w: World, known: Any) -> Any:
    """Leave some of the shardings to XLA."""
    leaves, tree = jax.tree.flatten(known, is_leaf=lambda x: x is None)
    rng = w.rng("opened")
    return tree.unflatten([None if rng.random() < 0.4 else leaf for leaf in leaves])
