"""The trainers by rules alone: what they learn is what the plain ones learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from models import gpt, long_context, moe, vit
from models.trainer import train

MODELS = {"gpt": gpt, "moe": moe, "vit": vit, "long context": long_context}


def losses(model: Any, steps: int, **changes: Any) -> list[float]:
    recipe = model.RECIPE
    config = dataclasses.replace(recipe.config(), steps=steps, log_every=1000, **changes)
    return [row["loss"] for row in train(recipe, config).rows]


def check(name: str, steps: int) -> None:
    ours = losses(MODELS[name], steps, ops=True)
    theirs = losses(MODELS[name], steps, plain=True)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt"])
def test_trains_as_plain(name: str):
    check(name, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_for_long(name: str):
    check(name, 100)
