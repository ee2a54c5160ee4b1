"""A terminal shows what is being done in one line; elsewhere the log has a line for each stage."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._util import progress

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from jaxoverlap._util import progress
with progress.working("deciding step"):
    for left in range(3, 0, -1):
        progress.tried("layouts", left - 1)
        time.sleep(0.3)
    with progress.working("compiling step"):
        progress.compiling(3)
        time.sleep(0.3)
    print("printed")
"""


def test_elsewhere_it_is_a_line_of_the_log_for_each_stage(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxoverlap"), progress.working("deciding step"):
        for stage, times in (("layouts", 3), ("rings", 2)):
            for left in range(times, 0, -1):
                progress.tried(stage, left)
        progress.compiling(2)
        counts = [progress.counting() for _ in range(2)]
        for count, name in zip(counts, ("plain", "overlapped"), strict=True):
            thread = threading.Thread(target=count, args=(name,))
            thread.start()
            thread.join()
    said = [re.sub(r"after \d.* s", "after so long", r.getMessage()) for r in caplog.records]
    assert said == [
        "deciding step",
        "deciding: layouts",
        "deciding: rings",
        "compiling 2 candidates",
        "compiled 1 of 2 candidates: plain, after so long",
        "compiled 2 of 2 candidates: overlapped, after so long",
    ]
    assert {record.name for record in caplog.records} == {"jaxoverlap"}


def test_a_step_says_what_it_decides_and_compiles(caplog: pytest.LogCaptureFixture):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P("x")))
    with caplog.at_level(logging.INFO, "jaxoverlap"):
        jaxoverlap.overlap(jax.jit(lambda x: x @ x)).lower(x).compile()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["deciding <lambda>", "deciding: rings", "compiling <lambda>"]


def test_a_process_without_a_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.working("deciding step"):
        progress.tried("layouts", None)


def test_a_terminal_has_one_line_and_what_is_printed_goes_where_it_should():
    main, side = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=side, env=environment, text=True
    ) as child:
        os.close(side)
        printed, shown = child.stdout.read(), b""
        try:
            while part := os.read(main, 65536):
                shown += part
        except OSError:  # Linux's end of a terminal
            pass
    os.close(main)
    assert printed == "printed\n" and child.returncode == 0
    text = shown.decode()
    assert "deciding step: layouts (2 of at most 3)" in text
    assert "deciding step: compiling 3 candidates" in text
    assert "INFO" not in text
