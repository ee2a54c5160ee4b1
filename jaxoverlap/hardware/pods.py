"""Describe meshes of GPUs that this machine does not have, to compile for them.

XLA compiles for a GPU from a description of it. `pod_mesh("h100-sxm:8x8", {"fsdp": 8, "tp": 8})`
is a mesh of sixty-four such descriptions: a jitted step whose arguments are sharded over it lowers
and compiles as on the cluster, on any Linux machine with JAX's CUDA plugin, a third faster with
`compiler_options()`. Nothing on the mesh can run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxoverlap._jax import fused_attention, grouped_matmuls, jits, not_there
from jaxoverlap._util.expect import expect, is_integer
from jaxoverlap._util.files import packaged
from jaxoverlap.hardware.cluster import Chip, Cluster, chips, cluster_from, parse_cluster

# The plugins that bring XLA's GPU compiler, newest first: module, and the package it comes in.
_PLUGINS = {
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
}
_INSTALL = "pip install '.[pods]' in the checkout"
_TARGET = string.Template(
    msgspec.toml.decode(packaged("jaxoverlap.hardware", "gpu_target.toml"))["text"]
)
_CUDNN = divmod(fused_attention.CUDNN_VERSION // 100, 100)  # major and minor
_SKIP_CUDA_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


class PodsUnavailableError(ImportError):
    """XLA's GPU compiler is missing here, or does not belong to the installed jaxlib."""


def target_config(chip: Chip) -> str:
    """XLA's description of `chip`: a `stream_executor.GpuTargetConfigProto` in text form.

    XLA's files also list the rates of the scalar and matrix units and the versions of driver and
    libraries. Left out: with and without them a train step compiled to the same schedule.
    """
    major, minor = chip.compute_capability
    # From Hopper on XLA compiles for the chip itself (sm_90a), not for its whole family.
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    rate = f"{chip.memory_bandwidth_bytes_per_s:.0f}"
    more = dict(major=major, minor=minor, features=features, memory_bandwidth=rate)
    return _TARGET.substitute(vars(chip), cudnn_major=_CUDNN[0], cudnn_minor=_CUDNN[1], **more)


def pod_mesh(cluster: str | Cluster, axes: Mapping[str, int]) -> Mesh:
    """A mesh over GPUs that are not there, to compile for them. Its axes are Auto.

    Devices stand in row-major order of `axes`, host after host: the last axis is the fastest and
    lands inside a host as far as it fits, so give it the parallelism that talks most. On
    "h100-sxm:8x8", `{"fsdp": 8, "tp": 8}` keeps every tp group on one host's NVLink and every fsdp
    group on the network. Equal clusters and axes give equal meshes within a process.

    Args:
        cluster: What `parse_cluster` takes or gives.
        axes: Sizes by axis name, slowest first; their product is the number of GPUs.

    Raises:
        ValueError: The cluster does not parse, the axes do not fit it, or it has but one GPU.
        PodsUnavailableError: XLA's GPU compiler is not installed, or not in jaxlib's version.
    """
    pod = cluster_from(cluster)
    _check_axes(pod, axes)
    if pod.chip.compute_capability == (0, 0):
        raise ValueError(
            f"{pod}: XLA compiles without a GPU for CUDA's chips only; for {pod.chip.name} there "
            "are estimates (`jaxoverlap configure`) and no schedules"
        )
    shape = tuple(axes.values())
    return Mesh(
        np.array(devices(pod), dtype=object).reshape(shape),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(shape),
    )


def devices(pod: Cluster) -> tuple[Any, ...]:
    """The GPUs of a cluster, host after host, to compile for; none of them is there.

    Raises:
        PodsUnavailableError: XLA's GPU compiler is not installed, or not in jaxlib's version.
    """
    network = pod.network if pod.names_network else pod.chip.network
    described = replace(pod, nvlink=pod.chip.nvlink, network=network)
    gpus = _devices(described)
    _described[gpus[0].client] = described
    fused_attention.answers_for(pod.chip.compute_capability)
    grouped_matmuls.install()
    not_there.install()
    return gpus


_described: dict[Any, Cluster] = {}  # by the client of its devices: each pod has one of its own


def pod_of(mesh: Mesh) -> Cluster | None:
    """The pod that a mesh is of, with its chip's own links; None for a mesh of other devices."""
    return _described.get(mesh.devices.flat[0].client)


def mesh_among(values: Iterable[Any]) -> Mesh | None:
    """The mesh of the pod that one of some values or shardings is on; None if none is.

    Args:
        values: shardings, or what has one.
    """
    for value in values:
        mesh = getattr(getattr(value, "sharding", value), "mesh", None)
        if isinstance(mesh, Mesh) and pod_of(mesh) is not None:
            return mesh
    return None


def mesh_of_compiled(compiled: Any) -> Mesh | None:
    """The mesh of the pod that a compiled step is for; None for other devices, and for a text."""
    names = ("input_shardings", "output_shardings")
    return mesh_among(jax.tree.leaves([getattr(compiled, name, None) for name in names]))


def cannot_run(mesh: Mesh) -> ValueError:
    """Make the error that says that a step was called whose GPUs are not there."""
    return ValueError(
        f"the step is on a pod_mesh of {pod_of(mesh)}, whose GPUs are not there: nothing runs on "
        "it. Use step.lower(...).compile() and its simulate(), or overlap(step).explain(...); to "
        "run the step, shard its arguments over devices that are here"
    )


def capability_of(values: Iterable[Any]) -> tuple[int, int] | None:
    """The compute capability of the pod that one of some values or shardings is on; None if none.

    Args:
        values: shardings, or what has one.
    """
    mesh = mesh_among(values)
    pod = None if mesh is None else pod_of(mesh)
    return None if pod is None else pod.chip.compute_capability


def topology_of(pod: Cluster) -> str:
    """Return XLA's topology of a pod: partitions, what it calls hosts in each, GPUs in each host.

    A partition is what NVLink joins, and XLA schedules collectives that leave one differently. A
    host is a process of its own to XLA: on a machine that runs eight there are eight.
    """
    hosts = pod.hosts_per_nvlink_domain
    return f"{pod.num_hosts // hosts}x{hosts * pod.processes_per_host}x{pod.gpus_per_process}"


def is_pod(mesh: Mesh) -> bool:
    """Return whether the devices of `mesh` are only descriptions, which compile but cannot run."""
    # JAX has no public name for their client's class; an AbstractMesh has no devices at all.
    return isinstance(mesh, Mesh) and type(mesh.devices.flat[0].client).__name__.startswith(
        "CompileOnly"
    )


def compiler_options() -> dict[str, str]:
    """Return options that make compiles for a pod faster and change no program.

    Those that the installed XLA lacks are left out.

    Returns:
        What `jax.stages.Lowered.compile(compiler_options=...)` takes.

    Raises:
        PodsUnavailableError: XLA's GPU compiler is not installed, or not in jaxlib's version.
    """
    device = devices(parse_cluster(f"{chips()[0].name}:1x1"))[0]
    return jits.accepted_options(_WANTED_OPTIONS, device)


_WANTED_OPTIONS = {
    # With no GPU to time kernels on, XLA compiles each once more all the same, and takes it as it
    # is: a third of a compilation, and the same program.
    "xla_gpu_autotune_level": "0",
}


def _check_axes(pod: Cluster, axes: Mapping[str, int]) -> None:
    expect(isinstance(axes, Mapping), "axes", axes, "sizes by axis name, for instance {'tp': 8}")
    if not axes:
        raise ValueError(f"no axes for {pod}: give their sizes, for instance {{'tp': 8}}")
    for name, size in axes.items():
        named = isinstance(name, str) and name != ""
        expect(named, "axes", axes, "strings as names, for instance {'tp': 8}")
        if not is_integer(size, 1):
            raise ValueError(f"axis {name!r} has size {size!r}: give a positive whole number")
    product = math.prod(axes.values())
    if product != pod.num_devices:
        sizes = " × ".join(f"{name} {size}" for name, size in axes.items())
        raise ValueError(
            f"a mesh that does not fit the pod: {sizes} is {product} devices, {pod} has "
            f"{pod.num_hosts} × {pod.gpus_per_host} = {pod.num_devices}; change either"
        )
    if product == 1:
        raise ValueError(f"{pod} is one device: with no other there is no collective to hide")


# -- XLA's GPU compiler ---------------------------------------------------------------------------


@functools.cache  # equal pods share their devices, so that meshes made of them are equal
def _devices(pod: Cluster) -> tuple[Any, ...]:
    target, topology = target_config(pod.chip), topology_of(pod)
    module = _plugin()
    try:
        with contextlib.nullcontext() if _has_gpu() else _cuda_check_skipped():
            return _describe(target, topology)
    except NotImplementedError:
        _register(module)
    return _describe(target, topology)


def _describe(target: str, topology: str) -> tuple[Any, ...]:
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=topology
    )
    return tuple(described.devices)


def _plugin() -> str:
    """The installed CUDA plugin's module, of the same version as jaxlib."""
    for module, package in _PLUGINS.items():
        if not _is_installed(module):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # built from source
            have, want = importlib.metadata.version(package), importlib.metadata.version("jaxlib")
            if have != want:
                # It may well load; but its schedule would not be that of the JAX in use.
                raise PodsUnavailableError(
                    f"{package} is {have} and jaxlib is {want}: to compile for a pod they have to "
                    f"be of one version; {_INSTALL} takes the one that JAX has"
                )
        return module
    raise PodsUnavailableError(
        "compiling for GPUs that are not there needs JAX's CUDA plugin (Linux only), which is not "
        f"installed: {_INSTALL}"
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package of plugins
        return False


def _has_gpu() -> bool:
    """Return whether JAX would look for NVIDIA GPUs here: it goes by the same device files."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))


@contextlib.contextmanager
def _cuda_check_skipped() -> Iterator[None]:
    """Let the plugin register where CUDA's libraries are missing, as compiling needs none.

    The plugin makes no such check when JAX_PLATFORMS names platforms and CUDA is none of them; a
    user with a laptop should not have to know.
    """
    before = os.environ.get(_SKIP_CUDA_CHECK)
    os.environ[_SKIP_CUDA_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CUDA_CHECK]
        else:
            os.environ[_SKIP_CUDA_CHECK] = before


def _register(module: str) -> None:
    """Registers a plugin that refused when JAX, used before, looked for its plugins."""
    try:
        jax.devices()  # JAX settles first on what it runs on: the plugin is here to compile only
        with _cuda_check_skipped():
            importlib.import_module(module).initialize()
    except Exception as error:
        raise PodsUnavailableError(
            f"JAX's CUDA plugin {module} does not load: {error}; {_INSTALL}, or set "
            "JAX_PLATFORMS=cpu before JAX is first used"
        ) from error
