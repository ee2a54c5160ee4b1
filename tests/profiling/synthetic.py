"""Make profiles as XLA's profilers write them: planes, lines, events and stats by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _hlo  # noqa: TID251 # to make what only profilers write

START_NS = 1_700_000_000_000_000_000

Stats = Mapping[str, object]


@dataclass(frozen=True)
class Ran:
    """An event: times in microseconds from the profile's start."""

    name: str
    start: float
    took: float
    stats: Stats = field(default_factory=dict)


Lines = Mapping[str, Sequence[Ran]]


def assert_refused(read: Callable[[Path], object], path: Path, data: bytes, said: str) -> None:
    """Write a file that is no profile, and check that its reader says so and names the file."""
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said) as error:
        read(path)
    assert str(path) in str(error.value)


def kernel(name: str, op: str, start: float, took: float, *, module: str = "jit_step") -> Ran:
    """A kernel with the annotations that XLA:GPU gives it."""
    stats = {"correlation_id": 7, "tf_op": "XlaModule:", "hlo_op": op, "hlo_module": module}
    return Ran(name, start, took, stats | {"program_id": 3, "kernel_details": "regs:32"})


def copied(name: str, start: float, took: float, op: str = "") -> Ran:
    """A copy, as CUPTI names its activities."""
    details = "kind_src:device kind_dst:device size:1024 dest:1 async:1"
    annotated = {"hlo_op": op, "hlo_module": "jit_step", "program_id": 3} if op else {}
    return Ran(name, start, took, {"memcpy_details": details, **annotated})


def xspace(
    planes: Mapping[str, Lines],
    modules: Mapping[tuple[str, int], str] | None = None,
    *,
    start_ns: int | None = START_NS,
) -> bytes:
    """Return a serialized XSpace."""
    parts = [_plane(name, lines, _device(name)) for name, lines in planes.items()]
    if modules:
        parts.append(_metadata(modules))
    if start_ns is not None:
        parts.append(_plane("Task Environment", {}, {"profile_start_time": start_ns}))
    return ProfileData.text_proto_to_serialized_xspace("\n".join(parts))


def write(path: Path, *args: object, **kwargs: object) -> Path:
    """Write an XSpace; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(xspace(*args, **kwargs))  # type: ignore[arg-type]
    return path


def _device(name: str) -> Stats:
    gpu = name.startswith("/device:GPU:")
    return {"gpu_device_name": "NVIDIA H100 80GB HBM3", "core_count": 132} if gpu else {}


def _plane(name: str, lines: Lines, stats: Stats) -> str:
    names = list(dict.fromkeys(e.name for events in lines.values() for e in events))
    keys = list(dict.fromkeys([*stats, *(k for es in lines.values() for e in es for k in e.stats)]))
    text = [f"planes {{ name: {_quoted(name)}"]
    text += [_entry("event_metadata", n, name) for n, name in enumerate(names, 1)]
    text += [_entry("stat_metadata", n, key) for n, key in enumerate(keys, 1)]
    text += [_stat(keys, key, value) for key, value in stats.items()]
    for number, (line, events) in enumerate(lines.items()):
        text.append(f"lines {{ id: {number} name: {_quoted(line)}")
        for event in events:
            text.append(
                f"events {{ metadata_id: {names.index(event.name) + 1} "
                f"offset_ps: {round(event.start * 1e6)} duration_ps: {round(event.took * 1e6)}"
            )
            text += [_stat(keys, key, value) for key, value in event.stats.items()]
            text.append("}")
        text.append("}")
    return "\n".join([*text, "}"])


def _entry(kind: str, number: int, name: str, more: str = "") -> str:
    value = f"id: {number} name: {_quoted(name)} {more}"
    return f"{kind} {{ key: {number} value {{ {value} }} }}"


def _stat(keys: Sequence[str], key: str, value: object) -> str:
    kind = "int64_value" if isinstance(value, int) else "str_value"
    shown = value if isinstance(value, int) else _quoted(str(value))
    return f"stats {{ metadata_id: {keys.index(key) + 1} {kind}: {shown} }}"


def _metadata(modules: Mapping[tuple[str, int], str]) -> str:
    """The plane of the modules: an entry for each, its HloProto as a stat of bytes."""
    entries = [
        _entry("event_metadata", n, f"{name}({program})", _proto(text))
        for n, ((name, program), text) in enumerate(modules.items(), 1)
    ]
    stat = _entry("stat_metadata", 1, "Hlo Proto")
    return "\n".join(['planes { name: "/host:metadata"', stat, *entries, "}"])


def _proto(text: str) -> str:
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    message = b"\x0a" + _varint(len(module)) + module
    octal = "".join(f"\\{byte:03o}" for byte in message)
    return f'stats {{ metadata_id: 1 bytes_value: "{octal}" }}'


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# -- a step ---------------------------------------------------------------------------------------

MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=2

%body (p: (s32[], bf16[512,512], bf16[512,512])) -> (s32[], bf16[512,512], bf16[512,512]) {
  %p = (s32[], bf16[512,512], bf16[512,512]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[512,512] get-tuple-element(%p), index=1
  %w = bf16[512,512] get-tuple-element(%p), index=2
  %hop = (bf16[512,512], bf16[512,512]) collective-permute-start(%x), channel_id=2, source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/all_gather_matmul.7/ppermute" source_file="/home/me/model/mlp.py" source_line=12}
  %inner = bf16[512,512] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/dot_general" source_file="/home/me/model/mlp.py" source_line=12}
  %hopped = bf16[512,512] collective-permute-done(%hop)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %sum = bf16[512,512] add(%inner, %hopped)
  ROOT %out = (s32[], bf16[512,512], bf16[512,512]) tuple(%next, %sum, %w)
}

%condition (p: (s32[], bf16[512,512], bf16[512,512])) -> pred[] {
  %p = (s32[], bf16[512,512], bf16[512,512]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %most = s32[] constant(2)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

ENTRY %main (x: bf16[512,512], w: bf16[256,512]) -> bf16[512,512] {
  %x = bf16[512,512] parameter(0)
  %w = bf16[256,512] parameter(1)
  %first = bf16[512,512] multiply(%x, %x), metadata={op_name="jit(step)/mul" source_file="/home/me/model/mlp.py" source_line=10}
  %gather = (bf16[256,512], bf16[512,512]) all-gather-start(%w), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/all_gather" source_file="/home/me/model/mlp.py" source_line=11}
  %matmul = bf16[512,512] dot(%first, %first), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/dot_general" source_file="/home/me/model/mlp.py" source_line=10}
  %gathered = bf16[512,512] all-gather-done(%gather)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[512,512], bf16[512,512]) tuple(%zero, %matmul, %gathered)
  %loop = (s32[], bf16[512,512], bf16[512,512]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  ROOT %result = bf16[512,512] get-tuple-element(%loop), index=1
}
"""
MODULES = {("jit_step", 3): MODULE}
GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"
GATHER, SENDRECV = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"  # fmt: skip


def step(at: float, late: float = 0.0) -> dict[str, list[Ran]]:
    """One run of the step on a GPU, from a time on; its gather starts `late` later.

    compute: 0-10 first, 10-30 matmul, 60-80 and 90-110 in the loop with its sums to 82 and 112;
    gather 12-60 (20 exposed less what it starts late... the wait ends with it), hops 60-70, 90-100.
    """
    compute = [
        kernel("loop_multiply_fusion", "first", at, 10),
        kernel(GEMM, "matmul", at + 10, 20),
        kernel(GEMM, "inner", at + 60, 20),
        kernel("loop_add_fusion", "sum", at + 80, 2),
        kernel(GEMM, "inner", at + 90, 20),
        kernel("loop_add_fusion", "sum", at + 110, 2),
    ]
    moves = [
        kernel(GATHER, "gather", at + 12 + late, 48 - late),
        kernel(SENDRECV, "hop", at + 60, 10),
        copied("MemcpyP2P", at + 90, 10, "hop"),
    ]
    return {"Stream #14(Compute)": compute, "Stream #22(Compute,MemcpyP2P)": moves}


def gpu(*steps: dict[str, list[Ran]]) -> dict[str, list[Ran]]:
    """The lines of a GPU that ran steps."""
    return {line: [e for one in steps for e in one[line]] for line in steps[0]}


def two_gpus(starts: Iterable[float] = (100, 300, 500)) -> dict[str, Lines]:
    """Two GPUs that run the step; GPU 1 comes to the gather 30 us late."""
    times = list(starts)
    return {
        "/device:GPU:0": gpu(*map(step, times)),
        "/device:GPU:1": gpu(*(step(at, late=30) for at in times)),
    }


def sharded_step():
    """A jitted step on eight CPU devices with gathers, sums and matmuls, and its arguments."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, P("data", None))

    def loss(up, down, x):
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ up) @ down, spread)
        return jnp.mean(y * y)

    def train(up, down, x):
        grads = jax.grad(loss, (0, 1))(up, down, x)
        return tuple(w - 0.1 * g for w, g in zip((up, down), grads, strict=True))

    shapes = {(512, 1024): ("data", "model"), (1024, 512): ("model", "data"), (256, 512): ("data",)}
    args = [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*axes)))
        for shape, axes in shapes.items()
    ]
    return jax.jit(train), args


LAYERS = 3


def scanned_step():
    """A jitted step that scans over layers with a collective in each, and its arguments."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("model", None))

    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w[0]) @ w[1], rows), None

    shapes = {(LAYERS, 2, 256, 256): (None, None, "model"), (256, 256): ("model",)}
    weights, x = (
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*axes)))
        for shape, axes in shapes.items()
    )
    return jax.jit(lambda weights, x: jax.lax.scan(layer, x, weights)[0]), (weights, x)
