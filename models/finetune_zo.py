"""Fine-tune the GPT by forward passes alone, from a checkpoint of `models.train_gpt`.

python -m models.train_gpt --data 1 --model 1 --checkpoint out/gpt
python -m models.finetune_zo out/gpt --text other.txt --log out/zo.log

A run is its log: killed, and started again with the same options, it replays the log's scalars and
goes on as if nothing had been.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from jaxoverlap.train import arguments
from jaxoverlap.train import zeroth_order as zo
from models import checkpoint, gpt, tuned_weights, zo_blocks
from models.config import Config, Mistake
from models.layers import Layout, Weight, shard
from models.processes import console
from models.recipe import Recipe
from models.text import load_text, make_batch, text_batches
from models.trainer import command_of

PREFIX = 5  # positions, as MeZO's
LORA_SCALE = 2.0  # MeZO's alpha / rank = 16 / 8
# eps and learning rate of MeZO (arXiv 2305.17333, appendix), whose full rate is for large models.
PUBLISHED = {"full": (1e-3, 1e-6), "lora": (1e-2, 1e-4), "prefix": (1e-1, 1e-2)}


@dataclasses.dataclass(frozen=True)
class FineTune:
    """The configuration of a run of zeroth-order fine-tuning; each field is a flag."""

    checkpoint: Annotated[Path, typer.Argument(help="A directory of models.train_gpt.")]
    method: Annotated[str, Option(help="full, lora or prefix.")] = "full"
    text: Annotated[Path | None, Option(help="What to learn; default: the Python manual.")] = None
    log: Annotated[Path | None, Option(help="Keep scalars here, and resume from them.")] = None
    steps: int = 200
    batch: Annotated[int, Option(help="Over all devices.")] = 16
    seed: int = 0
    eps: Annotated[float | None, Option(help="Default: the method's published one.")] = None
    learning_rate: Annotated[float | None, Option(help="As eps.")] = None
    directions: int = 1
    pair: Annotated[bool, Option("--pair", help="Two devices, one for each sign.")] = False
    shards: Annotated[int, Option(help="Devices that share the batch.")] = 1
    model: Annotated[int, Option(help="Devices of each forward pass.")] = 1
    host: Annotated[bool, Option("--host", help="Stream layers from host memory.")] = False
    cut_log: Annotated[bool, Option("--cut-log", help="Cut a damaged log off there.")] = False
    weights: Annotated[Path | None, Option(help="Write tuned weights to this directory.")] = None

    def __post_init__(self) -> None:
        """Check all options together.

        Raises:
            Mistake: that names every one that cannot be.
        """
        if found := list(self.mistakes()):
            raise Mistake("; and ".join(found))

    def mistakes(self) -> Iterator[str]:
        """Yield the errors of the options."""
        if self.method not in PUBLISHED:
            yield f"method={self.method!r}: expected one of {', '.join(PUBLISHED)}"
            return
        fine = True
        for name, least in dict(steps=1, batch=1, shards=1, model=1, seed=0).items():
            try:
                arguments.whole(name, getattr(self, name), least)
            except ValueError as error:
                fine = False
                yield str(error)
        if fine and self.batch % self.shards:
            yield f"batch={self.batch}: expected a multiple of shards={self.shards}"
        try:
            self.transform()
        except ValueError as error:
            yield str(error)
        if self.log and self.log.is_dir():
            yield f"--log {self.log} is a directory; give a file"
        if self.weights and self.weights.exists():
            yield f"--weights {self.weights} exists; give the name of a new directory"
        if self.host and (self.method != "full" or self.model > 1):
            yield (
                f"--host with --method {self.method} and --model {self.model}: expected full and "
                "1, as streamed layers have no frozen parts and no tensor parallelism"
            )
        if self.cut_log and not self.log:
            yield "--cut-log without --log: give the log that is to be cut off"

    def transform(self) -> zo.Mezo:
        """Return the estimator."""
        eps, rate = PUBLISHED[self.method]
        eps = eps if self.eps is None else self.eps
        rate = rate if self.learning_rate is None else self.learning_rate
        return zo.mezo(eps=eps, lr=rate, directions=self.directions)

    def mesh(self) -> Mesh:
        """Return the devices: a pair, shards of the batch, and the model's own two axes."""
        sizes = (2 if self.pair else 1, self.shards, 1, self.model)
        count = int(np.prod(sizes))
        if count > len(jax.devices()):
            raise Mistake(
                f"pair, shards and model take {count} devices and JAX sees {len(jax.devices())}; "
                "ask for fewer, or on a CPU for more devices (jax_num_cpu_devices)"
            )
        devices = np.array(jax.devices()[:count], dtype=object).reshape(sizes)
        names = ("pair", "batch", *Config.AXES)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


class PrefixAttention(gpt.Attention):
    """Attention with PREFIX trainable keys and values, which all positions attend to."""

    def __init__(self, config: Any, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        super().__init__(config, mesh, rngs, layout)
        shape = (PREFIX, config.heads, config.hidden // config.heads)
        spec = P(None, config.AXES[1], None)
        self.prefix_k = Weight(config, mesh, rngs, spec, shape, 1.0)
        self.prefix_v = Weight(config, mesh, rngs, spec, shape, 0.02)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, length = q.shape[0], q.shape[1]

        def with_prefix(prefix: jax.Array, suffix: jax.Array) -> jax.Array:
            shape = (batch, *prefix.shape)
            prefixed = jnp.concatenate([jnp.broadcast_to(prefix, shape), suffix], axis=1)
            return shard(prefixed, self.mesh, self.at.heads)

        k, v = with_prefix(self.prefix_k(), k), with_prefix(self.prefix_v(), v)
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        seen = jnp.arange(length)[:, None] >= jnp.arange(PREFIX + length) - PREFIX
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(q.dtype)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v)


class PrefixBlock(gpt.Block):
    attention_type = PrefixAttention


class PrefixGPT(gpt.GPT):
    block = PrefixBlock


PREFIX_RECIPE = Recipe(Config, PrefixGPT, text_batches)


def configuration(options: FineTune) -> Config:
    """Return the configuration of the model in a checkpoint, with this run's text and batch.

    Raises:
        Mistake: if there is no checkpoint, or not of the GPT.
    """
    path = options.checkpoint / "config.json"
    if not path.exists():
        raise Mistake(
            f"{options.checkpoint}: no checkpoint of models.train_gpt there (no config.json); "
            "write one with `python -m models.train_gpt --checkpoint DIR`"
        )
    saved = json.loads(path.read_text())
    names = {field.name for field in dataclasses.fields(Config)}
    shape = ("layers", "hidden", "heads", "mlp", "vocab", "sequence", "dtype", "param_dtype")
    if not set(shape) <= saved.keys() & names:
        raise Mistake(f"{path}: not of the GPT of models.train_gpt, as it lacks some of {shape}")
    fields = {name: saved[name] for name in shape}
    changes: dict[str, Any] = dict(
        batch=options.batch,
        seed=options.seed,
        text=options.text,
        data=1,
        model=options.model,
        attention="xla",
    )
    return Config(**fields, **changes, steps=options.steps, plain=True)


def restored(options: FineTune, config: Config, mesh: Mesh) -> Any:
    """Return the newest checkpoint's parameters, placed on the mesh."""
    state, _ = gpt.RECIPE.abstract_args(config, mesh)
    with ocp.CheckpointManager(options.checkpoint.absolute()) as manager:
        taken = manager.latest_step()
        if taken is None:
            raise Mistake(f"{options.checkpoint}: no finished checkpoint there; train longer first")
        return checkpoint.restored(manager, taken, state)["params"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A training target: parameters, their loss, and how they make a full model's.

    Attributes:
        trained, frozen: the parameters that move, and what the loss takes beside.
        loss: (trained, batch, frozen) -> loss; of trained and batch alone, as blocks, to stream.
    """

    trained: Any
    frozen: Any
    loss: Callable[..., jax.Array]

    @property
    def rest(self) -> tuple[Any, ...]:
        """Return what the loss takes after the trained parameters and the batch."""
        return () if isinstance(self.loss, zo.Blocks) else (self.frozen,)


def task_of(options: FineTune, config: Config, mesh: Mesh, params: Any) -> Task:
    """Return the training target of a method, given a checkpoint's parameters."""
    if options.method == "prefix":
        loss = loss_of(PREFIX_RECIPE, config, mesh)
        with_prefix = PREFIX_RECIPE.init_state(config, mesh, options.seed)["params"]
        trained, _ = zo.split(with_prefix, lambda path: "prefix" in path)
        _, nothing = zo.split(with_prefix, lambda path: True)
        known = {
            jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)
        }
        frozen = jax.tree.map_with_path(
            lambda path, leaf: known.get(jax.tree_util.keystr(path)), nothing, is_leaf=_is_none
        )
        return Task(trained, frozen, zo.of_part(loss))
    if options.host:
        model = zo_blocks.blocks_of(gpt.RECIPE, config, mesh)
        return Task(zo_blocks.in_blocks(params), None, model)
    loss = loss_of(gpt.RECIPE, config, mesh)
    if options.method == "full":
        return Task(params, None, lambda params, batch, _: loss(params, batch))
    adapters = zo.lora(
        params, rank=8, where=lambda path: "['q']" in path or "['v']" in path, inputs=2
    )
    # a's are drawn alike everywhere.
    return Task(adapters, params, zo.of_adapters(loss, scale=LORA_SCALE))


def loss_of(recipe: Recipe, config: Config, mesh: Mesh) -> Callable[..., jax.Array]:
    """Return a model's loss as a function of its parameters, without other metrics."""
    both = recipe.make_loss(config, mesh)
    return lambda params, batch: both(params, batch)[0]


def _is_none(leaf: Any) -> bool:
    return leaf is None


def step_of(options: FineTune, task: Task, mesh: Mesh) -> zo.ZOStep:
    """Return the train step that the options name."""
    return zo.step(
        task.loss,
        options.transform(),
        mesh,
        perturb="pair" if options.pair else None,
        data="batch" if options.shards > 1 else None,
        host=options.host,
    )


def finetune(options: FineTune) -> tuple[list[float], Any, Any]:
    """Fine-tune; return each step's loss, the trained parameters, and the frozen ones."""
    mesh, config = options.mesh(), configuration(options)
    task = task_of(options, config, mesh, restored(options, config, mesh))
    transform, step = options.transform(), step_of(options, task, mesh)
    state = step.init(task.trained, seed=options.seed)
    header = header_of(options, config, transform, state.params, task)
    text = load_text(options.text, sequence=config.sequence)[: -held_out(options, config)]
    losses: list[float] = []
    with zo.Log(options.log, header, cut=options.cut_log) if options.log else _NoLog() as log:
        if log.steps:
            console.print(f"replaying {log.steps} of {options.steps} steps")
            records = log.records[: options.steps]
            if options.host:
                state = zo_blocks.replayed(step, records, state.params, options.seed)
            else:
                state = zo.replay(records, transform, state.params, seed=options.seed)
        with _progress() as bar:
            shown = bar.add_task("compiling", total=options.steps, completed=int(state.step))
            began = time.perf_counter()
            for number in range(int(state.step), options.steps):
                state, metrics = step(state, make_batch(text, config, number), *task.rest)
                log.add(metrics)
                losses.append(float(metrics["loss"]))
                now = time.perf_counter()
                words = f"loss {losses[-1]:.3f}  {config.tokens / (now - began):,.0f} tokens/s"
                bar.update(shown, completed=number + 1, description=words)
                began = now
    return losses, step.params(state), task


def header_of(
    options: FineTune, config: Config, transform: zo.Mezo, trained: Any, task: Task
) -> Any:
    """Return the header of a run's log: everything that its scalars depend on, except the mesh."""
    text = load_text(options.text, sequence=config.sequence)
    run = dict(
        method=options.method,
        batch=options.batch,
        sequence=config.sequence,
        dtype=config.dtype,
        text=zo.digest(text),
        frozen=zo.digest(task.frozen),
    )
    return zo.header_of(trained, transform, seed=options.seed, run=run)


def whole_params(options: FineTune, trained: Any, task: Task) -> Any:
    """Return the full model's parameters, with the trained ones in them.

    Those of "full" and "lora" are `models.train_gpt`'s; those of "prefix" have the prefixes too.
    """
    if options.host:
        return zo_blocks.of_blocks(trained)
    if options.method == "full":
        return trained
    if options.method == "prefix":
        return zo.joined(trained, task.frozen)
    return zo.adapted(task.frozen, trained, scale=LORA_SCALE)


def tuned_by(options: FineTune) -> dict[str, Any]:
    """Return the metadata that is written with the weights."""
    return dict(method=options.method, checkpoint=str(options.checkpoint), steps=options.steps)


def held_out(options: FineTune, config: Config) -> int:
    """Return the number of held-out bytes at the text's end: a tenth, at least a sequence."""
    length = len(load_text(options.text, sequence=config.sequence))
    return max(length // 10, config.sequence + 1)


def evaluate(options: FineTune, trained: Any, task: Task, batches: int = 8) -> float:
    """Return the loss on the held-out end of the text.

    Of streamed layers it is the mean of the losses at +eps and -eps, of steps that are dropped.
    """
    mesh, config = options.mesh(), configuration(options)
    text = load_text(options.text, sequence=config.sequence)[-held_out(options, config) :]
    config = dataclasses.replace(config, seed=10**6)
    at = NamedSharding(mesh, P())
    held = [jax.device_put(make_batch(text, config, number), at) for number in range(batches)]
    if options.host:
        step = step_of(options, task, mesh)
        state = step.init(trained, seed=options.seed)
        return float(np.mean([step(state, batch)[1]["loss"] for batch in held]))
    loss = jax.jit(task.loss)
    return float(np.mean([loss(trained, batch, *task.rest) for batch in held]))


class _NoLog:
    """A log that discards its entries."""

    steps, records = 0, np.zeros((0, 2), np.float32)

    def add(self, metrics: Any) -> None: ...

    def __enter__(self) -> _NoLog:
        return self

    def __exit__(self, *_: object) -> None: ...


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def run(options: FineTune) -> None:
    """Fine-tune, write the weights, and print the loss on the held-out text before and after."""
    try:
        jax.config.update("jax_num_cpu_devices", max(8, 2 * options.shards * options.model))
        _, params, task = finetune(options)
        if options.weights:
            whole = whole_params(options, params, task)
            tuned_weights.write(options.weights, whole, tuned_by(options))
        before, after = evaluate(options, task.trained, task), evaluate(options, params, task)
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from error
    console.print(f"loss on the text's held-out end: {before:.4f} -> {after:.4f}")


app = command_of(
    FineTune, lambda options, _: run(options), "Fine-tune a GPT by forward passes alone."
)

if __name__ == "__main__":
    app()
