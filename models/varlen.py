"""Train the long-context GPT on documents of their own lengths: what `--varlen` runs."""

import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.device.fused import has_kernel
from models import gpt
from models.attention import uses_cudnn
from models.config import Mistake
from models.layers import rotate, run_stack, shard
from models.long_context import BY_SEQUENCE, Config
from models.loop import Trainer, overlapped
from models.processes import console
from models.recipe import Batch, Recipe, make_optimizer

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
PICTURE = Path("out/varlen_plan.png")
FIT_STEPS = 24  # of the run's own: the sample that the programs are chosen over
ROOM = 1.25  # attention's slots of a device over its share of the tokens


class Attention(gpt.Attention):
    """The GPT's attention within documents, with positions that start at 0 in each."""

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:  # type: ignore[override]
        mesh, heads = self.mesh, self.at.heads
        weights = self.q(), self.k(), self.v()
        q, k, v = (shard(self.einsum("bsd,dnh->bsnh", x, w), mesh, heads) for w in weights)
        q, k = (shard(rotate(y, positions), mesh, heads) for y in (q, k))
        attended = shard(attend(q, k, v), mesh, heads)
        return shard(self.einsum("bsnh,nhd->bsd", attended, self.out()), mesh, self.at.stream)


class Block(gpt.Block):
    """The GPT's layer, with this attention."""

    attention_type = Attention

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:  # type: ignore[override]
        attention: Any = self.attention
        attended = attention(self.attention_norm(x), positions, attend)
        x = shard(x + attended, self.mesh, self.at.stream)
        return shard(x + self.mlp(self.mlp_norm(x)), self.mesh, self.at.stream)


class Documents(gpt.GPT):
    """The GPT on tokens in a plan's order, [node, token]."""

    block, at = Block, BY_SEQUENCE

    def sum_of_losses(self, batch: Batch, attend: Attend) -> jax.Array:
        """Return the cross-entropy of the next byte in nats, summed over all tokens."""
        table = self.embedding()
        x = self.embed(batch["inputs"], table)
        logits = self.score(run_stack(self.layers, x, batch["positions"], attend), table)
        hot = jax.nn.one_hot(batch["targets"], logits.shape[-1], dtype=logits.dtype)
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1)
        return jnp.sum(losses * batch["weights"])


class DocumentsTrainer(Trainer):
    """Training on documents; a step has as many as fit in `step_tokens`."""

    def __init__(self, recipe: Recipe, config: Any):
        super().__init__(Recipe(Config, Documents, recipe.batches), config)

    def make_step(self) -> varlen.VarlenStep:
        step, self._planner = make_step(self.recipe, self.config, self.mesh)
        self._plan: varlen.BatchPlan | None = None
        return step

    def batches(self, state: Any, begin: int) -> Iterator[Any]:
        """Yield documents, after choosing and compiling the programs for a sample of them."""
        documents = Sources(self.config)
        sample = [documents.lengths(index) for index in range(FIT_STEPS)]
        self._planner.fit(sample)
        used = {self._planner(lengths).bounds for lengths in sample}
        self.step.compile(used, state, tokens_of(documents.of_step(begin)))
        return map(documents.of_step, itertools.count(begin))

    def take(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        self._plan = plan = self._planner([len(text) - 1 for text in batch])
        state, metrics = self.step(state, plan, tokens_of(batch))
        return state, metrics | dict(balance=plan.balance, programs=len(self.step.compiled))

    def check(self, state: Any) -> None:
        self.step.check()

    def finished(self, state: Any) -> Any:
        if self._plan is not None:
            console.print(str(self._plan))
            if jax.process_index() == 0:
                PICTURE.parent.mkdir(parents=True, exist_ok=True)
                self._plan.draw(PICTURE)
                console.print(f"the last batch's plan: {PICTURE}")
        return state


def make_step(
    recipe: Recipe, config: Config, mesh: Mesh
) -> tuple[varlen.VarlenStep, varlen.Planner]:
    """Return the step and the planner of its batches."""
    if config.longest >= config.step_tokens:
        raise Mistake(
            f"longest={config.longest} with step_tokens={config.step_tokens}: a document must fit "
            "in a step; change one of them"
        )
    cluster = config.prices or f"h100-sxm:{config.data}x{config.context}"
    fused = {"auto": None, "xla": False, "cudnn": True}[config.attention]
    if uses_cudnn(config, mesh) and fused and not has_kernel(mesh):
        raise Mistake(
            "attention='cudnn' with varlen: its kernel is for Hopper and later GPUs; give 'xla'"
        )
    try:
        costs = varlen.attention_costs(
            cluster, heads=config.heads, head_size=config.head_size, mlp=config.mlp, fused=fused
        )
    except ValueError as error:
        raise Mistake(f"--prices {cluster}: {error}") from error
    capacity = round(ROOM * config.step_tokens / mesh.size)
    planner = varlen.Planner(costs, varlen.Nodes(config.data, config.context), capacity=capacity)
    definition, _ = nnx.split(nnx.eval_shape(lambda: recipe.model(config, mesh, nnx.Rngs(0))))

    def loss(params: Any, batch: Batch, attend: Attend) -> jax.Array:
        model: Any = nnx.merge(definition, params)
        return model.sum_of_losses(batch, attend)

    step = varlen.train_step(
        loss,
        make_optimizer(config),
        mesh,
        costs=costs,
        fused=fused,
        transform=lambda step: overlapped(step, config),
    )
    return step, planner


class Sources:
    """Documents in a random order from the seed: the files under a folder, as bytes."""

    def __init__(self, config: Config):
        folder = config.documents or Path(sysconfig.get_paths()["stdlib"])
        self._paths = sorted(p for p in folder.glob("**/*.py" if not config.documents else "**/*")
                             if p.is_file() and "site-packages" not in p.parts)  # fmt: skip
        # The last byte has no successor to predict, so a file of one byte has nothing to learn.
        self._sizes = np.array([p.stat().st_size for p in self._paths], dtype=np.int64)
        self._paths = [p for p, size in zip(self._paths, self._sizes, strict=True) if size > 1]
        self._sizes = self._sizes[self._sizes > 1]
        if not self._paths:
            raise Mistake(
                f"--documents {folder}: no files of two bytes or more there; expected some of text"
            )
        self._config = config

    def of_step(self, index: int) -> list[np.ndarray]:
        """Return the documents of a step, u8[bytes] each, from two bytes to `longest`.

        Of the seed and the step alone, so that a run that resumes sees the same.
        """
        most = self._config.longest + 1
        texts = (self._paths[i].read_bytes()[:most] for i in self._chosen(index))
        return [np.frombuffer(text, np.uint8) for text in texts]

    def lengths(self, index: int) -> list[int]:
        """Return the tokens of each document of a step, without reading any."""
        return [self._tokens(i) for i in self._chosen(index)]

    def _tokens(self, number: int) -> int:
        return int(min(self._sizes[number] - 1, self._config.longest))

    def _chosen(self, index: int) -> list[int]:
        """Return the indices of a step's documents."""
        rng = np.random.default_rng((self._config.seed, index))
        chosen, left = [], self._config.step_tokens
        while True:
            number = int(rng.integers(len(self._paths)))
            left -= self._tokens(number)
            if left < 0:
                return chosen
            chosen.append(number)


def tokens_of(texts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the concatenated inputs and targets of documents."""
    return dict(
        inputs=np.concatenate([text[:-1] for text in texts]).astype(np.int32),
        targets=np.concatenate([text[1:] for text in texts]).astype(np.int32),
    )
