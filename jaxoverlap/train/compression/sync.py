"""Define how gradients are synchronised: a compressor, and how it sets each layer's rate."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from jaxoverlap._util.limits import AtLeast0, checked, number, whole
from jaxoverlap.train import arguments
from jaxoverlap.train.arguments import keys
from jaxoverlap.train.compression.compressors.compressor import Compressor, Setting, sent
from jaxoverlap.train.compression.layers import Layer

RAW = -1  # the place, among a layer's candidates, of no compression
MIN_FACTOR = 2.0  # PyTorch's powerSGD_hook and L-GreCo have the same least compression


@dataclass(frozen=True, kw_only=True)
class Accordion:
    """Two settings, and when each is used.

    Attributes:
        high: the setting of layers in a critical regime: little compression; None for the
            compressor's candidate of most bytes.
        low: that of the others; None for the candidate of least bytes.
        threshold: a layer is in a critical regime where the norm of its gradient changed by this
            share or more since the last measurement.
    """

    high: Setting | None
    low: Setting | None
    threshold: float

    def ends(self, compressor: Compressor, layer: Layer) -> tuple[Setting, Setting]:
        """Return the low and the high setting of a layer."""
        known = compressor.candidates(layer)
        low = known[0] if self.low is None else compressor.at(self.low, layer)
        high = known[-1] if self.high is None else compressor.at(self.high, layer)
        if low > high:
            raise ValueError(
                f"accordion with low={low} and high={high} for {layer.name}: low is the setting of "
                "more compression, so it has to be the smaller one; change either"
            )
        return low, high


@dataclass(frozen=True, kw_only=True)
@checked
class Sync:
    """A way to synchronise: see `uniform`, `accordion` and `lgreco`, which make it.

    Raises:
        ValueError: for something that is no compressor, numbers out of range, or a decay without
            error feedback.

    Attributes:
        compressor: what averages the matrices.
        every: steps between two choices of settings; 0 if they never change.
        accumulate: steps before a choice whose gradients are added up for it.
        beside: steps after a choice at which its settings come into use; their program is compiled
            meanwhile, and waited for if it is not ready.
        accordion: the switch, if there is one.
        by_error: whether the dynamic programme chooses.
        start: averages before the first compressed one, in which all leaves are uncompressed.
        seed: of what is random.
        raw: keys of the parameters; leaves below one of them are not compressed.
        error_decay: the error of error feedback is multiplied by it when it is added.
    """

    compressor: Compressor
    every: int = 0
    accumulate: int = 0
    beside: int = 0
    accordion: Accordion | None = None
    by_error: bool = False
    start: AtLeast0 = 0
    seed: Annotated[int, arguments.seed] = 0
    raw: Annotated[Sequence[str], keys] = ()
    error_decay: Annotated[float, partial(number, above=0, most=1)] = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise ValueError(
                f"{self.compressor!r} is no compressor: expected one such as power_sgd(4), "
                "qsgd(4), top_k(0.01) or none()"
            )
        if self.error_decay < 1 and not self.compressor.error_feedback:
            raise ValueError(
                f"error_decay={self.error_decay:g} with {self.compressor!r}, which keeps no "
                "errors: give it error_feedback=True, or leave error_decay out"
            )

    def measures(self, count: int) -> bool:
        """Return whether settings are chosen before average `count`."""
        return bool(self.every) and count > 0 and count % self.every == 0

    def accumulates(self, count: int) -> bool:
        """Return whether the gradients of average `count` are added up for the next choice."""
        return bool(self.every) and count % self.every >= self.every - self.accumulate

    def changes(self, count: int) -> bool:
        """Return whether settings that were chosen before come into use with average `count`."""
        if count < self.start:
            return False
        begins = 0 < self.start == count
        chosen = bool(self.every) and count >= self.every
        return begins or (chosen and count % self.every == self.beside)

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return the settings that a layer may come to have, in order of bytes."""
        default = self.compressor.at(self.compressor.setting, layer)
        known = {default}
        if self.accordion:
            known |= set(self.accordion.ends(self.compressor, layer))
        if self.by_error:
            known |= set(self.compressor.candidates(layer))
        return tuple(sorted(known))

    def default(self, layer: Layer) -> int:
        """Return the index of the default setting among a layer's candidates."""
        return self.candidates(layer).index(self.compressor.at(self.compressor.setting, layer))

    def compressed(self, layers: Sequence[Layer], workers: int) -> tuple[Layer, ...]:
        """Return the layers whose bytes the default setting divides by two at least."""
        return tuple(
            layer for layer in layers if workers > 1 and self.factor(layer, workers) >= MIN_FACTOR
        )

    def factor(self, layer: Layer, workers: int) -> float:
        """Return what the default setting divides a layer's bytes by; two workers or more."""
        setting = self.compressor.at(self.compressor.setting, layer)
        return raw_bytes(layer, workers) / sent(self.compressor, layer, setting, workers)

    def is_fixed(self, layers: Sequence[Layer]) -> bool:
        """Return whether the dynamic programme can never leave the default settings.

        Where each layer's default is its largest candidate, another setting of one layer has more
        error, and no other layer can have less.
        """
        return (
            self.by_error
            and self.accordion is None
            and all(self.default(layer) == len(self.candidates(layer)) - 1 for layer in layers)
        )

    def made_for(self, layers: Sequence[Layer]) -> int:
        """Return a checksum of this sync and these layers, to check a restored state against."""
        return zlib.crc32(repr((self, tuple(layers))).encode())


def raw_bytes(layer: Layer, workers: int) -> float:
    """Return the bytes that a worker sends for one matrix of a layer without compression."""
    return 2 * (workers - 1) / workers * layer.size * layer.itemsize


def uniform(
    compressor: Compressor,
    *,
    start: int = 0,
    seed: int = 0,
    raw: Sequence[str] = (),
    error_decay: float = 1.0,
) -> Sync:
    """Use the compressor's default setting for every layer, always.

    Args:
        compressor: such as `power_sgd(4)`.
        start: averages before the first compressed one, as PyTorch's start_powerSGD_iter: gradients
            of the first steps change most, and are sent uncompressed.
        seed: of what is random.
        raw: keys of the parameters; leaves below one (an embedding, say) are not compressed.
        error_decay: in (0, 1]: e = error_decay · e + gradient is what is compressed, and what of it
            is not sent is the next e. Below 1 it forgets, as an outer momentum does.

    Raises:
        ValueError: for something that is no compressor, a negative start, or a decay without error
            feedback.
    """
    return Sync(compressor=compressor, start=start, seed=seed, raw=raw, error_decay=error_decay)


def accordion(
    compressor: Compressor,
    *,
    every: int = 500,
    high: Setting | None = None,
    low: Setting | None = None,
    threshold: float = 0.5,
    accumulate: int = 10,
    beside: int | None = None,
    start: int = 0,
    seed: int = 0,
    raw: Sequence[str] = (),
) -> Sync:
    """Compress little where a layer's gradients change quickly, and much elsewhere.

    A layer whose gradient's norm changed by `threshold` of itself or more since the last choice
    gets the setting `high`, another one `low`; until there are two norms, all are high. Source:
    Agarwal et al., Accordion (arXiv 2010.16248); threshold as in L-GreCo's released code.

    Args:
        compressor: such as `power_sgd(4)`.
        every: steps between choices.
        high, low: settings; by default the ends of the compressor's candidates.
        threshold: above 0.
        accumulate: steps before a choice whose gradients are added up for it.
        beside: steps from a choice to its use; by default the less of 20 and a tenth of `every`.
        start: steps before the first compressed one, in which no leaf is compressed.
        seed: of what is random.
        raw: keys of the parameters; leaves below one (an embedding, say) are not compressed.

    Raises:
        ValueError: for numbers out of range.
    """
    threshold = number("threshold", threshold, above=0)
    base = Sync(compressor=compressor, start=start, seed=seed, raw=raw)
    high, low = (  # with_setting raises if there is no such setting
        None if setting is None else compressor.with_setting(setting).setting
        for setting in (high, low)
    )
    if high is not None and low is not None and low > high:
        raise ValueError(
            f"low={low} with high={high}: low is the setting of more compression, so it has to be "
            "the smaller one; change either"
        )
    switch = Accordion(high=high, low=low, threshold=threshold)
    return replace(base, accordion=switch, **_schedule(every, accumulate, beside))


def lgreco(
    compressor: Compressor | Sync,
    *,
    every: int = 500,
    accumulate: int = 10,
    beside: int | None = None,
    start: int = 0,
    seed: int = 0,
    raw: Sequence[str] = (),
) -> Sync:
    """Choose each layer's setting: the least bytes at no more error than the uniform setting's.

    Every so many steps the error of each layer at each setting is measured on the mean of its
    gradients in the steps before, with what error feedback held back. An exact dynamic programme
    finds the settings of least bytes whose errors sum to no more than the reference's: the default
    setting's or, on top of `accordion(...)`, the settings that its switch would choose. Source:
    Markov et al., L-GreCo (arXiv 2210.17357). The released code measures on worker 0's gradients;
    here every worker measures its own, and errors are averaged.

    Args:
        compressor: such as `power_sgd(4)`; or `accordion(power_sgd(4))`, whose `every` and the
            like are replaced by these.
        every: steps between choices.
        accumulate: steps before a choice whose gradients are added up for it.
        beside: steps from a choice to its use; by default the less of 20 and a tenth of `every`.
        start: steps before the first compressed one, in which no leaf is compressed (the released
            code's start_powerSGD_iter).
        seed: of what is random.
        raw: keys of the parameters; leaves below one (an embedding, say) are not compressed.

    Raises:
        ValueError: for numbers out of range.
    """
    schedule = _schedule(every, accumulate, beside)
    base = compressor if isinstance(compressor, Sync) else Sync(compressor=compressor)
    if base is compressor and (base.by_error or base.accordion is None):
        raise ValueError(f"lgreco({compressor!r}): expected a compressor, or accordion(compressor)")
    raw = keys("raw", raw) or base.raw
    return replace(base, by_error=True, start=start, seed=seed, raw=raw, **schedule)


def _schedule(every: Any, accumulate: Any, beside: Any) -> dict[str, int]:
    every, accumulate = whole("every", every, 1), whole("accumulate", accumulate, 1)
    beside = min(20, every // 10) if beside is None else whole("beside", beside, 0)
    if beside >= every:
        raise ValueError(
            f"beside={beside} with every={every}: settings would come into use after the next "
            "choice; give a smaller beside"
        )
    return dict(every=every, accumulate=min(accumulate, every), beside=beside)
