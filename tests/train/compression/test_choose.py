"""Accordion's switch, L-GreCo on top of it, and the guard."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.train.compression import accordion, lgreco, power_sgd, top_k
from jaxoverlap.train.compression.choose import choose, cost_bytes, never_worse_than_uniform, total
from jaxoverlap.train.compression.layers import layers_of

PARAMS = dict(a=np.zeros((64, 64), "f"), b=np.zeros((256, 64), "f"), c=np.zeros((128, 128), "f"))
LAYERS = layers_of(PARAMS)


def chosen(sync, norms, before, seed=0):
    rng = np.random.default_rng(seed)
    count = len(sync.candidates(LAYERS[0]))
    errors = np.sort(rng.gamma(2, 1, (3, count)))[:, ::-1] * np.array([[1.0], [10.0], [0.1]])
    made = choose(
        sync, LAYERS, 4, errors=errors, norms=np.array(norms), norms_before=np.array(before)
    )
    return made, errors


def settings_of(sync, made):
    return [sync.candidates(layer)[i] for layer, i in zip(LAYERS, made, strict=True)]


def test_accordion_compresses_what_is_steady():
    sync = accordion(power_sgd(4))
    made, _ = chosen(sync, [1.0, 2.0, 0.4], [1.2, 1.0, 1.0])
    assert settings_of(sync, made.settings) == [2, 8, 8]
    made, _ = chosen(sync, [1.0] * 3, [np.nan] * 3)
    assert settings_of(sync, made.settings) == [8, 8, 8]  # no two norms yet
    sync = accordion(top_k(0.01), high=0.05, low=0.002)
    made, _ = chosen(sync, [1.0, 1.0, 9.0], [1.0, 1.0, 1.0])
    assert settings_of(sync, made.settings) == [0.002, 0.002, 0.05]


@pytest.mark.parametrize("seed", range(20))
def test_lgreco_on_accordion_keeps_its_error_with_fewer_bytes(seed):
    sync = lgreco(accordion(power_sgd(4)))
    made, errors = chosen(sync, [1.0, 2.0, 1.0], [1.0, 1.0, 1.0], seed)
    assert settings_of(sync, made.reference) == [2, 8, 2]
    costs = [cost_bytes(sync, layer, 4) for layer in LAYERS]
    assert total(costs, made.settings) <= total(costs, made.reference)
    assert total(errors, made.settings) <= total(errors, made.reference)


def test_the_guard_keeps_the_uniform_settings_where_others_are_worse():
    costs, errors = [np.array([1, 2, 3])] * 2, [np.array([3.0, 2.0, 1.0])] * 2
    reference = np.array([1, 1])
    for worse in ([0, 0], [2, 2], [2, 1], [0, 2]):
        made = never_worse_than_uniform(np.array(worse), reference, costs, errors)
        assert made.settings.tolist() == [1, 1] and made.guarded
    better = never_worse_than_uniform(
        np.array([0, 2]), reference, [np.array([1, 2, 9]), np.array([1, 8, 3])], errors
    )
    assert better.settings.tolist() == [0, 2] and not better.guarded


@pytest.mark.parametrize(
    ("make", "says"),
    (
        (lambda: lgreco(power_sgd(4), every=0), "every=0"),
        (lambda: lgreco(power_sgd(4), every=5, beside=5), "beside=5 with every=5"),
        (lambda: lgreco(power_sgd(4), accumulate=0), "accumulate=0"),
        (lambda: lgreco(lgreco(power_sgd(4))), "accordion"),
        (lambda: accordion(power_sgd(4), threshold=0), "threshold=0"),
        (lambda: accordion(power_sgd(4), low=0), "rank=0"),
    ),
)
def test_numbers_out_of_range_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()
