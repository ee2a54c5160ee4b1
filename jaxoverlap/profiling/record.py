"""Define `profile`, which runs a step under JAX's profiler and says what of it is hidden."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from jaxoverlap._jax.jit_wrappers import arguments_reach, find_jit
from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import whole
from jaxoverlap.cost.find import cost_model, has_packaged_tables
from jaxoverlap.hardware.pods import cannot_run, mesh_among, mesh_of_compiled
from jaxoverlap.hardware.topology import cluster_of
from jaxoverlap.profiling.profile import ClusterLike, Profile, read

_STEPS = 5
_PYTHON_OFF = 0  # level of the tracer of Python calls, which makes files large and steps slow


def profile(
    step: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    steps: int | None = None,
    cluster: ClusterLike | None = None,
    folder: str | os.PathLike[str] | None = None,
    module: str | None = None,
    **kwargs: Any,
) -> Profile:
    """Measure what of a step's communication is hidden on the devices that are here; print it.

    Runs the step once unmeasured, then `steps` times under `jax.profiler`, one at a time, and
    reads what the profiler saw of every device. The answer comes from unions of the devices' own
    intervals: step = compute + exposed + idle. Or reads an existing profile: give its file or
    folder instead of the step, as from your own training loop with `jax.profiler.trace(FOLDER)`.

        print(jaxoverlap.profile(step, state, batch))
        jaxoverlap.profile("profiles/run7").to_html("step.html")

    Args:
        step: a step, jitted, overlapped or compiled; or the path of a profile: an xplane.pb, a
            Chrome trace (.trace.json.gz), or a folder with those of one profile in it, of one
            process or of several.
        args: its arguments. Arrays that it donates, and modules that `nnx.jit` changes, are copied
            before each run, so that yours stay as they are.
        steps: how often to run it; default: 5.
        cluster: where it runs, as `jaxoverlap.simulate` takes it, to print the simulated seconds
            next to the measured ones. Default: what the devices say they are, if the package
            has prices of them; none for CPUs and for a path.
        folder: where the profiler writes, to keep its files, which TensorBoard opens too. With
            several processes, one that all share: then each reads all devices, else only its own.
        module: the program to look at, as in "jit_train_step"; default: the one that keeps the
            devices busiest.
        kwargs: the step's keyword arguments.

    Returns:
        Seconds by device, collective, ring, source line and stream, and pictures.

    Raises:
        ValueError: for fewer than one step, a path that is no profile, or a profile in which no
            device ran anything.
    """
    if isinstance(step, str | os.PathLike):
        if args or kwargs or steps is not None or folder is not None:
            raise ValueError(
                f"profile({os.fspath(step)!r}, ...) reads a profile: give arguments, steps and "
                "folder with a step, not with a path"
            )
        return read(os.fspath(step), cluster, module=module)
    expect(callable(step), "step", step, "a step, or the path of a profile")
    steps = whole("steps", _STEPS if steps is None else steps, 1)
    if pod_mesh := mesh_of_compiled(step) or mesh_among(jax.tree.leaves((args, kwargs))):
        raise cannot_run(pod_mesh)
    if cluster is None:
        cluster = _cluster_here(args, kwargs)
    compiled: Any = step if hasattr(step, "as_text") else None
    with tempfile.TemporaryDirectory(prefix="jaxoverlap-profile-") as temporary:
        shared = Path(folder) if folder is not None else None
        _record(step, args, kwargs, steps, _own_folder(shared or Path(temporary)))
        if shared is not None and jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxoverlap.profile")
        return read(shared or temporary, cluster, compiled=compiled, module=module)


def _own_folder(folder: Path) -> Path:
    """Return the folder that this process writes to; other processes may share the host's name.

    Raises:
        ValueError: if there are files in it, which would be read together with the new ones.
    """
    if jax.process_count() > 1:
        folder = folder / f"process_{jax.process_index()}"
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder={os.fspath(folder)!r} has files in it: name an empty one")
    return folder


def _record(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    steps: int,
    folder: Path,
) -> None:
    """Run a step under the profiler, after a run that is not in it."""
    donated = _donated(step, args, kwargs)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = _PYTHON_OFF

    def run() -> None:
        given, named = jax.block_until_ready(_copied((args, kwargs), donated))
        jax.block_until_ready(step(*given, **named))

    run()
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(steps):
            run()


def _donated(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return for each argument whether the step donates it; none if it does not say.

    Of a step that holds its jit inside, as `nnx.jit` does, it is for each argument of that jit.
    """
    if hasattr(step, "args_info"):
        info = step.args_info
    elif hasattr(step, "explain"):  # overlapped; it shows what the function inside has
        info = step.lower(*args, **kwargs).args_info
    elif wrapped := find_jit(step):
        info = arguments_reach(wrapped, wrapped.jitted.lower, args, kwargs).args_info
    else:
        return jax.tree.map(lambda _: False, (args, kwargs))
    return jax.tree.map(lambda leaf: leaf.donated, info)


def _copied(arguments: Any, donated: Any) -> Any:
    """Return arguments of which a run may use up what the step donates or changes."""
    if jax.tree.structure(donated) == jax.tree.structure(arguments):
        return jax.tree.map(_fresh, arguments, donated)
    return copy.deepcopy(arguments)  # nnx and equinox take them apart, and nnx changes them


def _fresh(value: Any, donated: bool) -> Any:
    return jnp.copy(value) if donated and isinstance(value, jax.Array) else value


def _cluster_here(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ClusterLike | None:
    """Return the cluster that the arguments' devices form; None if it has no prices."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((args, kwargs)))
    named = (s for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    mesh = next((s.mesh for s in named if s.mesh.size > 1), None)
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform != "gpu":
        return None
    cluster = cluster_of(mesh)
    return cost_model(cluster) if cluster and has_packaged_tables(cluster) else None
