"""Name the published models that `configure` knows by name; models.toml has them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from jaxoverlap._util.files import packaged
from jaxoverlap.parallelism.model import Transformer


class _Family(msgspec.Struct, forbid_unknown_fields=True):
    """Models by name, and the fields that all of them share."""

    shared: dict[str, Any]
    models: dict[str, dict[str, Any]]


def _read() -> Iterator[Transformer]:
    """Yield the models of models.toml, family by family."""
    text = packaged("jaxoverlap.parallelism.published", "models.toml")
    for family in msgspec.toml.decode(text, type=dict[str, list[_Family]])["family"]:
        for name, own in family.models.items():
            yield Transformer.from_fields({"name": name, **family.shared, **own})


_MODELS = {model.name: model for model in _read()}


def models() -> tuple[Transformer, ...]:
    """The models that have a name, smallest of each family first."""
    return tuple(_MODELS.values())


def named_model(name: str, *, sequence: int | None = None) -> Transformer:
    """The model of a name such as "gpt-175b", with another length of sequences if given.

    Raises:
        ValueError: for a name that is not known, or a sequence below one.
    """
    model = _MODELS.get(name.lower())
    if model is None:
        near = difflib.get_close_matches(name.lower(), _MODELS, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown model {name!r}: {hint}Known are {', '.join(_MODELS)}; for another give a "
            "Transformer, or a file of its fields as JSON"
        )
    if sequence is None or sequence == model.sequence:
        return model
    positions = sequence if model.learned_positions else 0
    return replace(model, sequence=sequence, learned_positions=positions)
