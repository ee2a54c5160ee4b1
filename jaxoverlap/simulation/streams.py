"""Assign the collectives of a scheduled module to the streams on which XLA:GPU launches them.

A stream runs its work in the order in which it was started. A synchronous collective runs on the
stream of the kernels. All asynchronous ones share communication stream 0, copies between peers
included, unless one of two options makes more of them:

- `xla_gpu_collective_domain_assignment=scale_up_fabric` marks each collective whose groups are
  within an NVLink domain each; those have stream 3 to themselves (1 and 2 are for point-to-point
  sends of pipelines).
- `xla_gpu_experimental_enable_collective_multi_streaming` makes two streams of each of these, used
  in turns.

Only this module knows of it: replay, scheduler pass and estimate call it.
XLA: `xla/service/gpu/execution_stream_assignment.cc`, as of jaxlib 0.11.2 and 0.12.0.1; a test
holds this against what these launch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxoverlap.flags.extract import flags_in
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.device_groups import parties
from jaxoverlap.simulation.host_copies import KINDS
from jaxoverlap.simulation.schedule import Collective

MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"
_BY_DOMAIN = 3  # the first stream of those that are marked
_IN_TURNS = 2  # streams of a kind with MULTI_STREAMING


def scheduled_module(text: str, *, multi_streaming: bool | None = None) -> hlo.Module:
    """Parse the text of a scheduled module, and add the options that the text leaves out.

    Args:
        text: the module's.
        multi_streaming: whether it was compiled with MULTI_STREAMING. None: if XLA_FLAGS says so.

    Raises:
        ValueError: as `hlo.parse`.
    """
    if multi_streaming is None:
        given = [f for f in flags_in(os.environ.get("XLA_FLAGS", "")) if f.name == MULTI_STREAMING]
        multi_streaming = bool(given) and (given[-1].value or "true").lower() in ("true", "1")
    return replace(hlo.parse(text), multi_streaming=multi_streaming)


def stream(*, scale_up: bool) -> int:
    """Return the stream of an asynchronous collective, if each kind has only one."""
    return _BY_DOMAIN if scale_up else 0


def with_streams(module: hlo.Module, collectives: Iterable[Collective]) -> Iterator[Collective]:
    """Yield the collectives of a module with their streams.

    Args:
        module: the module.
        collectives: all of it; those of a computation that is called several times are repeated.
    """
    listed = list(collectives)
    turns = _turns(module, listed) if module.multi_streaming else {}
    for c in listed:
        if c.asynchronous:
            turn = turns.get((c.computation, c.name), 0) % _IN_TURNS
            c = replace(c, stream=stream(scale_up=c.scale_up) + turn)
        yield c


def apart(
    asynchronous: Sequence[Sequence[Collective]], num_devices: int
) -> dict[int, frozenset[int]]:
    """Map each start to the starts that XLA's scheduler keeps from running concurrently.

    Copies from and to the host's memory wait for no other device.

    Two on different streams that share more than one device could wait for each other for ever:
    NCCL's kernels may begin in one order on one device and in the other on the next. Those along
    two axes of a mesh share one device.
    XLA: `xla/service/gpu/gpu_latency_hiding_scheduler.cc`, openxla/xla pulls 19026 and 47467.

    Args:
        asynchronous: for each instruction of a computation the asynchronous collective that it
            starts, or those that it runs inside.
        num_devices: devices of the module.

    Returns:
        The indices of the starts that each instruction must not meet, by its index.
    """
    positions = {
        position: {(c.stream, c.groups) for c in cs if c.kind not in KINDS}
        for position, cs in enumerate(asynchronous)
    }
    ways = {way for mine in positions.values() for way in mine}
    clashing = {way: {other for other in ways if _clash(way, other, num_devices)} for way in ways}
    found: dict[int, frozenset[int]] = {}
    for position, mine in positions.items():
        avoided = {other for way in mine for other in clashing[way]}
        if avoided:
            found[position] = frozenset(p for p, theirs in positions.items() if theirs & avoided)
    return found


_Way = tuple[int | None, str]


def _clash(one: _Way, other: _Way, num_devices: int) -> bool:
    """Return whether two streams with groups of devices share more than one device."""
    if one[0] == other[0]:
        return False
    mine, theirs = (map(frozenset, set(parties(w[1], num_devices))) for w in (one, other))
    others = list(theirs)
    return any(len(a & b) > 1 for a in mine for b in others)


def _turns(module: hlo.Module, collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Number the asynchronous collectives of each kind, in XLA's order of assigning streams."""
    kind_of = {(c.computation, c.name): c.scale_up for c in collectives if c.asynchronous}
    turns: dict[tuple[str, str], int] = {}
    counts: dict[bool, int] = defaultdict(int)
    queue, seen = [module.entry], {module.entry}
    for computation in queue:
        for i in _post_order(module.body(computation)):
            if (kind := kind_of.get((computation, i.name))) is not None:
                turns[computation, i.name] = counts[kind]
                counts[kind] += 1
            if i.opcode in hlo.CONTROL_FLOW:
                called = [name for name in i.called if name not in seen]
                seen.update(called)
                queue += called
    return turns


def _post_order(body: tuple[hlo.Instruction, ...]) -> Iterator[hlo.Instruction]:
    """Yield instructions in XLA's post-order: each after its operands."""
    by_name = {i.name: i for i in body}
    used = {name for i in body for name in _needs(i)}
    emitted = set[str]()
    for last in (i.name for i in body if i.name not in used):
        stack = [last]
        while stack:
            i = by_name[stack[-1]]
            missing = [name for name in _needs(i) if name not in emitted]
            if missing:
                stack.append(missing[0])
            elif stack.pop() not in emitted:
                emitted.add(i.name)
                yield i


def _needs(i: hlo.Instruction) -> list[str]:
    return [*i.control, *(name.partition("#")[0] for name in i.operands)]
