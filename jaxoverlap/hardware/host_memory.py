"""Put arguments of a lowered step into host memory, for devices that are not there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.extend.mlir import ir


def in_host_memory(lowered: Any, arguments: Collection[int]) -> None:
    """Mark arguments of a lowering as lying in pinned host memory; the lowering is changed.

    On real devices a sharding says so. The devices of a pod have no memories to ask, and
    `NamedSharding` drops its memory kind there (jax 0.12.0.1).

    Args:
        lowered: what `jax.jit(...).lower` gave, not compiled yet.
        arguments: numbers of its flattened arguments.

    Raises:
        ValueError: if it has fewer arguments.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(
            op for op in module.body.operations if op.attributes["sym_name"].value == "main"
        )
        attributes = list(main.attributes["arg_attrs"])
        if arguments and max(arguments) >= len(attributes):
            raise ValueError(
                f"argument {max(arguments)} of a step with {len(attributes)}: expected numbers of "
                "its flattened arguments"
            )
        for number in arguments:
            named = {one.name: one.attr for one in attributes[number]}
            named["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes[number] = ir.DictAttr.get(named)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
