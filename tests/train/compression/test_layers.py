"""Parameters as layers; and what importing the room may not do."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jaxoverlap.train.compression import none, power_sgd, uniform
from jaxoverlap.train.compression.layers import layers_of

PARAMS = dict(
    layers=dict(q=np.zeros((3, 32, 4, 16), "f"), norm=np.zeros((3, 64), "f")),
    table=np.zeros((256, 64), "f"),
    bias=np.zeros(4096, "f"),
    small=np.zeros((8, 8), "f"),
    steps=np.zeros((64, 64), np.int32),
)


def test_leaves_become_matrices_by_the_cut_of_least_rows_and_columns():
    layers = layers_of(PARAMS, stacked=("layers",))
    assert [(la.name, la.rows, la.cols, la.part) for la in layers] == [
        ("layers.q[0]", 32, 64, 0),
        ("layers.q[1]", 32, 64, 1),
        ("layers.q[2]", 32, 64, 2),
        ("table", 256, 64, None),
    ]
    (stack, _) = layers_of(PARAMS, stacked=("layers",), shared=True)
    assert (stack.stack, stack.count, stack.size) == (3, 3, 2048)


def test_layers_whose_bytes_are_not_halved_go_raw():
    layers = layers_of(PARAMS, stacked=("layers",))
    assert uniform(none()).compressed(layers, 4) == ()
    kept = uniform(power_sgd(12)).compressed(layers, 4)  # 12 (32 + 64) · 2 > 32 · 64
    assert [la.name for la in kept] == ["table"]
    assert uniform(power_sgd(4)).compressed(layers, 1) == ()  # one worker sends nothing


def test_bad_stacks_are_named():
    with pytest.raises(ValueError, match="stands below other"):
        layers_of(PARAMS, stacked=("layers", "other"))
    with pytest.raises(ValueError, match="is a scalar"):
        layers_of(dict(layers=np.float32(1)), stacked=("layers",))


def test_importing_the_room_starts_no_backend():
    text = (
        "import jax, jaxoverlap.train.compression\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices('cpu')) == 3\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)
