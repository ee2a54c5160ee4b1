"""Parts of jax that may change: jits, their lowerings and processes.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_compat.py` pins each behaviour that is used.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax._src import (
    api,
    api_util,
    checkify,
    core,
    distributed,
    pjit,
    stages,
    util,
    xla_bridge,
)
from jax._src.interpreters import pxla

from jaxoverlap._jax import compat

# -- jitted functions -----------------------------------------------------------------------------


def is_jitted(fn: Any) -> bool:
    """Return whether `fn` came out of `jax.jit`."""
    return hasattr(fn, "trace") and hasattr(fn, "_jit_info") and hasattr(fn, "_fun")


def dynamic_arguments(
    jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return a jit's arguments without the static ones, which a compiled step does not take."""
    info = jitted._jit_info
    dynamic = [value for number, value in enumerate(args) if number not in info.static_argnums]
    return dynamic, {n: value for n, value in kwargs.items() if n not in info.static_argnames}


def stated_shardings(jitted: Any) -> tuple[Any, ...]:
    """Return the shardings that a jit states for its arguments, flat; some may be left open."""
    return tuple(jitted._jit_info.in_shardings_leaves)


@dataclass(frozen=True)
class Call:
    """A call of a jitted function, and the jit's own view of it.

    Attributes:
        jitted: the function.
        args, kwargs: its arguments.
        params: the jit equation's parameters; under "jaxpr" the traced jaxpr, the same object for
            each call of a signature.
        flat: the dynamic arguments, flat; static ones are gone.
        out_tree: the tree of the results.
    """

    jitted: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: dict[str, Any]
    flat: list[Any]
    out_tree: Any

    @property
    def name(self) -> str:
        """The function's name."""
        return self.params["name"]

    def traced(self) -> jax.stages.Traced:
        """Return the traced function, as `trace` of a jit does."""
        return self.jitted.trace(*self.args, **self.kwargs)


def infer(jitted: Any, args: tuple, kwargs: dict) -> Call:
    """Infer the call of a jitted function with these arguments; it traces once per signature."""
    params, flat = pjit._infer_params(jitted._fun, jitted._jit_info, args, kwargs)
    return Call(jitted, args, kwargs, params.params, flat, params.out_tree)


class Cache[V]:
    """Values by key, which `jax.clear_caches()` forgets with all that JAX remembers.

    Oldest first. JAX holds it by a weak reference.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, V] = {}
        util.register_cache(self, "jaxoverlap.overlap")

    def get(self, key: Hashable) -> V | None:
        """The value of a key, if there is one."""
        return self._values.get(key)

    def put(self, key: Hashable, value: V, *, at_most: int) -> None:
        """Remember a value, and forget the oldest beyond `at_most` of them."""
        self._values[key] = value
        while len(self._values) > at_most:
            self._values.pop(next(iter(self._values)))

    def values(self) -> list[V]:
        """All values, oldest first."""
        return list(self._values.values())

    # JAX asks these of a cache.

    def cache_clear(self) -> None:
        """Forget all."""
        self._values.clear()

    def cache_info(self) -> str:
        """Return how many signatures are remembered, as text."""
        return f"{len(self._values)} signatures"

    def cache_keys(self) -> list[Hashable]:
        """The keys, oldest first."""
        return list(self._values)


def at_top_level() -> bool:
    """Return whether nothing is being traced: a jit called here may have compiler options."""
    return core.trace_ctx.is_top_level()


def in_checkify() -> bool:
    """Return whether `checkify` is tracing what is called here, to put its checks into it.

    It calls the function with the caller's own arrays, so that only the stack shows it.
    """
    return any(code.co_filename == checkify.__file__ for code in _callers())


def only_shapes() -> bool:
    """Return whether what is called here is traced for its shapes or its jaxpr, and not to run."""
    shapes = ("eval_shape", "make_jaxpr")
    return any(
        code.co_name.startswith(shapes) and code.co_filename == api.__file__ for code in _callers()
    )


def _callers() -> Iterator[types.CodeType]:
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        yield frame.f_code


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The manual mesh axes on whose devices an array may differ; none where JAX does not check."""
    return jax.typeof(array).mat.varying  # type: ignore[attr-defined]


def is_tracer(argument: Any) -> bool:
    """Return whether an argument is traced, so that its sharding is not known."""
    return isinstance(argument, core.Tracer)


def bound_sharding(argument: Any) -> Any:
    """The sharding that an argument is bound to; None for scalars, tracers and free arrays."""
    if is_tracer(argument) or not getattr(argument, "committed", True):
        return None
    return getattr(argument, "sharding", None)


def placement(argument: Any) -> Hashable:
    """Return a key of an argument's bound sharding, equal for P("x") and P("x", None).

    None where an argument is bound to no sharding.
    """
    sharding = bound_sharding(argument)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    mesh, spec = sharding.mesh, sharding.spec
    entries = compat.axes_by_dim(spec, len(spec))
    dims = [tuple(a for a in e if a in mesh.shape and mesh.shape[a] > 1) for e in entries]
    while dims and not dims[-1]:
        dims.pop()
    return mesh, tuple(dims), spec.unreduced, spec.reduced, sharding.memory_kind


def bind_jit(flat: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Call a jit equation on flat arguments; tracers and arrays are both welcome."""
    try:
        return pjit.jit_p.bind(*flat, **params)
    except api_util.InternalFloatingPointError as error:  # jax_debug_nans; jit words it like this
        raise FloatingPointError(
            f"invalid value ({error.ty}) encountered in {error.name}"
        ) from error


def with_jaxpr(
    params: dict[str, Any], jaxpr: core.Jaxpr, options: dict[str, str]
) -> dict[str, Any]:
    """A jit equation's parameters with another jaxpr, and compiler options that its own beat.

    A jaxpr that has lost the names of arguments and results, which JAX's errors name, gets those.
    """
    if jaxpr.debug_info.arg_names is None:
        jaxpr = jaxpr.replace(debug_info=params["jaxpr"].debug_info)
    merged = {**options, **dict(params["compiler_options_kvs"])}
    return {**params, "jaxpr": jaxpr, "compiler_options_kvs": tuple(merged.items())}


def traced_with(traced: jax.stages.Traced, params: dict[str, Any]) -> jax.stages.Traced:
    """`traced` with other parameters of the same signature; trees, names and donation stay."""
    new: Any = jax.stages.Traced.__new__(type(traced))
    for slot in type(traced).__slots__:
        setattr(new, slot, getattr(traced, slot))
    new._params = params
    new._lojax = None  # derived from the jaxpr, and computed again from the new one
    new._closure_converted = None
    return new


def traced_params(traced: jax.stages.Traced) -> dict[str, Any]:
    """The jit equation's parameters of a traced step."""
    return traced._params  # type: ignore[attr-defined]


def without_arrays(call: Call) -> Call:
    """Return a call with shapes for its arrays, so that it keeps none of them in memory."""

    def shape_of(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=bound_sharding(x), weak_type=type_of(x)[2]
        )

    def shapes_of(argument: Any) -> Any:  # a static one may be a tree, and equal to itself alone
        leaves = jax.tree.leaves(argument)
        arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
        return jax.tree.map(shape_of, argument) if arrays else argument

    args = tuple(map(shapes_of, call.args))
    kwargs = {name: shapes_of(argument) for name, argument in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs, flat=list(map(shape_of, call.flat)))


# -- compiled programs ----------------------------------------------------------------------------


def flat_call(compiled: jax.stages.Compiled) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what calls a compiled program with flat arguments, and returns flat results.

    Where JAX has a fast path for it (as a rule where nothing calls back into Python), by that.

    Raises:
        ValueError: if its arguments or results are of types of the user's own.
    """
    executable: Any = compiled._executable  # type: ignore[attr-defined]
    params: Any = compiled._params  # type: ignore[attr-defined]
    if params.is_high:
        raise ValueError("arguments or results have types of the user's own (hijax)")
    leaves, results = params.in_tree.num_leaves, params.out_tree.num_leaves
    flat = jax.tree.structure(((0,) * leaves, {}))
    flat_params = params._replace(in_tree=flat, out_tree=jax.tree.structure([0] * results))
    fast = executable.create_cpp_call(flat_params)

    def call(arguments: Sequence[Any]) -> list[Any]:
        if fast is not None:
            return fast(*arguments)
        return stages.Compiled.call(flat_params, *arguments)[0]

    return call


def type_of(value: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Return shape, dtype and whether a value, or a compiled result, is weakly typed; keys too."""
    aval = getattr(value, "aval", value)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def results_of(compiled: jax.stages.Compiled) -> list[tuple[Any, Any]]:
    """Return the type (shape, dtype, weakness) and the sharding of each result."""
    executable: Any = compiled._executable  # type: ignore[attr-defined]
    return list(zip(map(type_of, executable.out_avals), executable._out_shardings, strict=True))


_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{([\d, ]*)\}")


def donated(compiled: jax.stages.Compiled) -> frozenset[int]:
    """Return the numbers of the flat arguments that a call takes, as their memory holds a result.

    An argument that is marked as donated but fits no result stays. So does, in a call, one that
    NumPy reads at that time, on CPU devices.
    """
    executable: Any = compiled._executable  # type: ignore[attr-defined]
    program = executable.xla_executable
    header, _, _ = program.hlo_modules()[0].to_string().partition("\n")
    _, _, aliases = header.partition("input_output_alias={")
    aliases, _, layout = aliases.partition("entry_computation_layout={")
    arguments = sorted(executable._kept_var_idx)
    first = len(program.get_parameter_layouts()) - len(arguments)  # tokens and constants come first
    tupled = layout.startswith("((")
    numbers = (int(index if tupled else number) for number, index in _ALIAS.findall(aliases))
    return frozenset(arguments[number - first] for number in numbers if number >= first)


# -- compiler options -----------------------------------------------------------------------------


def compile_options(lowering: Any, options: Mapping[str, Any] | None = None) -> Any:
    """The `xla_client.CompileOptions` with which jax would compile a lowering.

    Args:
        lowering: `jax.stages.Lowered._lowering`.
        options: XLA options by name, added to the step's own.
    """
    given = lowering.compile_args
    propagated = pxla.get_prop_to_input_output(
        given["in_shardings"], given["out_shardings"], len(given["ordered_effects"])
    )
    return pxla.create_compile_options(
        lowering._hlo,
        given["tuple_args"],
        *propagated,
        given["backend"],
        np.array(list(lowering._device_list), dtype=object),
        dict(lowering._compiler_options_kvs) | dict(options or {}),
    )


def accepted_options(options: Mapping[str, str], device: Any) -> dict[str, str]:
    """Return the compiler options that the XLA of a device knows; as a rule by one compilation."""
    given = tuple(options.items())
    if _accept(given, device):
        return dict(given)
    return {name: value for name, value in given if _accept(((name, value),), device)}


@functools.cache
def _accept(options: tuple[tuple[str, str], ...], device: Any) -> bool:
    """Return whether the XLA of a device knows compiler options, by trying to compile with them.

    No document says which version does. The device may be only described. Next to nothing is
    compiled, and nothing runs.
    """

    def compile_scalar() -> None:
        at = jax.sharding.SingleDeviceSharding(device)
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=at)
        jax.jit(lambda x: x).lower(scalar).compile(compiler_options=dict(options))

    # In a thread of its own: under jax.set_mesh, which holds for a thread, nothing may be compiled
    # for one device of the mesh.
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            thread.submit(compile_scalar).result()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" in str(error):
                return False
            raise
    return True


# -- processes ------------------------------------------------------------------------------------


def key_value_store() -> Any:
    """The store of `jax.distributed`, of which all processes are clients; None without that."""
    return distributed.global_state.client


def mocks_processes() -> bool:
    """Return whether JAX only pretends that there are other processes (JAX_MOCK_GPU_TOPOLOGY).

    This one then runs one device's part of a program, with collectives that take no time.
    """
    return bool(xla_bridge.MOCK_GPU_TOPOLOGY.value) and not distributed.global_state.client


def started_processes() -> tuple[int, int]:
    """The number of this process and how many `jax.distributed` started; (0, 1) without that.

    Unlike `jax.process_count`, this starts no backend, after which nothing could be initialized.
    """
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1
