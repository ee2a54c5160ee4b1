"""Train with compressed gradients: what `--compress lgreco:powersgd:4` runs."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxoverlap.train import compression
from models.config import Mistake, Run
from models.loop import WorkersTrainer, placed
from models.processes import console
from models.recipe import make_optimizer

COMPRESSORS = dict(powersgd=compression.power_sgd, qsgd=compression.qsgd, topk=compression.top_k)
CHOOSERS = ("uniform", "accordion", "lgreco", "lgreco-accordion")


def sync_of(config: Run) -> compression.Sync:
    """Return the synchronisation that `--compress [CHOOSER:]COMPRESSOR[:SETTING]` names."""
    text = config.compress or "none"
    parts = text.split(":")
    chooser = parts.pop(0) if parts[0] in CHOOSERS else "uniform"
    name, *setting = parts or [""]
    if name not in (*COMPRESSORS, "none") or len(setting) > (name != "none"):
        raise Mistake(
            f"--compress {text}: expected [CHOOSER:]COMPRESSOR[:SETTING], as lgreco:powersgd:4, "
            f"with one of {', '.join(CHOOSERS)} and of {', '.join(COMPRESSORS)}, none"
        )
    # Outer gradients come seldom: what rounding loses is kept for the next one.
    feeds = dict(error_feedback=True) if name == "qsgd" and config.local_updates else {}
    try:
        if name == "none":
            compressor = compression.none()
        else:
            number = float if name == "topk" else int
            compressor = COMPRESSORS[name](*map(number, setting), **feeds)  # type: ignore[operator]
        when: dict[str, Any] = dict(every=config.compress_every, seed=config.seed)
        switch = compression.accordion
        return {
            "uniform": lambda: compression.uniform(compressor, seed=config.seed),
            "accordion": lambda: switch(compressor, **when),
            "lgreco": lambda: compression.lgreco(compressor, **when),
            "lgreco-accordion": lambda: compression.lgreco(switch(compressor), **when),
        }[chooser]()
    except ValueError as error:
        raise Mistake(f"--compress {text}: {error}") from error


def stacked_in(params: Any) -> tuple[str, ...]:
    """Return the key below which a model's layers are stacked, if it has one."""
    return ("layers",) if "layers" in params else ()


class CompressedTrainer(WorkersTrainer):
    """Training by compressed data parallelism over the mesh axis `worker`."""

    def make_step(self) -> compression.DataParallel:
        config = self.config
        return compression.data_parallel(
            jax.value_and_grad(self.recipe.make_loss(config, self.mesh), has_aux=True),
            make_optimizer(config),
            self.mesh,
            axis="worker",
            sync=sync_of(config),
            stacked=stacked_in(self.initial()),
            overlap=not (config.plain or config.ops),
        )

    def init(self) -> compression.TrainState:
        return self.step.init(super().init()["params"])

    def initial(self) -> Any:
        return self.recipe.abstract_args(self.config, self.mesh)[0]["params"]

    def differing(self, shapes: Any) -> Any:
        return shapes["sync"]["error"], shapes["sync"]["accumulated"]

    def batches(self, state: Any, begin: int) -> Iterator[Any]:
        batch_of, rows = self.recipe.batches(self.config), slice(0, self.config.batch)
        for index in itertools.count(begin):
            yield placed(batch_of(index, rows), self.mesh, P("worker"))

    def take(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        state, (loss, others) = self.step(state, batch)
        return state, dict(loss=loss, **others)

    def check(self, state: Any) -> None:
        self.step.check()

    def finished(self, state: Any) -> Any:
        if jax.process_index() == 0 and not console.quiet:
            print(self.step.explain(state))
        return dict(params=state.params)
