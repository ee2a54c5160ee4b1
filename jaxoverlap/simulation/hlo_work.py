"""Derive the work of one HLO instruction: matmuls, attention, and bytes of device memory.

It gives no seconds: `jaxoverlap/cost/model.py` prices the work. A fusion is one kernel, so what
passes between its instructions touches no memory; only its parameters and results do, and of these
only what it needs (a slice of a stacked weight, an update of a buffer in place).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxoverlap.cost.kernels import FREE, AttentionKernel, KernelWork, MatmulKernel
from jaxoverlap.simulation import hlo

_FREE_OPS = """
    add-dependency after-all bitcast constant domain get-tuple-element opt-barrier parameter
    partition-id replica-id tuple
"""
_MEMORY_OPS = """
    abs add and atan2 bitcast-convert broadcast cbrt ceil clamp clz compare complex concatenate
    convert copy cosine divide dynamic-slice dynamic-update-slice erf exponential
    exponential-minus-one floor gather imag iota is-finite log log-plus-one logistic map maximum
    minimum multiply negate not or pad popcnt power real reduce reduce-precision reduce-window
    remainder reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scatter select select-and-scatter shift-left shift-right-arithmetic
    shift-right-logical sign sine slice sqrt subtract tan tanh transpose xor
"""
_TRANSCENDENTAL_OPS = """
    atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt
    sine sqrt tan tanh
"""
_FREE = frozenset(_FREE_OPS.split())  # XLA:GPU runs no kernel for these
_MEMORY = frozenset(_MEMORY_OPS.split())  # one kernel, bound by the bytes that it moves
_TRANSCENDENTAL = frozenset(_TRANSCENDENTAL_OPS.split())
_SLICES = ("dynamic-slice", "slice", "gather")  # read of their first operand what they return
_UPDATES = ("dynamic-update-slice", "scatter")  # write into their first operand
_FREE_CALLS = ("AllocateBuffer", "CreateBuffer", "Pin", "Unpin")
_MEMORY_CALLS = ("__cudnn$norm", "cu_threefry2x32", "cu_threefry2x32_ffi")

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_DIMS = re.compile(
    r'"?lhs_(contracting|batch)_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]'
)  # of a dot, and of a call to cuBLAS
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONFIG = re.compile(r"backend_config=(?=\{)")
HOST_SPACE = "S(5)"  # in a layout: the array lies in the host's memory


def work(module: hlo.Module, instruction: hlo.Instruction, shapes: Mapping[str, str]) -> KernelWork:
    """Return the work of an instruction on one device.

    Args:
        module: the module that it is in.
        instruction: anything but a collective, or what runs other computations (while, call,
            conditional).
        shapes: the shapes of its computation's instructions, by name, as text.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return FREE
    if opcode == "custom-call":
        return _custom_call(instruction, shapes)
    if opcode == "dot":
        return KernelWork(matmuls=(_dot(instruction, shapes),))
    if opcode == "convolution":
        return KernelWork(matmuls=(_convolution(instruction, shapes, "forward"),))
    if HOST_SPACE in instruction.shape:
        touched = _touched(instruction, shapes)
        return KernelWork((), touched, f"{opcode} to or from the host's memory")
    if opcode == "fusion" or opcode.endswith("-start"):
        bodies = [module.body(name) for name in instruction.called]
        if len(bodies) == 1:  # of a start: the one kernel that runs beside the others
            return _fusion(module, bodies[0])
        opcode = opcode.removesuffix("-start")  # copy-start has no computation
    hard = _elements(instruction.shape) if opcode in _TRANSCENDENTAL else 0
    unknown = "" if opcode in _MEMORY else opcode
    transposed = _transposed(instruction, shapes) * 2 * hlo.shape_bytes(instruction.shape)
    return KernelWork((), _unfused(instruction, shapes), unknown, hard, transposed_bytes=transposed)


def _unfused(instruction: hlo.Instruction, shapes: Mapping[str, str]) -> int:
    """Return the bytes that an instruction outside fusions reads and writes."""
    result = hlo.shape_bytes(instruction.shape)
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode in _UPDATES:
        last = 1 if instruction.opcode == "dynamic-update-slice" else -1
        return 2 * hlo.shape_bytes(operand_shape(shapes, instruction.operands[last]))
    if instruction.opcode == "copy-start":  # its shape is destination, source, context
        return 2 * hlo.shape_bytes(operand_shape(shapes, instruction.operands[0]))
    return _touched(instruction, shapes)


def operand_shape(shapes: Mapping[str, str], operand: str) -> str:
    """Return an operand's shape as text; "pair#1" is an element of a tuple."""
    name, _, element = operand.partition("#")
    shape = shapes.get(name, "")
    return hlo.array_shapes(shape)[int(element)] if element else shape


def _touched(instruction: hlo.Instruction, shapes: Mapping[str, str]) -> int:
    read = (hlo.shape_bytes(operand_shape(shapes, name)) for name in instruction.operands)
    return sum(read) + hlo.shape_bytes(instruction.shape)


# -- fusions --------------------------------------------------------------------------------------


def _fusion(module: hlo.Module, body: Sequence[hlo.Instruction]) -> KernelWork:
    """Return the work of a fused computation, with the dots and fusions inside it."""
    shapes = {i.name: i.shape for i in body}
    matmuls: list[MatmulKernel] = []
    unknown = ""
    for i in body:
        if i.opcode in ("dot", "convolution", "custom-call", "fusion"):
            inside = work(module, i, shapes)
            matmuls += inside.matmuls
            unknown = unknown or inside.unknown
    memory_bytes, hard, transposed = _fusion_traffic(body, shapes)
    return KernelWork(tuple(matmuls), memory_bytes, unknown, hard, transposed_bytes=transposed)


def _fusion_traffic(
    body: Sequence[hlo.Instruction], shapes: Mapping[str, str]
) -> tuple[int, int, int]:
    """Return the bytes a fusion reads and writes, its transcendentals, and the bytes it transposes.

    How many elements of each value are needed follows from the results backwards. An update of a
    parameter is taken to be in place, as XLA:GPU compiles it where it can.
    """
    by_name = {i.name: i for i in body}
    results = _results(body[-1], by_name)
    need: dict[str, float] = defaultdict(float)
    written = 0
    for result in results:
        updated = _updated_in_place(result, by_name)
        written += sum(map(hlo.shape_bytes, updated)) if updated else hlo.shape_bytes(result.shape)
        need[result.name] = _elements(result.shape)
    read = hard = transposed = 0.0
    for i in reversed(body):
        total = _elements(i.shape)
        wanted = min(need[i.name], total)
        if i.opcode == "parameter":
            read += hlo.shape_bytes(i.shape) * (wanted / total if total else 0)
        if i.opcode in _TRANSCENDENTAL:
            hard += wanted
        if _transposed(i, shapes):
            transposed += 2 * hlo.shape_bytes(i.shape) * (wanted / total if total else 0)
        for position, name in enumerate(i.operands):
            if name in by_name and i.opcode != "tuple":
                need[name] += _needed(i, position, wanted, total, by_name)
    return round(read) + written, round(hard), round(transposed)


def _transposed(i: hlo.Instruction, shapes: Mapping[str, str]) -> bool:
    """Return whether an instruction writes along another dim than it reads: a transpose."""
    if i.opcode not in ("transpose", "copy"):
        return False
    read = hlo.fastest_dim(operand_shape(shapes, i.operands[0]))
    written = hlo.fastest_dim(i.shape)
    if i.opcode == "transpose" and written is not None:  # which dim of the operand that is
        written = int(re.findall(r"\d+", i.attribute("dimensions"))[written])
    return None not in (read, written) and read != written


def _needed(
    user: hlo.Instruction,
    position: int,
    wanted: float,
    total: int,
    by_name: Mapping[str, hlo.Instruction],
) -> float:
    """Return the elements of an operand read for `wanted` of its user's `total` elements."""
    operand = _elements(by_name[user.operands[position]].shape)
    if user.opcode in _SLICES and position == 0:
        return wanted
    if user.opcode in _UPDATES:
        in_place = bool(_updated_in_place(user, by_name))
        return operand if position else 0 if in_place else wanted
    if user.opcode == "broadcast":
        return min(operand, wanted)
    return operand * wanted / total if total else operand


def _results(
    root: hlo.Instruction, by_name: Mapping[str, hlo.Instruction]
) -> list[hlo.Instruction]:
    """Return the arrays that a fused computation returns."""
    if root.opcode != "tuple":
        return [root]
    return [array for name in root.operands for array in _results(by_name[name], by_name)]


def _updated_in_place(result: hlo.Instruction, by_name: Mapping[str, hlo.Instruction]) -> list[str]:
    """Return the updates' shapes if a value is an updated parameter; else none."""
    shapes: list[str] = []
    while True:
        if result.opcode in _UPDATES:
            last = 1 if result.opcode == "dynamic-update-slice" else -1
            shapes.append(by_name[result.operands[last]].shape)
        elif result.opcode != "bitcast":
            return shapes if result.opcode == "parameter" else []
        result = by_name[result.operands[0]]


@functools.lru_cache(maxsize=65536)
def _elements(shape: str) -> int:
    return sum(math.prod(hlo.dims(array)) for array in hlo.array_shapes(shape))


# -- matmuls --------------------------------------------------------------------------------------


def _custom_call(instruction: hlo.Instruction, shapes: Mapping[str, str]) -> KernelWork:
    match = _TARGET.search(instruction.line)
    target = match.group(1) if match else "custom-call"
    if target in _FREE_CALLS:
        return FREE
    if target.startswith("__cublas$") and _DIMS.search(instruction.line):
        return KernelWork(matmuls=(_dot(instruction, shapes),))
    if target.startswith("__cudnn$fmha"):
        return _attention(instruction, shapes, target)
    if target in _TE_ATTENTION:
        return _te_attention(instruction, shapes, target)
    if target.startswith("__cudnn$conv") and _LABELS.search(instruction.line):
        way = next((w for w in _ROLES if w in target.lower()), "forward")
        return KernelWork(matmuls=(_convolution(instruction, shapes, way),))
    if target in _MEMORY_CALLS:
        return KernelWork(memory_bytes=_touched(instruction, shapes))
    return KernelWork((), _touched(instruction, shapes), target)


def _dot(instruction: hlo.Instruction, shapes: Mapping[str, str]) -> MatmulKernel:
    """Return the work of a dot or of a call to cuBLAS, whose first result is the product."""
    lhs = hlo.array_shapes(operand_shape(shapes, instruction.operands[0]))[0]
    sizes = hlo.dims(lhs)
    named = {kind: re.findall(r"\d+", dims) for kind, dims in _DIMS.findall(instruction.line)}
    batch = math.prod(sizes[int(d)] for d in named.get("batch", ()))
    k = math.prod(sizes[int(d)] for d in named.get("contracting", ()))
    m = math.prod(sizes) // (batch * k) if batch * k else 0
    result = math.prod(hlo.dims(hlo.array_shapes(instruction.shape)[0]))
    n = result // (batch * m) if batch * m else 0
    return MatmulKernel(m, n, k, batch, lhs.partition("[")[0])


_ROLES = {  # of a convolution: where input, filter and output stand; 2 is the result
    "backwardinput": (2, 1, 0),
    "backwardfilter": (0, 2, 1),
    "forward": (0, 1, 2),
}


def _convolution(instruction: hlo.Instruction, shapes: Mapping[str, str], way: str) -> MatmulKernel:
    """Return a convolution's work as cuDNN's implicit matmul (NVIDIA's deep learning guide).

    Forward: output positions x (filter taps and input features) x output features.
    """
    match = _LABELS.search(instruction.line)
    assert match
    arrays = [operand_shape(shapes, name) for name in instruction.operands[:2]]
    arrays = [hlo.array_shapes(shape)[0] for shape in (*arrays, instruction.shape)]
    _, taps, output = (hlo.dims(arrays[position]) for position in _ROLES[way])
    features = taps[match.group(2).index("o")]
    positions, depth = math.prod(output) // features, math.prod(taps) // features
    sizes = {
        "forward": (positions, features, depth),
        "backwardinput": (positions, depth, features),
        "backwardfilter": (depth, features, positions),
    }
    return MatmulKernel(*sizes[way], dtype=arrays[0].partition("[")[0])


def _attention(instruction: hlo.Instruction, shapes: Mapping[str, str], target: str) -> KernelWork:
    """Return the work of cuDNN's flash attention; XLA gives [batch, heads, queries, keys]."""
    config = _cudnn_config(instruction.line)
    scores = config.get("intermediate_tensor_shape", {}).get("dimensions")
    if scores is None:
        return KernelWork((), _touched(instruction, shapes), target)
    *heads, queries, keys = map(int, scores)
    query = hlo.array_shapes(operand_shape(shapes, instruction.operands[0]))[0]
    causal = config.get("mask_type") in _CAUSAL
    if causal:
        keys = _windowed(keys, int(config.get("sliding_window_length") or 0))
    kernel = AttentionKernel(
        queries=queries,
        keys=keys,
        heads=math.prod(heads),
        head_size=hlo.dims(query)[-1],
        causal=causal,
        backward="Backward" in target,
        dtype=query.partition("[")[0],
    )
    return KernelWork(memory_bytes=_touched(instruction, shapes), attention=kernel)


_CAUSAL = ("CAUSAL", "PADDING_CAUSAL")
_TE_ATTENTION = ("te_fused_attn_forward_ffi", "te_fused_attn_backward_ffi")
_TE_NUMBER = re.compile(r"(\w+) = (-?\d+) : \w+")
_TE_CAUSAL = 2  # and above: NVTE_Mask_Type of transformer_engine/fused_attn.h


def _te_attention(
    instruction: hlo.Instruction, shapes: Mapping[str, str], target: str
) -> KernelWork:
    """Return the work of Transformer Engine's fused attention, whose sizes are attributes.

    Packed sequences (thd) count as one sequence of the longest length, as their segments are data.
    """
    attributes = {name: int(number) for name, number in _TE_NUMBER.findall(instruction.line)}
    size = attributes.get("qk_head_dim", attributes.get("head_dim"))
    names = ("input_batch", "attn_heads", "q_max_seqlen", "kv_max_seqlen")
    if size is None or not all(name in attributes for name in names):
        return KernelWork((), _touched(instruction, shapes), target)
    batch, heads, queries, keys = (attributes[name] for name in names)
    causal = attributes.get("mask_type", 0) >= _TE_CAUSAL
    window = attributes.get("window_size_left", -1)
    query = hlo.array_shapes(operand_shape(shapes, instruction.operands[0]))[0]
    kernel = AttentionKernel(
        queries=queries,
        keys=_windowed(keys, window + 1) if causal else keys,
        heads=batch * heads,
        head_size=size,
        causal=causal,
        backward="backward" in target,
        dtype=query.partition("[")[0],
    )
    return KernelWork(memory_bytes=_touched(instruction, shapes), attention=kernel)


def _windowed(keys: int, window: int) -> int:
    """Return the keys whose causal mask has a window's work: twice the window, at most all."""
    return min(keys, 2 * window) if window > 0 else keys


def _cudnn_config(line: str) -> Mapping[str, Any]:
    """Parse the JSON configuration of a call to cuDNN's attention; empty if it is not JSON."""
    at = _CONFIG.search(line)
    if at is None:
        return {}
    try:
        config, _ = json.JSONDecoder().raw_decode(line, at.end())
    except json.JSONDecodeError:
        return {}
    return config.get("cudnn_fmha_backend_config", config)
