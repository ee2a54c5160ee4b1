"""An xplane.pb is read as XLA's profilers write it, of GPUs and of CPU devices."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import jax
import pytest

from jaxoverlap.profiling.formats import xplane
from jaxoverlap.profiling.formats.events import COPY_P2P, GRAPH, NO_DURATION, Recording
from jaxoverlap.simulation import hlo
from tests.profiling import synthetic
from tests.profiling.synthetic import Ran

pytestmark = pytest.mark.anew


def test_streams_kernels_and_modules_of_gpus(tmp_path: Path):
    recording = xplane.read(
        synthetic.write(tmp_path / "a.xplane.pb", synthetic.two_gpus(), synthetic.MODULES)
    )
    assert recording.platform == "GPU"
    assert [d.name for d in recording.devices] == ["GPU 0", "GPU 1"]
    assert recording.devices[0].kind == "NVIDIA H100 80GB HBM3"
    assert recording.start_ns == synthetic.START_NS
    events = recording.devices[0].events
    assert len(events) == 3 * 9
    first = events[0]
    assert (first.stream, first.op, first.program) == ("Stream #14", "first", 3)
    assert (first.start_ns, first.end_ns) == (100e3, 110e3)
    assert [e.detail for e in events if e.op == "hop"] == ["", COPY_P2P] * 3
    assert dict(recording.ignored) == {}
    module = hlo.parse(recording.modules["jit_step", 3])
    assert [i.name for i in module.body(module.entry)][2:5] == ["first", "gather", "matmul"]


def test_what_is_no_work_of_a_device_is_named(tmp_path: Path):
    lines = {
        "Stream #7(Compute,CudaGraph)": [
            Ran("CudaGraphExec:12", 10, 30, {"cuda_graph_exec_id": 12}),
            Ran("Memory Device", 0, 900, {"MemoryResidency_details": "kind:device num_bytes:5"}),
            synthetic.kernel("loop_fusion", "f", 50, 0),
        ],
        "CUPTI overhead": [Ran("BUFFER_FLUSH", 0, 50)],
        "XLA Ops": [Ran("fusion.1", 10, 30)],
    }
    recording = xplane.read(synthetic.write(tmp_path / "a.xplane.pb", {"/device:GPU:0": lines}))
    assert [e.detail for e in recording.devices[0].events] == [GRAPH]
    assert dict(recording.ignored) == {"MemoryResidency": 1, "CUPTI overhead": 1, NO_DURATION: 1}


def _profile(plane: str, line: str, *events: Ran) -> bytes:
    return synthetic.xspace({plane: {line: events}})


WHOLE = synthetic.xspace(synthetic.two_gpus(), synthetic.MODULES)
WRONG = {
    "empty": (b"", "is empty"),
    "cut short": (WHOLE[: len(WHOLE) // 2], r"is no xplane\.pb, or is cut short"),
    "text": (b"# What lies here", r"is no xplane\.pb, or is cut short"),
    "no device": (_profile("/host:CPU", "python", Ran("f", 0, 1)), "has no event of a device"),
    "no events": (_profile("/device:GPU:0", "Stream #1"), "has no event of a device"),
    "TPU": (_profile("/device:TPU:0", "XLA Ops", Ran("f", 0, 1)), "is a profile of TPUs"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_none_is_refused(what: str, tmp_path: Path):
    data, said = WRONG[what]
    synthetic.assert_refused(xplane.read, tmp_path / "wrong.xplane.pb", data, said)


# -- CPU devices ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recording:
    """Three runs of a step on eight CPU devices, some of its kernels split over threads."""
    folder = tmp_path_factory.mktemp("cpu")
    step, args = synthetic.sharded_step()
    jax.block_until_ready(step(*args))
    with jax.profiler.trace(folder):
        for _ in range(3):
            jax.block_until_ready(step(*args))
    return xplane.read(next(folder.rglob("*.xplane.pb")))


def _ran(recorded: Recording) -> tuple[tuple[str, int], hlo.Module]:
    """The program that ran, of all that the process holds: the profiler writes them all."""
    (key,) = {(e.module, e.program) for device in recorded.devices for e in device.events}
    return key, hlo.parse(recorded.modules[key])


def test_every_thunk_is_an_instruction(recorded: Recording):
    assert recorded.platform == "CPU"
    assert [d.name for d in recorded.devices] == [f"CPU {n}" for n in range(8)]
    key, module = _ran(recorded)
    known = {i.name for body in module.computations.values() for i in body}
    for device in recorded.devices:
        assert {e.op for e in device.events} <= known
        assert len({e.run for e in device.events}) == 3
        assert all((e.module, e.program) == key for e in device.events)


def test_a_thunk_ends_before_what_reads_its_result(recorded: Recording):
    """Its call may return sooner, and the profiler's "end:" may come later.

    A busy machine may take a thread off its core between the work and the record of its end.
    """
    _, module = _ran(recorded)
    operands = {i.name: i.operands for i in module.body(module.entry)}
    pairs = longer = late = 0
    for device in recorded.devices:
        runs: dict[int, dict] = defaultdict(dict)
        for event in device.events:
            runs[event.run][event.op] = event
        for ops in runs.values():
            for event in ops.values():
                before = [ops[o] for o in operands.get(event.op, ()) if o in ops]
                pairs += len(before)
                late += sum(b.end_ns > event.start_ns + 1e3 for b in before)
                longer += event.end_ns - event.start_ns > 0
    assert pairs > 100 and longer > 100 and late <= 0.02 * pairs
