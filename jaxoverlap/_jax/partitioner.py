"""Run XLA's compiler on a lowered step up to and including its partitioner, and read the result.

XLA calls a Python pass between its partitioner and its scheduler (`jax.extend.xla`). The pass here
keeps the partitioned module and raises, which ends the compilation: a step that takes ten seconds
to compile is partitioned within a few tenths. The module goes to XLA's own client, past JAX's
caches, logs and counters: for all that they tell, nothing was compiled.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_partitioner.py` pins each behaviour used.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.extend import xla
from jax.sharding import AbstractMesh, Mesh
from jaxlib import _hlo  # type: ignore[attr-defined]

from jaxoverlap._jax import compat, jits, propagated
from jaxoverlap._jax.propagated import Spec
from jaxoverlap._util.stderr import lines_without

_PASS, _NAME = "jaxoverlap-ask", "jaxoverlap_asks"
_lock = threading.Lock()
_registered: set[str] = set()  # platforms whose compiler calls `_keep`
_modules: dict[str, list[Any]] = {}  # partitioned modules that were asked for, by name
_numbers = itertools.count()


class Partitioned(NamedTuple):
    """A partitioned step, as XLA's partitioner leaves it.

    Attributes:
        text: the text of the partitioned module, not scheduled yet.
        results: the sharding of each result; in XLA's notation if it splits a mesh axis.
        tagged: the matmuls and scatters that have the tag, with the values of their tags.
    """

    text: str
    results: tuple[Spec | str, ...]
    tagged: tuple[tuple[str, propagated.Tagged], ...] = ()


class NoAnswerError(RuntimeError):
    """Raised if XLA's compiler failed before it had partitioned the step."""


class _Enough(Exception):
    """Raised inside XLA's compiler to end a compilation after the partitioner."""


# XLA:CPU joins all the sums of a step in one at its end, of both halves or of all gradients, before
# the pass that reads the module. See `flags.required.options_for` for where this is set.
CPU_SUMS_APART = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def new_name() -> str:
    """Return a module name, unique in this process, for a step that is only partitioned."""
    return f"{_NAME}_{next(_numbers)}"


def ask(
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    tag: str = "",
    options: Mapping[str, str] | None = None,
) -> Partitioned:
    """Partition a lowered step with XLA; return the partitioned module and its results' shardings.

    Args:
        lowered: the step, under a name from `new_name`.
        mesh: the mesh whose axes name the results' shardings.
        tag: a frontend attribute; the shardings of matmuls and scatters that have it are read too.
        options: compiler options; None for those that an overlapped step has.

    Raises:
        NoAnswerError: if the compilation ended in another way; its message is XLA's.
    """
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    name = str(lowering._hlo.operation.attributes["sym_name"]).strip('"')
    _register(_platform(lowering))
    if options is None:
        options = CPU_SUMS_APART if many_processes_of_cpus(lowering._device_list) else {}
    if not tag:
        return _asked(lowering, name, mesh, options)
    with tempfile.TemporaryDirectory(prefix="jaxoverlap-") as folder:
        answer = _asked(lowering, name, mesh, {**options, **propagated.options(Path(folder))})
        module = propagated.read(Path(folder))
    if module is None:
        raise NoAnswerError(f"Shardy left no module of {name}")
    return answer._replace(tagged=tuple(propagated.tagged(module, tag)))


def _asked(lowering: Any, name: str, mesh: Mesh, options: Mapping[str, str]) -> Partitioned:
    """Partition a lowering of some name with some more compiler options."""
    module = _partitioned(lowering, lowering._hlo, name, options)
    avals = lowering.compile_args["global_out_avals"]
    return Partitioned(module.to_string(), _results(module, avals, mesh))


def _partitioned(lowering: Any, module: Any, name: str, options: Mapping[str, str]) -> Any:
    """Return the partitioned module of a lowering, whose module may have another name."""
    _modules[name] = []
    try:
        with lines_without(_NAME):  # candidates' reshards are no news to the user
            _compile(lowering, module, options)
    except jax.errors.JaxRuntimeError as error:
        if not _modules[name]:
            raise NoAnswerError(str(error)) from error
    finally:
        modules = _modules.pop(name)
    if not modules:
        raise NoAnswerError(f"XLA compiled {name} without calling the pass after its partitioner")
    return modules[0]


def let_answer(lowered: jax.stages.Lowered) -> None:
    """Have XLA partition a lowered step, so that operations that partition themselves answer.

    Raises:
        NoAnswerError: as `ask`.
    """
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    _register(_platform(lowering))
    name = new_name()  # another compilation may have the step's own
    with mlir.make_ir_context():
        module = ir.Module.parse(mlir.module_to_bytecode(lowering._hlo))
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        _partitioned(lowering, module, name, {})


def _platform(lowering: Any) -> str:
    on_cpu = next(iter(lowering._device_list)).platform == "cpu"
    return "cpu" if on_cpu else "cuda"


def many_processes_of_cpus(devices: Iterable[Any]) -> bool:
    """Return whether devices are CPUs of several processes, which send over a network."""
    each = list(devices)
    return each[0].platform == "cpu" and len({d.process_index for d in each}) > 1


def _register(platform: str) -> None:
    """Have XLA call `_keep`, for as long as the process lives.

    It is never cleared: XLA may still call it for another thread that compiles, and crashes then.
    """
    with _lock:
        if platform not in _registered:
            stage = xla.PipelineStage.PRE_SCHEDULER
            xla.register_hlo_module_transformation(
                _keep, name=_PASS, stage=stage, platforms=platform
            )
            _registered.add(platform)


def _keep(serialized: bytes) -> None:
    """Store a module that `ask` waits for and end its compilation; XLA calls it for each module."""
    wanted = _modules.get(module_name(serialized))
    if wanted is not None:
        wanted.append(_hlo.HloModule.from_serialized_hlo_module_proto(serialized))
        raise _Enough


def module_name(serialized: bytes) -> str:
    """A serialized module's name, which is its first field: tag, length as a varint, text."""
    assert serialized[0] == 0x0A, "HloModuleProto.name is field 1"
    size, shift, at = 0, 0, 1
    while True:
        size, more, at = size | (serialized[at] & 0x7F) << shift, serialized[at] & 0x80, at + 1
        shift += 7
        if not more:
            return serialized[at : at + size].decode()


def _compile(lowering: Any, module: Any, options: Mapping[str, str]) -> None:
    """Compile a lowering as JAX would, but for what JAX caches, logs and counts."""
    given = lowering.compile_args
    compiler.backend_compile_and_load(
        given["backend"],
        module,
        lowering._device_list,
        jits.compile_options(lowering, options),
        list(given["host_callbacks"]),
    )


def _results(module: Any, avals: Sequence[Any], mesh: Mesh) -> tuple[Spec | str, ...]:
    """Return the shardings of a partitioned module's results, without the tokens before them."""
    said = module.spmd_output_sharding
    if said is None:
        return ("",) * len(avals)
    sharding = xla_client.HloSharding.from_proto(said)
    shardings = sharding.tuple_elements() or [sharding]
    if len(shardings) == 1:  # XLA says once what holds for all
        shardings = shardings * len(avals)
    last = shardings[len(shardings) - len(avals) :]
    specs = [_spec(s, aval, mesh.shape) for s, aval in zip(last, avals, strict=True)]
    return tuple(
        s.to_string() if spec is None else spec for s, spec in zip(last, specs, strict=True)
    )


def _spec(sharding: Any, aval: Any, axes: Mapping[str, int]) -> Spec | None:
    """Translate an XLA sharding into mesh axes by dim; None if that would split a mesh axis.

    Args:
        sharding: an `HloSharding`.
        aval: the type of the value.
        axes: devices along each axis of the mesh.
    """
    if sharding.is_replicated() or sharding.is_manual():
        return ((),) * aval.ndim  # what is manual has no automatic axis
    if not sharding.is_tiled():
        return None
    # XLA ends the process where a named sharding (v3) is asked for its tiles.
    tiles = xla_client.HloSharding.v3_to_v2_sharding(sharding)
    if tiles.num_devices() != math.prod(axes.values()) or len(tiles.subgroup_types()) > 1:
        return None
    try:
        (spec,) = parse_flatten_op_sharding(tiles, AbstractMesh(tuple(axes.values()), tuple(axes)))
    except (ValueError, AssertionError):  # part of an axis
        return None
    if len(spec) > aval.ndim:  # a random key is an array of words
        return None
    return compat.axes_by_dim(spec, aval.ndim)
