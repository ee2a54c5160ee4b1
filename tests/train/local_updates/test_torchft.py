"""Streaming DiLoCo against torchft's published regression fixtures.

The numbers are the parameters before each step of pytorch/torchft at 73dafea (BSD-3-Clause),
test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_N:
two replicas, two layers of one weight that begin at 1, a gradient of 2 in every step, inner SGD of
rate 1, outer SGD of rate 2, two fragments, each averaged once in 6 steps. All numbers are exact in
float32. (Its fixture of a failure's recovery is of torchft's quorums, which this is not.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train import LocalUpdates, streaming_diloco
from tests.train.local_updates.problem import mesh_of

# (delay, alpha) -> layers 0 and 1 before each of the first twelve steps, and after them.
FIXTURES = {
    (0, 0.0): (
        (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41),
        (1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47),
    ),
    (0, 0.5): (
        (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5),
        (1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32),
    ),
    (0, 1.0): (tuple(1 - 2 * n for n in range(13)),) * 2,
    (1, 0.0): (
        (1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33),
        (1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39),
    ),
    (1, 0.5): (
        (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5),
        (1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29),
    ),
    (1, 1.0): (tuple(1 - 2 * n for n in range(13)),) * 2,
}
GLOBAL = {  # where fragments begin after 6 and 12 steps
    (0, 0.0): ((-11, -23), (-35, -47)),
    (0, 0.5): ((-11, -23), (-29, -35)),
    (0, 1.0): ((-11, -23), (-23, -23)),
    (1, 0.0): ((-7, -19), (-27, -39)),
    (1, 0.5): ((-7, -19), (-25, -31)),
    (1, 1.0): ((-7, -19), (-23, -23)),
}


@pytest.mark.parametrize(("delay", "alpha"), FIXTURES)
def test_torchft(delay, alpha):
    @jax.jit
    def step(params, batch):
        return {name: p - 2.0 for name, p in params.items()}, params

    outer = streaming_diloco(
        every=6, fragments=2, delay=delay, alpha=alpha, learning_rate=2.0, momentum=0.0,
        nesterov=False,
    )  # fmt: skip
    updates = LocalUpdates(step, mesh_of(2), outer=outer, params=None, overlap=False)
    state = updates.init(dict(first=jnp.ones(()), second=jnp.ones(())))
    seen: list[dict] = []
    begins = []
    for _ in range(2):
        state, before = updates.round(state, np.zeros((6, 2), "f"))
        seen.append(jax.tree.map(np.asarray, before))
        begins.append((float(state.begin["first"]), float(state.begin["second"])))
    for name, expected in zip(("first", "second"), FIXTURES[delay, alpha], strict=True):
        history = np.concatenate([*(s[name] for s in seen), state.worker[name][None]])
        np.testing.assert_array_equal(history, np.tile(np.float32(expected)[:, None], 2))
    assert tuple(begins) == GLOBAL[delay, alpha]
