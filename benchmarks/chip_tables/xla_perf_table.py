"""Read the collectives that XLA's authors measured out of JAX's installed CUDA plugin.

XLA carries a table of collectives for its own cost model (openxla/xla,
xla/service/gpu/model/collective_interpolator_data.h), made on NVLink machines by
xla/tools/collective_perf_table_gen_main. It has what aiconfigurator-core lacks: permutes, and
groups of up to 72 GPUs of a GB200 NVL72. There is no API to it, so the serialized
`DeviceHloInstructionProfiles` is looked for in the plugin's library by its key.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxoverlap.calibrate.fit import CollectiveRow

PACKAGE = "jax-cuda12-pjrt"
_MODULE = "jax_plugins.xla_cuda12"
_INSTALL = "pip install '.[chip-tables]' in the checkout"
# Numbers of the fields, from xla/service/hlo.proto, xla/xla_data.proto and
# xla/service/gpu/model/hlo_op_profile.proto.
_INSTRUCTION, _BYTES_PER_S = 1, 6
_OPCODE, _SHAPE, _PAIRS = 2, 3, 52
_ELEMENT_TYPE, _DIMENSIONS, _F32 = 2, 3, 11
_NEXT = (0, 1)  # the first pair of a permute round a ring, and of one among neighbours


def collective_rows(key: str) -> list[CollectiveRow]:
    """Read the measured collectives of a device, as in "sm_90"; permutes are those round a ring.

    `bytes_moved` is what each device sends by a ring, `size` how many devices take part; of a
    permute the devices of the whole ring.

    Raises:
        ImportError: if the plugin is not installed.
        ValueError: if its library has no such table.
    """
    rows = []
    for entry in _repeated(_table(key), 1):
        fields = dict(_fields(entry))
        if row := _row(_collected(fields[_INSTRUCTION]), fields.get(_BYTES_PER_S, 0)):
            rows.append(row)
    return sorted(rows, key=lambda r: (r.kind, r.size, r.bytes_moved))


def version() -> str:
    """Name the plugin and its version."""
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"


def _row(fields: dict[int, list], bytes_per_s: int) -> CollectiveRow | None:
    shape = _collected(fields[_SHAPE][0])
    if not bytes_per_s or shape[_ELEMENT_TYPE] != [_F32]:
        return None
    kind, num_bytes = fields[_OPCODE][0].decode(), 4 * _varint(shape[_DIMENSIONS][0], 0)[0]
    if kind == "collective-permute":
        pairs = [{1: 0, 2: 0} | dict(_fields(pair)) for pair in fields[_PAIRS]]
        round_a_ring = (pairs[0][1], pairs[0][2]) == _NEXT and pairs[1][2] == 2
        seconds = num_bytes / bytes_per_s
        return CollectiveRow(kind, len(pairs), num_bytes, seconds) if round_a_ring else None
    size = _group_size(fields)
    if kind == "reduce-scatter":
        num_bytes *= size  # the shape is the result's, the rate the operand's
    passes = 2 if kind == "all-reduce" else 1
    moved = passes * num_bytes * (size - 1) // size
    return CollectiveRow(kind, size, moved, num_bytes / bytes_per_s)


def _group_size(fields: dict[int, list]) -> int:
    """Return the devices of a group, from whichever field has [groups, devices of each]."""
    for number in sorted(n for n in fields if n > 80):
        for value in (v for v in fields[number] if isinstance(v, bytes)):
            inner = _collected(value)
            inner = _collected(inner[1][0]) if isinstance(inner.get(1, [0])[0], bytes) else inner
            if isinstance(inner.get(1, [b""])[0], int) and isinstance(inner.get(2, [b""])[0], int):
                return inner[2][0]
    raise ValueError("a collective without groups in XLA's table: its format has changed")


# -- protocol buffers -----------------------------------------------------------------------------


def _table(key: str) -> bytes:
    """Return the serialized list of a device's instructions."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"XLA's table of collectives is in {PACKAGE}: {_INSTALL}")
    library = Path(spec.submodule_search_locations[0], "xla_cuda_plugin.so").read_bytes()
    name = key.encode()
    for match in re.finditer(re.escape(b"\n" + bytes([len(name)]) + name + b"\x12"), library):
        size, start = _varint(library, match.end())
        if b"collective-permute" in (table := library[start : start + size]):
            return table
    raise ValueError(f"{version()} has no collectives of {key!r}: its format has changed")


def _varint(text: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = text[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _fields(text: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field; the value is an int, or bytes."""
    at = 0
    while at < len(text):
        tag, at = _varint(text, at)
        if tag & 7 == 0:
            value, at = _varint(text, at)
        else:
            size, at = {1: (8, at), 5: (4, at)}.get(tag & 7) or _varint(text, at)
            value, at = text[at : at + size], at + size
        yield tag >> 3, value


def _collected(text: bytes) -> dict[int, list]:
    fields: dict[int, list] = {}
    for number, value in _fields(text):
        fields.setdefault(number, []).append(value)
    return fields


def _repeated(text: bytes, number: int) -> Iterator[bytes]:
    return (value for n, value in _fields(text) if n == number and isinstance(value, bytes))
