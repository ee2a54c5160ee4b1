"""A hash of what a jaxpr computes: the same in every process, and on every machine.

Variables are numbered as they come, and what a jaxpr carries besides computing is left out: names,
source lines, the devices of meshes. Objects that nothing is known of count by their type alone, so
that no address gets in; equations still differ by their operands and results.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat

# These parameters do not change what is computed: names, source lines, and the mesh that was set
# around an equation, which the types of values state already.
_BESIDE = frozenset(
    {
        *("name", "debug_info", "name_and_src_info", "src_info", "origin", "metadata"),
        *("ctx_mesh", "context_mesh"),
    }
)
_TREES = frozenset({"ft_in", "ft_out"})  # of a scan: `scan_counts` hashes what matters of them


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})


def _says_nothing(value: Any) -> bool:
    """Return whether a parameter is an empty sharding on a mesh without explicit axes.

    It appears where the arguments are arrays of the mesh, and not where they come from elsewhere.
    """
    if not isinstance(value, NamedSharding) or value.spec.unreduced or value.spec.reduced:
        return False
    if any(compat.partitions(value.spec)):
        return False
    return AxisType.Explicit not in value.mesh.axis_types


def fingerprint(jaxpr: Any) -> str:
    """Return a hash of a jaxpr, as 64 hexadecimal digits."""
    return _Walk().jaxpr(jaxpr)


def memory_text(sharding: Any) -> str:
    """Name a sharding's memory; empty for the devices' own, which has several names."""
    kind = sharding.memory_kind
    return "" if kind in (None, "device", "unpinned_host") else kind


class _Walk:
    """The hash of a jaxpr; an inner jaxpr that several equations call is hashed once."""

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}  # by id: all are held by the jaxpr around them

    def jaxpr(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self.seen:
            text = "\n".join(self.lines(jaxpr))
            self.seen[id(jaxpr)] = hashlib.sha256(text.encode()).hexdigest()
        return self.seen[id(jaxpr)]

    def lines(self, jaxpr: Any) -> Iterator[str]:
        numbers: dict[Any, int] = {}

        def read(atom: Any) -> str:
            if compat.is_literal(atom):
                return f"{compat.type_text(atom)} {np.asarray(atom.val).tolist()!r}"
            return str(numbers[atom])

        def made(var: Any) -> str:
            numbers[var] = len(numbers)
            return compat.type_text(var)

        for kind in ("constvars", "invars"):
            yield " ".join((kind, *map(made, getattr(jaxpr, kind))))
        for eqn in jaxpr.eqns:
            operands = " ".join(map(read, eqn.invars))
            parameters = self.parameters(eqn)
            yield " ".join((eqn.primitive.name, operands, "->", *map(made, eqn.outvars)))
            yield parameters
        yield " ".join(("outvars", *map(read, jaxpr.outvars)))

    def parameters(self, eqn: Any) -> str:
        left_out = _BESIDE
        counts = ""
        if eqn.primitive.name == "scan":
            left_out, counts = _BESIDE | _TREES, f"{compat.scan_counts(eqn)} "
        kept = {k: v for k, v in eqn.params.items() if k not in left_out}
        if eqn.primitive.name not in _CONSTRAINTS:
            kept = {k: None if _says_nothing(v) else v for k, v in kept.items()}
        return counts + self.text(kept)

    def text(self, value: Any) -> str:
        """Return a parameter's text, the same in every process."""
        if compat.is_jaxpr(value):
            return self.jaxpr(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, np.generic):
            return repr(value.item())
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if isinstance(value, Mesh | AbstractMesh):
            kinds = [kind.name for kind in value.axis_types]
            return f"mesh {dict(value.shape)} {kinds}"
        if isinstance(value, NamedSharding):
            return f"{self.text(value.mesh)} {value.spec} {memory_text(value)}"
        if isinstance(value, np.dtype | PartitionSpec):
            return str(value)
        return self.structure(value)

    def structure(self, value: Any) -> str:
        kind = type(value).__name__
        if isinstance(value, tuple | list):
            return f"{kind}({', '.join(map(self.text, value))})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{k}: {self.text(v)}' for k, v in value.items()))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return kind + self.text({k: v for k, v in fields.items() if k not in _BESIDE})
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if isinstance(name, str) else f"<{kind}>"
