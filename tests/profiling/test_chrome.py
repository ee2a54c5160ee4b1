"""A Chrome trace is read as JAX's profiler and PyTorch's write it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jaxoverlap.profiling.formats import chrome
from jaxoverlap.profiling.formats.events import COPY_P2P, NO_DURATION
from tests.profiling import synthetic

BASE_US = 1740461679479712  # PyTorch's times are microseconds since 1970


def _jax() -> dict:
    def name(pid, what, value, **more):
        return {"ph": "M", "pid": pid, "name": what, "args": {"name": value}, **more}

    def event(tid, label, ts, dur, **args):
        return {"ph": "X", "pid": 1, "tid": tid, "name": label, "ts": ts, "dur": dur, "args": args}

    return {
        "displayTimeUnit": "ns",
        "traceEvents": [
            name(1, "process_name", "/device:GPU:3"),
            name(1, "thread_name", "Stream #14(Compute)", tid=10),
            name(1, "thread_name", "XLA Ops", tid=11),
            name(1, "thread_name", "CUPTI overhead", tid=12),
            name(9, "process_name", "/host:CPU"),
            event(10, "nvjet_hsh", 5.5, 2, hlo_op="dot.1", hlo_module="jit_step", name="jit(step)"),
            event(10, "MemcpyP2P", 8, 1, memcpy_details="size:8", hlo_op="hop"),
            event(11, "dot.1", 5.5, 2),
            event(12, "BUFFER_FLUSH", 0, 9),
            {"ph": "X", "pid": 9, "tid": 1, "name": "python", "ts": 0, "dur": 99},
        ],
    }


def _torch() -> dict:
    def event(category, label, ts, dur, **args):
        head = {"ph": "X", "cat": category, "pid": 0, "tid": 7, "name": label}
        return {**head, "ts": BASE_US + ts, "dur": dur, "args": args}

    return {
        "schemaVersion": 1,
        "traceEvents": [
            event("kernel", "flash::FlashAttnBwd", 10, 5, device=0, stream=7),
            event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 12.25, 1, device=0, stream=9),
            event("gpu_memset", "Memset (Device)", 14, 0, device=0, stream=7),
            event("gpu_user_annotation", "ProfilerStep#6", 9, 2),
            event("gpu_user_annotation", "ProfilerStep#6", 11, 20),  # on another stream
            event("gpu_user_annotation", "ProfilerStep#7", 40, 2),
            event("gpu_user_annotation", "Optimizer.step#SGD.step", 12, 2),
            event("cuda_runtime", "cudaLaunchKernel", 1, 1),
        ],
    }


def _write(path: Path, content: object) -> Path:
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_trace_of_jax(tmp_path: Path):
    recording = chrome.read(_write(tmp_path / "a.trace.json.gz", _jax()))
    (device,) = recording.devices
    assert device.name == "GPU 3"
    matmul, copy = device.events
    assert (matmul.stream, matmul.op, matmul.module) == ("Stream #14", "dot.1", "jit_step")
    assert (matmul.start_ns, matmul.end_ns) == (5500, 7500)
    assert copy.detail == COPY_P2P
    assert dict(recording.ignored) == {"CUPTI overhead": 1}
    assert recording.start_ns is None


def test_a_trace_of_pytorch(tmp_path: Path):
    recording = chrome.read(_write(tmp_path / "train.json", _torch()))
    attention, copy = recording.devices[0].events
    assert attention.end_ns - attention.start_ns == 5000
    assert copy.start_ns - attention.start_ns == 2250  # though its microseconds have 16 digits
    assert copy.detail == COPY_P2P
    assert recording.marks == (8000, 39000)
    assert dict(recording.ignored) == {NO_DURATION: 1}
    assert recording.start_ns == (BASE_US + 1) * 1000


def test_cpu_devices_are_read_from_the_other_file(tmp_path: Path):
    args = {"hlo_op": "dot.1", "device_ordinal": "0"}
    trace = {"traceEvents": [{"ph": "X", "name": "dot.1", "ts": 1, "dur": 2, "args": args}]}
    with pytest.raises(ValueError, match=r"is of CPU devices.*the xplane\.pb in the same folder"):
        chrome.read(_write(tmp_path / "a.trace.json.gz", trace))


WRONG = {
    "empty": (b"", "is empty"),
    "text": (b"# What lies here", "is no JSON, or is cut short"),
    "cut short": (json.dumps(_jax()).encode()[:200], "is no JSON, or is cut short"),
    "zipped, cut short": (gzip.compress(json.dumps(_jax()).encode())[:200], "is no JSON, or is cut"),
    "other JSON": (b'{"a": 1}', "is no trace"),
    "a number": (b"3", "is no trace"),
    "events that are none": (b'{"traceEvents": [1]}', "is no trace"),
    "no GPU": (b'{"traceEvents": []}', "has no event of a GPU among 0 events"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_none_is_refused(what: str, tmp_path: Path):
    data, said = WRONG[what]
    synthetic.assert_refused(chrome.read, tmp_path / "wrong.trace.json", data, said)
