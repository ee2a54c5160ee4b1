"""Give the instructions of a module another order, inside XLA's GPU compiler.

XLA calls a Python pass right after its own scheduler (`jax.extend.xla`). The registration is the
process's and stays once it is made; a pass touches no module but those that it was made for, by
name. XLA's persistent cache does not know of it: what a pass depends on
has to be in the module's name, which is part of the cache's key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from jax.extend import xla
from jaxlib import _hlo  # type: ignore[attr-defined]

from jaxoverlap._jax.partitioner import module_name


class ModuleScheduler(Protocol):
    """A scheduler that gives the modules of one compilation another order."""

    def orders(self, text: str) -> Mapping[str, Sequence[str]]:
        """Name each computation's instructions in their new order, from a scheduled module."""
        ...

    def failed(self, reason: str) -> None:
        """Record the reason for which a module was compiled in XLA's order instead."""
        ...


_NAME = "jaxoverlap-schedule"
_AT = {"stage": xla.PipelineStage.POST_SCHEDULER, "platforms": "cuda"}
_lock = threading.Lock()
_wanted: list[tuple[str, ModuleScheduler]] = []
_registered: list[str] = []


@contextmanager
def reordering(name: str, scheduler: ModuleScheduler) -> Iterator[None]:
    """Have modules of a name, after "jit_", compiled in a scheduler's order while this lasts.

    The scheduler is called on a thread of the compiler. If it fails, or its result is no order,
    its `failed` is called, and the module keeps XLA's order.
    """
    wanted = (name, scheduler)
    with _lock:
        if not _registered:  # and never cleared: XLA may be calling it for another thread
            xla.register_hlo_module_transformation(_transform, name=_NAME, **_AT)
            _registered.append(_NAME)
        _wanted.append(wanted)
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(wanted)


def module_text(serialized: bytes) -> str:
    """Return the text of a serialized HloModuleProto, in its schedule's order if it has one."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(serialized).to_string()


def _transform(serialized: bytes) -> bytes | None:
    """Reorder a module if a scheduler wants its name; XLA passes every scheduled module here."""
    called = module_name(serialized)
    with _lock:
        schedulers = [s for name, s in _wanted if called.endswith(f"_{name}")]
    if not schedulers:  # one of the many small modules that a compilation makes of its kernels
        return None
    module, result = _hlo.HloModule.from_serialized_hlo_module_proto(serialized), None
    for scheduler in schedulers:  # several threads may compile one step: each gets its report
        try:  # an exception here would end the compilation, for what is a matter of speed only
            orders = scheduler.orders(module.to_string())
            result = reordered(module, orders) if orders else None
        except Exception as error:
            scheduler.failed(f"{type(error).__name__}: {error}")
    return result


def reordered(module: _hlo.HloModule, orders: Mapping[str, Sequence[str]]) -> bytes:
    """A module with its computations in other orders, serialized.

    Raises:
        ValueError: if XLA's own check finds that an order is none: an instruction is missing, or
            comes before what it needs.
    """
    schedule = module.schedule()
    for computation in module.computations():
        if names := orders.get(computation.name):
            instructions = {i.name: i for i in schedule.sequence(computation)}
            schedule.set_sequence(computation, [instructions[name] for name in names])
    try:
        schedule.verify()
    except Exception as error:
        raise ValueError(f"not a schedule: {error}") from error
    module.set_schedule(schedule)
    return module.as_serialized_hlo_module_proto()
