"""Describe a transformer as far as its size, its work and its traffic depend on it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxoverlap._util.limits import AtLeast0, AtLeast1, checked

ELEMENT = 2  # bytes of an activation, and of a gathered weight


@dataclass(frozen=True, kw_only=True)
@checked
class Transformer:
    """A decoder, dense or with a mixture of experts in every layer.

    Attributes:
        name: for people.
        layers, hidden, heads: as papers give them.
        sequence: tokens of a sequence.
        mlp: inner size of an MLP, of each expert's where there are experts; None: 4 x hidden.
        vocab: rows of the token embedding.
        kv_heads: heads of keys and values; None: as many as `heads`.
        head_dim: elements of a head; None: hidden / heads.
        experts: experts of a layer; 0: a dense model.
        choices: experts that a token goes to.
        shared_mlp: inner size of the expert that every token takes besides its choices; 0: none.
        gated: whether an MLP has three matrices (SwiGLU) and not two.
        biases: whether matmuls and norms have biases.
        learned_positions: rows of a learned table of positions; 0: rotary or none.
        tied: whether the head uses the embedding's table.
        source: where the sizes come from.
    """

    name: str
    layers: AtLeast1
    hidden: AtLeast1
    heads: AtLeast1
    sequence: AtLeast1
    mlp: AtLeast1 | None = None
    vocab: AtLeast1 = 51200
    kv_heads: AtLeast1 | None = None
    head_dim: AtLeast1 | None = None
    experts: AtLeast0 = 0
    choices: AtLeast0 = 0
    shared_mlp: AtLeast0 = 0
    gated: bool = False
    biases: bool = True
    learned_positions: AtLeast0 = 0
    tied: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} with heads={self.heads}: hidden must be a multiple of "
                "heads, or head_dim say how many elements a head has"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads={self.heads} with kv_heads={self.kv_heads}: heads must be a multiple of "
                "kv_heads"
            )
        if bool(self.experts) != bool(self.choices) or self.choices > self.experts:
            raise ValueError(
                f"experts={self.experts} with choices={self.choices}: give 0 of both, or 1 or more "
                "choices of as many experts or more"
            )
        if self.shared_mlp and not self.experts:
            raise ValueError(
                f"shared_mlp={self.shared_mlp} without experts: it is the size of an expert that "
                "every token takes; a dense model's MLP is mlp"
            )

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_hidden(self) -> int:
        """Elements of a token's queries, all heads together."""
        return self.heads * self.head_size

    @property
    def key_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def kv_hidden(self) -> int:
        """Elements of a token's keys; its values have as many."""
        return self.key_heads * self.head_size

    @property
    def inner(self) -> int:
        """Inner size of an MLP, of each expert's where there are experts."""
        return self.mlp or 4 * self.hidden

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def active_inner(self) -> int:
        """Inner size of all the MLPs that a token goes through in a layer."""
        return max(self.choices, 1) * self.inner + self.shared_mlp

    @property
    def norm_params(self) -> int:
        """Elements of one norm."""
        return self.hidden * (2 if self.biases else 1)

    @functools.cache  # noqa: B019 # a search asks for the same few again and again
    def layer_params(self, model: int = 1, expert: int = 1) -> tuple[int, int]:
        """Count a layer's parameters on one device: outside experts, and of experts.

        Matrices, and biases of columns, are split over the tensor axis; norms and biases of rows
        are not. Experts are split over the expert axis too.

        Args:
            model: size of the tensor axis.
            expert: size of the expert axis.
        """
        kv = max(self.kv_hidden // model, self.head_size)
        dense = 2 * self.hidden * (self.query_hidden // model + kv) + 2 * self.norm_params
        if self.biases:
            dense += self.query_hidden // model + 2 * kv + self.hidden
        if not self.experts:
            return dense + self._mlp_params(self.inner, model), 0
        dense += self.hidden * self.experts + self._mlp_params(self.shared_mlp, model)
        return dense, self._mlp_params(self.inner, model) * self.experts // expert

    def _mlp_params(self, inner: int, model: int) -> int:
        if not inner:
            return 0
        biases = (self.mlp_matrices - 1) * inner // model + self.hidden if self.biases else 0
        return self.mlp_matrices * self.hidden * inner // model + biases

    @property
    def params(self) -> int:
        """Parameters of the model, none counted twice."""
        tables = self.hidden * (self.vocab * (1 if self.tied else 2) + self.learned_positions)
        return self.layers * sum(self.layer_params()) + tables + self.norm_params

    @property
    def active_params(self) -> int:
        """Parameters of matmuls that a token meets, without its tables."""
        attention = 2 * self.hidden * (self.query_hidden + self.kv_hidden)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.active_inner)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Transformer:
        """Make a model of plain data, as a JSON file has it.

        Raises:
            ValueError: for a field that is unknown, missing, or of a value that no model has.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            near = [m for name in unknown for m in difflib.get_close_matches(name, known, 1, 0.5)]
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            raise ValueError(
                f"unknown fields {', '.join(unknown)}{hint} Known are {', '.join(sorted(known))}"
            )
        wanted = ("name", "layers", "hidden", "heads", "sequence")
        if missing := [name for name in wanted if name not in given]:
            raise ValueError(f"missing fields: {', '.join(missing)}")
        return cls(**given)
