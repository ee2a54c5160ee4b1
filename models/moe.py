"""A mixture-of-experts GPT: experts and batch are split over one axis, as in GShard.

The mesh has two axes. Both split the batch; "data" also splits the hidden dim of every weight
(FSDP), and "expert" the experts and the other weights' second dim. Attention knows nothing of
other devices. A token goes to the devices of its two experts and comes back:

    activation          shape                                sharding
    residual stream     [batch, sequence, hidden]            (("data", "expert"), None, None)
    q, k, v, scores     [batch, ...]                         (("data", "expert"), ...)
    tokens              [group, token, hidden]               (("data", "expert"), None, None)
    dispatch, combine   [group, token, expert, slot]         (("data", "expert"), None, None, None)
    at the experts      [expert, group, slot, hidden or mlp] ("expert", "data", None, None)

Experts serve groups of tokens, not all of them at once: a matmul with the dispatch mask costs as
much for each token as its group has slots. An expert has `capacity` slots for a group; a token that
finds them taken passes by on the residual stream (Lepikhin et al., arXiv:2006.16668). As first
choices go before second ones, a slot may be taken by a token that comes later in the text: what
attention hides of the future shows there.

To choose is to jump: where two experts suit a token equally but for a rounding, sums in another
order send it elsewhere, and runs that agreed to seven digits differ in the fourth soon after.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from typer import Option

from models import gpt, ragged
from models.config import TextRun
from models.layers import Layout, Weight, cross_entropy, einsum_of, run_stack, shard, wide
from models.recipe import Recipe
from models.text import text_batches

BOTH = ("data", "expert")
ROWS = P(BOTH, None, None, None)
BY_BATCH = Layout(stream=P(BOTH, None, None), heads=ROWS, scores=ROWS, inner=P(BOTH, None, None))
AT_EXPERTS = P("expert", "data", None, None)
DISPATCH = ("slots", "ragged")


@dataclass(frozen=True)
class Config(TextRun):
    """The mixture's configuration; the defaults train in seconds on a CPU."""

    AXES = ("data", "expert")
    FROM_0 = TextRun.FROM_0 | {"balance"}

    experts: int = 8
    choices: Annotated[int, Option(help="Experts a token goes to.")] = 2
    group: Annotated[int, Option(help="Tokens that share an expert's slots.")] = 64
    slack: Annotated[float, Option(help="Slots, relative to an even load.")] = 2.0  # small groups
    dispatch: Annotated[str, Option(help="slots, as in GShard, or ragged: none is dropped.")] = (
        "slots"
    )
    balance: Annotated[float, Option(help="Weight of the load-balancing loss.")] = 1e-2
    mlp: Annotated[int, Option(help="Of each expert.")] = 128
    data: Annotated[int, Option(help="Mesh axis: batch and FSDP.")] = 2
    expert: Annotated[int, Option(help="Mesh axis: batch and experts.")] = 4
    configuration: Annotated[
        Path | None, Option(help="A file of `jaxoverlap configure --json`: its first mesh.")
    ] = None
    pipeline_order: Annotated[str, Option(help="Of its pipeline: 1F1B or ZB-H1.")] = "1F1B"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.dispatch not in DISPATCH:
            yield f"dispatch={self.dispatch!r}: expected one of {', '.join(DISPATCH)}; give one"
        if self.choices > self.experts:
            yield (
                f"choices={self.choices} with experts={self.experts}: a token goes to 1 or more "
                "different experts; change one of them"
            )

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        yield from super().divisors()
        yield "experts", "expert", self.expert
        yield "batch", "data x expert", self.data * self.expert
        yield "sequence", "group", self.group

    def used(self, path: str) -> float:
        """Return the share of a weight that a token uses: choices/experts for experts, else 1."""
        of_experts = "mlp" in path and ("up" in path or "down" in path)
        return self.choices / self.experts if of_experts else 1.0

    @property
    def capacity(self) -> int:
        """Return the number of slots of an expert for each group."""
        return math.ceil(self.slack * self.choices * self.group / self.experts)

    @classmethod
    def pod(cls, *, data: int = 1, expert: int = 8, **changes: Any) -> "Config":
        """Four layers of Mixtral 8x7B's sizes (arXiv:2401.04088), one sequence of 4096 a GPU."""
        sizes = dict(hidden=4096, heads=32, mlp=14336, sequence=4096, group=1024, slack=1.25)
        return cls.sized(
            sizes | dict(data=data, expert=expert, batch=data * expert, experts=expert), changes
        )


def route(probabilities: jax.Array, choices: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Assign every token to a slot of each of its best experts, up to the experts' capacity.

    Args:
        probabilities: [group, token, expert].

    Returns:
        Whether a token has a slot, and the weight of what the expert there will say of it;
        [group, token, expert, slot] each. A token's weights sum to 1 where it found all its slots.
    """
    left, taken = probabilities, jnp.zeros_like(probabilities[:, :1])
    dispatch = combine = jnp.zeros((*left.shape, capacity), left.dtype)
    total = jnp.zeros((*left.shape[:2], 1, 1), left.dtype)
    for _ in range(choices):  # all first choices are served before any second one
        chosen = jax.nn.one_hot(jnp.argmax(left, -1), left.shape[-1], dtype=left.dtype)
        before = jnp.cumsum(chosen, axis=1) - chosen + taken  # how many were here earlier
        place = jnp.sum(before * chosen, -1).astype(jnp.int32)
        slot = jax.nn.one_hot(place, capacity, dtype=left.dtype)  # all zero beyond the last
        slot = chosen[..., None] * slot[..., None, :]
        gate = jnp.sum(probabilities * chosen, -1)[..., None, None]
        dispatch, combine, total = dispatch + slot, combine + gate * slot, total + gate
        taken = taken + jnp.sum(chosen, axis=1, keepdims=True)
        left = jnp.where(chosen > 0, -1.0, left)
    return dispatch, combine / total


class Experts(nnx.Module):
    """A mixture of MLPs, with the router that chooses a few for each token."""

    router_at, up_at, down_at = (
        P("data", "expert"),
        P("expert", "data", None),
        P("expert", None, "data"),
    )
    tokens_at, mask_at = BY_BATCH.stream, ROWS  # [group, token, ...], and with experts and slots
    there_at = inner_at = AT_EXPERTS

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        experts, hidden, mlp = config.experts, config.hidden, config.mlp
        back = (2 * config.layers * mlp) ** -0.5

        def weight(spec, *shape, std):
            return Weight(config, mesh, rngs, spec, shape, std)

        self.router = weight(self.router_at, hidden, experts, std=hidden**-0.5)
        self.up = weight(self.up_at, experts, hidden, mlp, std=hidden**-0.5)
        self.down = weight(self.down_at, experts, mlp, hidden, std=back)
        self.config, self.mesh, self.at, self.einsum = config, mesh, layout, einsum_of(config)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [batch, sequence, hidden] -> the same shape, and each group's load-balancing loss."""
        config, mesh = self.config, self.mesh
        tokens = shard(x.reshape(-1, config.group, config.hidden), mesh, self.tokens_at)
        dtype = wide(x.dtype)
        logits = self.einsum("gsd,de->gse", tokens, self.router(), preferred_element_type=dtype)
        logits = shard(logits, mesh, self.tokens_at)
        probabilities = shard(jax.nn.softmax(logits), mesh, self.tokens_at)
        if config.dispatch == "ragged":
            y = self.sent(x, probabilities.reshape(*x.shape[:2], -1))
            return shard(y, mesh, self.at.stream), uneven(probabilities)
        dispatch, combine = route(probabilities, config.choices, config.capacity)
        dispatch = shard(dispatch.astype(x.dtype), mesh, self.mask_at)
        combine = shard(combine.astype(x.dtype), mesh, self.mask_at)

        there = shard(self.einsum("gsec,gsd->egcd", dispatch, tokens), mesh, self.there_at)
        inner = shard(self.activated(there), mesh, self.inner_at)
        answer = shard(self.einsum("egcf,efd->egcd", inner, self.down()), mesh, self.there_at)
        y = shard(self.einsum("gsec,egcd->gsd", combine, answer), mesh, self.tokens_at)
        return shard(y.reshape(x.shape), mesh, self.at.stream), uneven(probabilities)

    def sent(self, x: jax.Array, probabilities: jax.Array) -> jax.Array:
        """Send every token to its experts and back: x [batch, sequence, hidden] -> the same."""
        weights, chosen = jax.lax.top_k(probabilities, self.config.choices)
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        mixed = ragged.experts(self.mesh, axis="expert", activation=jax.nn.gelu)
        return mixed(x, weights, chosen, self.up(), self.down())

    def activated(self, there: jax.Array) -> jax.Array:
        """Return the experts' hidden activations [expert, group, slot, mlp] of their tokens."""
        inner = self.einsum("egcd,edf->egcf", there, self.up())
        return jax.nn.gelu(shard(inner, self.mesh, self.inner_at))


def uneven(probabilities: jax.Array) -> jax.Array:
    """Return each group's load-balancing loss: 1 if first choices are even (arXiv:2101.03961)."""
    experts = probabilities.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts, dtype=probabilities.dtype)
    return experts * jnp.sum(jnp.mean(first, axis=1) * jnp.mean(probabilities, axis=1), axis=-1)


class Block(gpt.Block):
    """The GPT's layer with a mixture of experts; it carries the load-balancing loss along."""

    mlp_type = Experts
    load_at = P(BOTH)

    def __call__(self, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stream, load = x
        attended = self.attention(self.attention_norm(stream))
        stream = shard(stream + attended, self.mesh, self.at.stream)
        answer, more = self.mlp(self.mlp_norm(stream))
        stream = shard(stream + answer, self.mesh, self.at.stream)
        return stream, shard(load + more, self.mesh, self.load_at)


class MoE(gpt.GPT):
    """The GPT with experts, with a load-balancing loss."""

    block, at = Block, BY_BATCH
    config: Config

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        config, table = self.config, self.embedding()
        groups = config.batch * config.sequence // config.group
        even = shard(jnp.zeros(groups, wide(config.dtype)), self.mesh, P(BOTH))
        x, load = run_stack(self.layers, (self.embed(batch["inputs"], table), even))
        text = cross_entropy(self.score(x, table), batch["targets"])
        load = jnp.mean(load) / config.layers
        return text + config.balance * load, {"text_loss": text, "unevenness": load}


RECIPE = Recipe(Config, MoE, text_batches)
abstract_args, make_step, build = RECIPE.abstract_args, RECIPE.make_step, RECIPE.build
