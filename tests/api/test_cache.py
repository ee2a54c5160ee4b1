"""JAX's persistent cache keeps plain and overlapped executables of one step apart, in any order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs the steps named on its command line in that order, and prints a line of JSON for each.
CHILD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxoverlap

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
rows, columns = NamedSharding(mesh, P("model")), NamedSharding(mesh, P(None, "model"))

def train_step(x, w):
    return x @ w

plain = jax.jit(train_step, in_shardings=(rows, columns), out_shardings=columns)
steps = {"plain": plain, "overlapped": jaxoverlap.overlap(plain)}
x, w = (np.arange(16 * 16, dtype=np.float32).reshape(16, 16) % n for n in (7, 5))
for name in sys.argv[1:]:
    before = len(hits)
    compiled = steps[name].lower(x, w).compile()
    right = bool((np.asarray(compiled(jax.device_put(x, rows), jax.device_put(w, columns))) == x @ w).all())
    right = right and bool((np.asarray(steps[name](x, w)) == x @ w).all())
    text = compiled.as_text()
    print(json.dumps({
        "step": name, "hit": len(hits) > before, "right": right,
        "ring": "collective-permute" in text, "gather": "all-gather" in text,
    }))
"""


def run(cache: Path, *steps: str) -> list[dict]:
    """Run the steps in a process of its own, with the cache on for everything."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", CHILD, *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("order", [("plain", "overlapped"), ("overlapped", "plain")], ids="-".join)
def test_each_step_gets_its_own_executable(tmp_path, order):
    # The second process goes the other way round and finds both; its repetitions hit what it loaded.
    runs = [("new", row) for row in run(tmp_path, *order)]
    runs += [("cached", row) for row in run(tmp_path, *reversed(order), *order)]
    assert len(runs) == 6
    for kind, row in runs:
        assert row["right"], row
        assert (row["ring"], row["gather"]) == ((True, False) if row["step"] == "overlapped" else (False, True)), row  # fmt: skip
        if kind == "new":
            assert not row["hit"], row
    # Nothing is proved unless the executables really came from the cache.
    assert [row["hit"] for kind, row in runs if kind == "cached"][:2] == [True, True]
