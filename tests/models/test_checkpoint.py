"""A checkpoint that is not what was written is refused, and by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models import finetune_zo, gpt, trainer
from models.checksum import checksums
from models.config import Mistake

GPT = gpt.Config(
    layers=1, hidden=32, heads=2, mlp=64, warmup=2, plain=True, sequence=32, batch=8, data=1,
    model=1, steps=2, save_every=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    trainer.train(gpt.RECIPE, dataclasses.replace(GPT, checkpoint=path))
    return path


def files_of(path, step):
    """Return the files of a checkpoint that have arrays, largest first."""
    found = [
        f for f in (path / str(step) / "state").rglob("*") if f.is_file() and f.parent.name == "d"
    ]
    return sorted(found, key=lambda f: -f.stat().st_size)


@pytest.mark.parametrize("share", (0.1, 0.35, 0.6, 0.9))
def test_a_flipped_byte_is_refused_and_what_to_do_is_said(written, share):
    file = files_of(written, 2)[0]
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[int(share * len(whole))] ^= 0x7F
    file.write_bytes(changed)
    try:
        config = dataclasses.replace(GPT, checkpoint=written, steps=3)
        with pytest.raises(Mistake, match=r"step 2 is damaged: .*delete that folder .* step 1"):
            trainer.train(gpt.RECIPE, config)
        with pytest.raises(Mistake, match="step 2 is damaged"):
            finetune_zo.finetune(finetune_zo.FineTune(written, steps=1, batch=4))
    finally:
        file.write_bytes(whole)


DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_changed_element_changes_the_checksum(dtype):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(0, 2, (5, 7, 3)), dtype)
    before = checksums([values])[0]
    for _ in range(30):
        place = tuple(int(rng.integers(n)) for n in values.shape)
        other = values.at[place].set((values[place] == 0).astype(dtype))
        assert checksums([other])[0] != before
    swapped = values[::-1]
    assert checksums([swapped])[0] != before


def test_the_checksum_does_not_depend_on_the_mesh():
    values = jax.random.normal(jax.random.key(0), (8, 16))
    tree = dict(a=values, key=jax.random.key(1), count=jnp.int32(3))
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    spread = jax.device_put(tree, dict(
        a=NamedSharding(mesh, P("y", "x")), key=NamedSharding(mesh, P()), count=NamedSharding(mesh, P())
    ))  # fmt: skip
    np.testing.assert_array_equal(checksums(tree), checksums(spread))
