"""Train in rounds of local updates: what `--local-updates co2 --every 12` runs."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxoverlap import train as algorithms
from jaxoverlap.train import LocalState, LocalUpdates, Outer
from models.compressed import stacked_in, sync_of
from models.config import Mistake, Run
from models.loop import WorkersTrainer, placed


def outer_of(config: Run) -> Outer:
    """Return the outer optimizer that the flags name, with its published settings or the flags'."""
    every, rate = config.every, config.learning_rate
    sgd = dict(learning_rate="outer_rate", momentum="outer_momentum")
    # Of each algorithm: what makes it, what it is given here, and its arguments that are flags.
    known: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
        "local_sgd": (algorithms.local_sgd, {}, {}),
        "slowmo": (algorithms.slowmo, dict(inner_learning_rate=rate), sgd),
        "overlap_local_sgd": (algorithms.overlap_local_sgd, {}, dict(momentum="outer_momentum")),
        "diloco": (algorithms.diloco, {}, sgd),
        "eager_diloco": (algorithms.eager_diloco, {}, sgd),
        "streaming_diloco": (
            algorithms.streaming_diloco,
            dict(fragments=2, delay=every // (config.fragments or 2)),
            sgd | dict(fragments="fragments"),
        ),
        "co2": (algorithms.co2, {}, sgd | dict(staleness="staleness")),
    }
    name = config.local_updates
    if name not in known:
        raise Mistake(f"--local-updates {name}: expected one of {', '.join(known)}")
    make, given, flags = known[name]
    for flag in ("outer_rate", "outer_momentum", "staleness", "fragments"):
        if getattr(config, flag) is not None and flag not in flags.values():
            raise Mistake(f"--{flag.replace('_', '-')}: {name} has no such setting; leave it out")
    chosen = {
        argument: getattr(config, flag)
        for argument, flag in flags.items()
        if getattr(config, flag) is not None
    }
    try:
        return make(every=every, **(given | chosen))
    except ValueError as error:
        raise Mistake(f"--local-updates {name}: {error}") from error


class RoundsTrainer(WorkersTrainer):
    """Training in rounds; a row of metrics is a round, averaged over its steps and the workers."""

    def make_step(self) -> LocalUpdates:
        config, outer = self.config, outer_of(self.config)
        self.span = config.every
        return LocalUpdates(
            self.recipe.make_step(config, self.mesh),
            self.mesh,
            axis="worker",
            outer=outer,
            shard_outer=not (outer.eager or config.compress),
            sync=sync_of(config) if config.compress else None,
            stacked=stacked_in(self.initial()["params"]) if config.compress else (),
            overlap=not (config.plain or config.ops),
        )

    def init(self) -> LocalState:
        return self.step.init(super().init())

    def initial(self) -> Any:
        return self.recipe.abstract_args(self.config, self.mesh)[0]

    def differing(self, shapes: Any) -> Any:
        return shapes["worker"]

    def batches(self, state: Any, begin: int) -> Iterator[Any]:
        batch_of, rows = self.recipe.batches(self.config), slice(0, self.config.batch)
        for first in itertools.count(begin, self.span):
            every = [batch_of(index, rows) for index in range(first, first + self.span)]
            stacked = jax.tree.map(lambda *b: np.stack(b), *every)
            yield placed(stacked, self.mesh, P(None, "worker"))

    def take(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        state, metrics = self.step.round(state, batch)
        return state, jax.tree.map(jnp.mean, metrics)

    def check(self, state: Any) -> None:
        self.step.check(state)

    def finished(self, state: Any) -> Any:
        return dict(params=self.step.params(state))
