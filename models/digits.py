"""Load images of handwritten digits as patches, and make the batches of a training run."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from models.config import Mistake

SIDE, CHANNELS, CLASSES = 8, 1, 10
HELD_OUT = 297  # of 1797, the last: most of their writers wrote none of the others


class Wanted(Protocol):
    """The fields of a configuration that describe images."""

    @property
    def image(self) -> int: ...
    @property
    def patch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def seed(self) -> int: ...


def load_digits(config: Wanted) -> dict[str, np.ndarray]:
    """Return all 1797 images: {"patches": f32 [image, patch, pixel] in -1 to 1, "labels": int32}.

    Raises:
        Mistake: if `config` wants other images, or scikit-learn, which ships these, is missing.
    """
    wanted = dict(image=config.image, channels=config.channels)
    if wanted != dict(image=SIDE, channels=CHANNELS) or config.classes < CLASSES:
        raise Mistake(
            f"image={config.image}, channels={config.channels}, classes={config.classes}: the "
            f"digits have image={SIDE}, channels={CHANNELS} and classes={CLASSES} (or more, unused)"
        )
    try:
        from sklearn import datasets
    except ImportError as error:
        raise Mistake("the digits come with scikit-learn: pip install scikit-learn") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = pixels.reshape(-1, SIDE, SIDE, CHANNELS) / 8 - 1
    return dict(
        patches=cut(images, config.patch).astype(np.float32), labels=labels.astype(np.int32)
    )


def cut(images: np.ndarray, patch: int) -> np.ndarray:
    """Divide images [image, row, column, channel] into square patches [image, patch, pixel]."""
    count, rows, columns, channels = images.shape
    apart = images.reshape(count, rows // patch, patch, columns // patch, patch, channels)
    return apart.swapaxes(2, 3).reshape(count, -1, patch * patch * channels)


def digit_batches(config: Wanted) -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that makes a step's batch, or a slice of it, without held-out images."""
    digits = load_digits(config)

    def batch_of(step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((config.seed, step))
        chosen = rng.integers(0, len(digits["labels"]) - HELD_OUT, config.batch)[rows]
        return {name: array[chosen] for name, array in digits.items()}

    return batch_of


def held_out(config: Wanted, multiple: int) -> dict[str, np.ndarray]:
    """Return the held-out digits; their number is a multiple of `multiple`."""
    count = HELD_OUT // multiple * multiple
    return {name: array[-count:] for name, array in load_digits(config).items()}
