"""Load text as bytes, and make the batches of a training run."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import Mistake, TextRun


def load_text(path: Path | None = None, *, sequence: int) -> np.ndarray:
    """Return the bytes of a file, or of the Python manual's help topics, as uint8 [length].

    Raises:
        Mistake: if the file cannot be read, or is shorter than a sequence and the byte after it.
    """
    if path is None:
        from pydoc_data.topics import topics  # comes with Python: half a million bytes of English

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise Mistake(
                f"--text {path}: {error.strerror or error}; expected a file of text. Give another "
                "path, or leave --text out to train on the Python manual"
            ) from error
    if len(text) < sequence + 1:
        raise Mistake(
            f"--text {path}: {len(text)} bytes; expected at least {sequence + 1}, one sequence of "
            f"{sequence} and the byte after it. Give a longer text or a smaller --sequence"
        )
    return np.frombuffer(text, np.uint8)


def make_batch(
    text: np.ndarray, config: TextRun, step: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Return inputs and targets, int32 [batch, sequence] each; targets are shifted by one byte.

    A function of the seed and the step alone, so a run that resumes sees the batches it would have
    seen without the interruption, in however many processes. Each makes its own rows.
    """
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(text) - config.sequence, config.batch)[rows]
    windows = text[starts[:, None] + np.arange(config.sequence + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def text_batches(config: TextRun) -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that makes a step's batch, or a slice of it, from the text of `config`."""
    text = load_text(config.text, sequence=config.sequence)
    return lambda step, rows=slice(None): make_batch(text, config, step, rows)


def text_like(config: TextRun, mesh: Mesh, spec: PartitionSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a batch as shapes, each sharded as `spec`."""
    sharding = NamedSharding(mesh, spec)
    like = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32, sharding=sharding)
    return dict(inputs=like, targets=like)
