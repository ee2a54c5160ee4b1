"""Record how `custom_partitioning` operations partition, so that other processes can compile them.

A `custom_partitioning` operation, as cuDNN's attention is one, is a custom call with a key. XLA's
partitioner passes JAX the key and the shardings of operands and result, and JAX calls the Python
function that is registered under the key in the process that lowered the operation. A process that
only has the module does not have that function. So its answers are recorded in the process that has
it, and returned again in the other.

XLA keeps the function that JAX registered first, for good. So its code is exchanged, once.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_custom_partitioners.py` pins what is used.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax._src import custom_partitioning, custom_partitioning_sharding_rule
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

_TARGET = custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME


BATCHING = custom_partitioning_sharding_rule.BATCHING  # begins the name of leading dims


class PartitionerAnswer(NamedTuple):
    """The device program and shardings that an operation returned to the partitioner once.

    Attributes:
        module: what each device computes, as MLIR bytecode.
        operands, result: the shardings that they must have, as serialized `OpSharding`.
    """

    module: bytes
    operands: tuple[bytes, ...]
    result: bytes


Answers = Mapping[str, Mapping[str, PartitionerAnswer]]
"""The answers of operations, by their key and by what was asked."""

_recorded: weakref.WeakKeyDictionary[Any, dict[str, PartitionerAnswer]] = (
    weakref.WeakKeyDictionary()
)
_given: dict[str, Mapping[str, PartitionerAnswer]] = {}


def keys_of(lowering: Any) -> list[str]:
    """List the keys of a lowering's operations that partition themselves."""
    kept = lowering.compile_args["keepalive"] or ()
    return [str(id(info)) for info in kept if isinstance(info, _Info)]


_Info = custom_partitioning._ShardingCallbackInfo


def recorded(keys: Sequence[str]) -> dict[str, dict[str, PartitionerAnswer]]:
    """Return what operations have answered so far; XLA must have partitioned them."""
    infos = custom_partitioning._sharding_callbacks
    return {key: dict(_recorded.get(infos[key.encode()], {})) for key in keys}


def give(answers: Answers) -> None:
    """Use answers recorded in another process to partition operations in this one."""
    _given.update(answers)
    record()


@functools.cache
def record() -> None:
    """Replace the code of JAX's function that XLA calls by `partition`, which records answers."""
    asked = custom_partitioning._custom_partitioning_partition
    global _own
    _own = types.FunctionType(asked.__code__, asked.__globals__, "own", asked.__defaults__)

    # It has no variables of this scope: the code runs with the globals of JAX's own module.
    def exchanged(arg_shapes, arg_shardings, result_shape, result_sharding, backend_string):  # type: ignore[no-untyped-def]
        from jaxoverlap._jax.custom_partitioners import partition

        return partition(arg_shapes, arg_shardings, result_shape, result_sharding, backend_string)

    asked.__code__ = exchanged.__code__


_own: Any = None  # JAX's own function, once `record` was called


def partition(*asked: Any) -> tuple[bytes, list[Any], Any]:
    """Partition an operation for XLA by its recorded answer, or by JAX's function and record it."""
    *lies, key = asked
    question = repr([_text(side) for side in lies])
    if (answers := _given.get(key.decode())) is not None:
        answer = answers[question]
        operands = list(map(_sharding, answer.operands))
        return answer.module, operands, _sharding(answer.result)
    module, operands, result = _own(*asked)
    answer = PartitionerAnswer(module, tuple(map(_bytes, operands)), _bytes(result))
    _recorded.setdefault(custom_partitioning._sharding_callbacks[key], {})[question] = answer
    return module, operands, result


def _text(side: Any) -> Any:
    return [str(one) for one in side] if isinstance(side, list | tuple) else str(side)


def _bytes(sharding: Any) -> bytes:
    return sharding.to_proto().SerializeToString()


def _sharding(serialized: bytes) -> Any:
    proto = xla_client.OpSharding()
    proto.ParseFromString(serialized)
    return xla_client.HloSharding.from_proto(proto)


def sharding_rule(eqn: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the mappings of operands and of results; None for a rule that is made by a function.

    Args:
        eqn: a `custom_partitioning` equation.
    """
    rule = eqn.params["sharding_rule"]
    if not isinstance(rule, custom_partitioning_sharding_rule.SdyShardingRule):
        return None
    return tuple(rule.operand_mappings), tuple(rule.result_mappings)


def renamed(module: Any, names: Mapping[str, str]) -> bytes:
    """Return a lowered module as bytecode, with other keys: JAX's own are addresses of a process.

    Args:
        module: the module; it stays as it is.
        names: the new keys, by the old ones.
    """
    with mlir.make_ir_context():
        copy = ir.Module.parse(mlir.module_to_bytecode(module))
        for call in _calls(copy.operation):
            key = ir.StringAttr(call.attributes["backend_config"]).value
            call.attributes["backend_config"] = ir.StringAttr.get(names[key])
        return mlir.module_to_bytecode(copy)


def _calls(operation: Any) -> Iterator[Any]:
    """Yield the operations inside another that partition themselves."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                inner = op.operation
                if inner.name == "stablehlo.custom_call" and (
                    ir.StringAttr(inner.attributes["call_target_name"]).value == _TARGET
                ):
                    yield inner
                yield from _calls(inner)
