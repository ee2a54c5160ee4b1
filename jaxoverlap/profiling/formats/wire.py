"""Read protocol buffers without their schema, as field numbers and undecoded values.

`jax.profiler.ProfileData` gives lines and events, and not the HLO modules that a profile carries in
the metadata of a plane without events; these are read here. The numbers of the fields are those of
tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto (openxla/xla).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PLANES = 1  # of an XSpace
_NAME, _EVENT_METADATA = 2, 4  # of an XPlane
_VALUE = 2  # of a map's entry
_METADATA_NAME, _METADATA_STATS = 2, 5  # of an XEventMetadata
_BYTES = 6  # of an XStat
_MODULE = 1  # of an HloProto
_METADATA_PLANE = b"/host:metadata"
_PROGRAM = re.compile(r"(.*)\((\d+)\)")


def hlo_modules(serialized: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield the modules of a serialized XSpace: name, program, bytes of the HloModuleProto.

    Raises:
        ValueError: if the bytes are no protocol buffer.
    """
    for number, plane in fields(memoryview(serialized)):
        if number != _PLANES or isinstance(plane, int):
            continue
        parts = list(fields(plane))
        if not any(n == _NAME and bytes(v) == _METADATA_PLANE for n, v in _views(parts)):
            continue
        for n, entry in _views(parts):
            if n == _EVENT_METADATA:
                yield from _module(entry)


def _module(entry: memoryview) -> Iterator[tuple[str, int, bytes]]:
    """Yield the module of one entry of the event metadata, if it has one."""
    for number, metadata in _views(fields(entry)):
        if number != _VALUE:
            continue
        parts = list(_views(fields(metadata)))
        name = next((bytes(v).decode() for n, v in parts if n == _METADATA_NAME), "")
        match = _PROGRAM.fullmatch(name)
        for stat in (v for n, v in parts if n == _METADATA_STATS):
            for proto in (v for n, v in _views(fields(stat)) if n == _BYTES):
                for module in (v for n, v in _views(fields(proto)) if n == _MODULE):
                    head, program = match.groups() if match else (name, "-1")
                    yield head, int(program), bytes(module)


def _views(
    pairs: Iterator[tuple[int, int | memoryview]] | list[tuple[int, int | memoryview]],
) -> Iterator[tuple[int, memoryview]]:
    return ((number, value) for number, value in pairs if isinstance(value, memoryview))


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a message: number, and an integer or the bytes.

    Raises:
        ValueError: if the bytes are no message, or end too soon.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {place}")
        if place + size > len(message):
            raise ValueError(f"a field of {size} bytes at byte {place} of {len(message)}")
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError(f"an integer without an end at byte {place}")
