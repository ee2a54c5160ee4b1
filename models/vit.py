"""A vision transformer that reads digits, sharded as the GPT is: Megatron + FSDP.

The mesh and the layout of the blocks are those of models/gpt.py, the sequence being the patches of
an image. What comes before and after the blocks (Dosovitskiy et al., arXiv:2010.11929):

    activation          shape                             sharding
    patches             [batch, patch, pixel]             ("data", "model", None)
    positions           [patch, hidden]                   ("model", None)
    mean of the stream  [batch, hidden]                   ("data", None)
    logits              [batch, class]                    ("data", None)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from typer import Option

from models import gpt
from models.config import Run
from models.digits import digit_batches, held_out
from models.layers import Norm, Weight, cross_entropy, einsum_of, run_stack, shard, stack, wide
from models.recipe import Recipe

AT = gpt.MEGATRON


@dataclass(frozen=True)
class Config(Run):
    """The vision transformer's configuration; the defaults suit the images of models/digits.py."""

    AXES = ("data", "model")

    image: Annotated[int, Option(help="Pixels along a side.")] = 8
    patch: Annotated[int, Option(help="Pixels along a side.")] = 2
    channels: Annotated[int, Option(help="Of a pixel.")] = 1
    classes: int = 10
    batch: Annotated[int, Option(help="Images, over all devices.")] = 64
    learning_rate: float = 1e-3
    data: Annotated[int, Option(help="Mesh axis: batch and FSDP.")] = 2
    model: Annotated[int, Option(help="Mesh axis: tensor and sequence.")] = 4

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        yield from super().divisors()
        yield "image", "patch", self.patch
        yield "patches", "model", self.model

    @property
    def tokens(self) -> int:
        return self.batch * self.patches

    @property
    def patches(self) -> int:
        """Return the number of patches of an image: the sequence's length."""
        return (self.image // self.patch) ** 2

    @property
    def pixels(self) -> int:
        """Return the number of values in a patch."""
        return self.channels * self.patch**2

    @classmethod
    def pod(cls, *, data: int = 1, model: int = 8, **changes: Any) -> "Config":
        """Four layers of ViT-22B's sizes (arXiv:2302.05442), 16 images of ImageNet a data rank."""
        sizes = dict(hidden=6144, heads=48, mlp=24576, batch=16 * data)
        images = dict(image=224, patch=14, channels=3, classes=1000)
        return cls.sized(sizes | images | dict(data=data, model=model), changes)


class Attention(gpt.Attention):
    """Bidirectional attention among patches."""

    ordered = False


class Block(gpt.Block):
    """The GPT's layer, with bidirectional attention."""

    attention_type = Attention


class ViT(nnx.Module):
    """Patch and position embedding, `layers` blocks in one scan, norm, mean, and a linear head."""

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs):
        hidden, pixels = config.hidden, config.pixels

        def weight(spec, *shape, std):
            return Weight(config, mesh, rngs, spec, shape, std)

        self.embedding = weight(P(None, "data"), pixels, hidden, std=pixels**-0.5)
        self.positions = weight(P("model", "data"), config.patches, hidden, std=1.0)
        self.layers = stack(lambda r: Block(config, mesh, r, AT), config.layers, rngs)
        self.norm = Norm(config, mesh, AT.stream)
        self.head = weight(P("data", None), hidden, config.classes, std=hidden**-0.5)
        self.config, self.mesh, self.einsum = config, mesh, einsum_of(config)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """patches [batch, patch, pixel] -> logits [batch, class], in the wide dtype."""
        mesh, patches = self.mesh, patches.astype(self.config.dtype)
        x = shard(self.einsum("bsp,pd->bsd", patches, self.embedding()), mesh, AT.stream)
        x = shard(x + shard(self.positions(), mesh, P("model", None)), mesh, AT.stream)
        x = self.norm(run_stack(self.layers, x))
        mean = jnp.mean(x, axis=1, dtype=wide(x.dtype)).astype(x.dtype)
        mean, dtype = shard(mean, mesh, P("data", None)), wide(x.dtype)
        logits = self.einsum("bd,dc->bc", mean, self.head(), preferred_element_type=dtype)
        return shard(logits, mesh, P("data", None))

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean cross-entropy in nats, and the batch's accuracy."""
        logits = self(batch["patches"])
        right = jnp.argmax(logits, -1) == batch["labels"]
        return cross_entropy(logits, batch["labels"]), {"accuracy": jnp.mean(right)}

    @classmethod
    def batch_like(cls, config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch as shapes, with the shardings of its embeddings."""

        def like(shape, dtype, spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        patches = (config.batch, config.patches, config.pixels)
        return dict(
            patches=like(patches, jnp.float32, AT.stream),
            labels=like((config.batch,), jnp.int32, P("data")),
        )


def accuracy(config: Config, mesh: Mesh, params: Any) -> str:
    """Return the accuracy on the held-out images, as text."""
    images, loss = held_out(config, multiple=config.data), RECIPE.make_loss(config, mesh)
    right = jax.jit(lambda params, batch: loss(params, batch)[1]["accuracy"])(params, images)
    return f"right on {float(right):.1%} of {len(images['labels'])} images held out"


RECIPE = Recipe(Config, ViT, digit_batches, accuracy)
abstract_args, make_step, build = RECIPE.abstract_args, RECIPE.make_step, RECIPE.build
