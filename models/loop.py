"""The loop that all trainers share, from the newest checkpoint to the last step.

A trainer of one kind (of steps, compressed steps, rounds, documents) is a subclass that says how a
state begins, what the batches are, and what taking one does.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from models.checkpoint import Checkpoints
from models.config import Mistake, Run
from models.feed import feed
from models.processes import console, within_s
from models.recipe import Recipe
from models.report import Report

PROFILE = Path("out/profile")


class Trained(NamedTuple):
    """The results of training: metrics of each step taken here, the step, the last state."""

    rows: list[dict[str, float]]
    step: Any
    state: Any


class Trainer:
    """Training by a recipe's own step; the base of the other kinds.

    Attributes:
        recipe, config, mesh: what is trained, how, and on which devices.
        step: what takes a batch.
        span: steps that a batch is for.
    """

    span: int = 1
    config: Any
    step: Any

    def __init__(self, recipe: Recipe, config: Run):
        self.recipe, self.config, self.mesh = recipe, config, recipe.make_mesh(config)
        self.step = self.make_step()

    def make_step(self) -> Any:
        """Return what takes a batch."""
        return overlapped(self.recipe.make_step(self.config, self.mesh), self.config)

    def init(self) -> Any:
        """Return the state of a run that begins."""
        return self.recipe.init_state(self.config, self.mesh, self.config.seed)

    def restored(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        """Return the newest checkpoint's state and its step; (None, 0) without one."""
        return checkpoints.restore(self.recipe.abstract_args(self.config, self.mesh)[0])

    def batches(self, state: Any, begin: int) -> Iterator[Any]:
        """Yield the batches of a run that goes on from a step."""
        return feed(self.recipe, self.config, self.mesh, begin)

    def take(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the state after a batch, and the metrics of a row."""
        return self.step(state, batch)

    def check(self, state: Any) -> None:
        """Wait for all that was taken, and raise if something of it was left out."""

    def finished(self, state: Any) -> Any:
        """Return the state to hand out, {"params", ...}, after saying what there is to say."""
        return state

    def train(self) -> Trained:
        """Train to `config.steps` steps, or to the end of the batch that has the last."""
        config, span = self.config, self.span
        with Checkpoints(config) as checkpoints, jaxoverlap.lost_named(within_s(config)):
            state, begin = self.restored(checkpoints)
            if state is None:
                state = self.init()
            else:
                console.print(f"resuming after step {begin} of {config.steps}")
            batches = self.batches(state, begin)
            with Report(self.recipe, config, self.mesh, begin) as report:
                indices, trials = range(begin, config.steps, span), trial_steps(self.step)
                for index, batch in zip(indices, batches, strict=False):
                    with profiled(index - begin, config):
                        state, metrics = self.take(state, batch)
                    before, trials = trials, trial_steps(self.step)
                    # Fetches the metrics of the batch before.
                    report.add(index + span - 1, metrics, trial=trials > before)
                    checkpoints.save(index + span, state, span)
                self.check(state)
            state = self.finished(state)
        return Trained(report.rows, self.step, state)


def trial_steps(step: Any) -> int:
    """Return how many steps were trials so far, of a step that `overlap` starts at once."""
    return sum(record.trial_steps for record in getattr(step, "trials", ()))


class WorkersTrainer(Trainer):
    """Training by several workers, whose step can go on with another number of them."""

    def initial(self) -> Any:
        """Return the shapes of what the step makes a state of."""
        raise NotImplementedError

    def differing(self, shapes: Any) -> Any:
        """Return the leaves of a checkpoint's state that have a dim of workers."""
        raise NotImplementedError

    def restored(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        """Return the newest checkpoint's state, also of another number of workers, and its step."""
        if (newest := checkpoints.newest()) is None:
            return None, 0
        taken, shapes = newest
        leaves = jax.tree.leaves(self.differing(shapes))
        workers = leaves[0].shape[0] if leaves else None
        like = self.step.abstract(self.initial(), workers=workers)
        found = checkpoints.restore_state(taken, like)
        if workers not in (None, self.step.workers):
            found = self.step.spread(self.step.consolidate(found))
        return found, taken


def overlapped(step: Any, config: Run) -> Any:
    """Overlap a step with the configuration's options; every process follows process 0's plan."""
    if config.plain or config.ops:
        return step
    if config.plan:
        path = config.plan
        try:
            plan = jaxoverlap.agreed(lambda: jaxoverlap.Plan.read(path))
        except (OSError, ValueError) as error:
            raise Mistake(f"--plan {path}: {error}") from error
        return jaxoverlap.overlap(step, plan=plan)
    try:
        return jaxoverlap.overlap(step, halves=config.halves or "auto", memory=config.memory)
    except ValueError as error:  # of --memory, as --halves is checked before
        raise Mistake(str(error)) from error


@contextlib.contextmanager
def profiled(index: int, config: Run) -> Iterator[None]:
    """Profile the number of steps in `config.profile`, from the second step on."""
    if not 1 <= index <= config.profile:
        yield
        return
    with contextlib.ExitStack() as stack:
        if index == 1:
            jax.profiler.start_trace(str(PROFILE))
        stack.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=index))
        yield
    if index == config.profile:
        jax.effects_barrier()
        jax.profiler.stop_trace()
        console.print(f"traced {index} steps: {PROFILE}")


def placed(batch: Any, mesh: Mesh, spec: P) -> Any:
    """Shard a batch over the mesh; every process makes the full batch and uses its part."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda rows: jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index]),
        batch,
    )
