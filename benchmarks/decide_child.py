"""Measure deciding on a step that needs another environment.

python -m benchmarks.decide_child child NAME    # of `benchmarks.decide.CASES`
"""

from __future__ import annotations

import json
import sys

import jax

from benchmarks.decide import measured

if __name__ == "__main__":
    # Trainers count jax.devices(), also when they are compiled for a pod.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps(measured(*sys.argv[2:])))
