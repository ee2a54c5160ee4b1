"""Small tasks on real data: pictures of clothes for an MLP, and bytes of a text for a GPT."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from optax.contrib import MuonDimensionNumbers

from models.config import Config
from models.gpt import RECIPE
from models.text import load_text, make_batch

Inner = Literal["adamw", "muon"]
Loss = Callable[[Any, Any], jax.Array]
FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist


@dataclass(frozen=True)
class Task:
    """A task to learn.

    Attributes:
        name: of the task.
        new_params: parameters of a seed.
        loss: for a mesh, the loss of parameters and a batch.
        batches: training batches of a seed, without end, [global batch, ...].
        held_out: batches that are never trained on.
        steps, batch, learning_rate: of a run; AdamW's peak rate.
        matrices: for parameters, what Muon takes as a matrix of each, and None for AdamW's.
        accuracy: the share of a batch that parameters classify rightly; None for no classes.
    """

    name: str
    new_params: Callable[[int], Any]
    loss: Callable[[Mesh], Loss]
    batches: Callable[[int], Iterator[Any]]
    held_out: tuple[Any, ...]
    steps: int
    batch: int
    learning_rate: float
    matrices: Callable[[Any], Any]
    accuracy: Callable[[Any, Any], jax.Array] | None = None

    def optimizer(self, inner: Inner = "adamw", warmup: float = 0.05) -> Any:
        """Return the inner optimizer: warm-up, then a cosine down to a hundredth.

        Muon's updates are scaled to AdamW's size (arXiv 2502.16982), so that it has AdamW's rate.

        Args:
            inner: its name; "muon" takes AdamW for vectors, embeddings and the last layer.
            warmup: steps of it, as a share of all.
        """
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, int(self.steps * warmup), self.steps, self.learning_rate / 100
        )
        if inner == "adamw":
            return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
        return optax.contrib.muon(
            rate,
            weight_decay=0.1,
            adam_weight_decay=0.1,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=self.matrices,
        )


def images(folder: Path = FASHION, *, moved: bool = False) -> Task:
    """Fashion-MNIST for an MLP of two hidden layers.

    Args:
        folder: of the four files.
        moved: whether each training picture is flipped by chance and shifted by up to two pixels,
            anew in each epoch, so that a long run learns no picture by heart.
    """
    if not folder.exists():
        raise FileNotFoundError(
            f"no Fashion-MNIST in {folder}: apt-get install dataset-fashion-mnist, or unpack that "
            "package (apt-get download, dpkg -x) and give its folder with --folder"
        )
    x, y = _idx(folder, "train")
    test = _idx(folder, "t10k")

    def new_params(seed: int) -> list[Any]:
        rng, sizes = np.random.default_rng(seed), (784, 256, 256, 10)
        return [
            dict(w=jnp.asarray(rng.normal(size=(a, b)) * (2 / a) ** 0.5, "f"), b=jnp.zeros(b))
            for a, b in itertools.pairwise(sizes)
        ]

    def logits(params: list[Any], h: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"])
        return h @ params[-1]["w"] + params[-1]["b"]

    def of(params: list[Any], batch: Any) -> jax.Array:
        found = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1])
        return found.mean()

    def accuracy(params: list[Any], batch: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(logits(params, batch[0]), -1) == batch[1])

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(y))
            for at in range(0, len(y) - 255, 256):
                pictures = x[order[at : at + 256]]
                yield _moved(pictures, rng) if moved else pictures, y[order[at : at + 256]]

    def matrices(params: list[Any]) -> list[Any]:
        hidden, matrix = len(params) - 1, MuonDimensionNumbers(0, 1)
        return [dict(w=matrix if n < hidden else None, b=None) for n in range(len(params))]

    name = "moved images" if moved else "images"
    parts = (new_params, lambda mesh: of, batches, (test,), 1152, 256, 1e-3, matrices, accuracy)
    return Task(name, *parts)


def _moved(pictures: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return pictures [count, 784], each flipped or not and shifted by -2 to 2 pixels each way."""
    count = len(pictures)
    padded = np.pad(
        pictures.reshape(count, 28, 28), ((0, 0), (2, 2), (2, 2)), constant_values=pictures.min()
    )
    down, right = rng.integers(0, 5, (2, count, 1))
    rows, columns = down + np.arange(28), right + np.arange(28)
    columns = np.where(rng.random((count, 1)) < 0.5, columns[:, ::-1], columns)
    picked = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.reshape(count, -1)


def text() -> Task:
    """Bytes of Python's manual for a GPT of two layers; its last tenth is held out."""
    config = Config(data=1, model=1, hidden=64, heads=4, mlp=256, sequence=64, batch=32)
    data = load_text(sequence=config.sequence)
    held_from = len(data) * 9 // 10

    def new_params(seed: int) -> Any:
        return RECIPE.new_state(config, mesh_of(1), seed)["params"]

    def loss(mesh: Mesh) -> Loss:
        of = RECIPE.make_loss(config, mesh)
        return lambda params, batch: of(params, batch)[0]

    def batches(seed: int) -> Iterator[Any]:
        seeded = replace(config, seed=seed)
        yield from (make_batch(data[:held_from], seeded, step) for step in itertools.count())

    tests = replace(config, seed=10**6, batch=256)
    held_out = tuple(make_batch(data[held_from:], tests, step) for step in range(4))
    return Task("text", new_params, loss, batches, held_out, 576, 32, 3e-3, _matrices_of_gpt)


def _matrices_of_gpt(params: Any) -> Any:
    """Return which dims of a stacked layer's weights a matrix reduces, and which it gives."""
    dims = dict(
        q=(1, (2, 3)), k=(1, (2, 3)), v=(1, (2, 3)), out=((1, 2), 3), up=(1, 2), down=(1, 2)
    )

    def one(path: Any, _: Any) -> MuonDimensionNumbers | None:
        (*_, name, leaf) = [getattr(key, "key", None) for key in path]
        return MuonDimensionNumbers(*dims[name]) if leaf == "weight" and name in dims else None

    return jax.tree.map_with_path(one, params)


def mesh_of(workers: int) -> Mesh:
    """Return a mesh of workers of one device each, with the axes that the models name."""
    devices = jax.devices()[:workers]
    axes = ("worker", "data", "model")
    return jax.make_mesh((workers, 1, 1), axes, (AxisType.Auto,) * 3, devices=devices)


def _idx(folder: Path, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Read pictures and labels in the format of MNIST."""
    with gzip.open(folder / f"{which}-images-idx3-ubyte.gz") as file:
        pictures = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(folder / f"{which}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int32)
    return ((pictures / 255 - 0.286) / 0.353).astype(np.float32), labels
