from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import jits
from jaxoverlap.hardware import pods
from jaxoverlap.hardware.cluster import chips, parse_cluster
from jaxoverlap.hardware.pods import (
    PodsUnavailableError,
    compiler_options,
    is_pod,
    pod_mesh,
    target_config,
)
from tests.support.pods import needs_plugin

NAMES = [chip.name for chip in chips()]


def compile_matmul(mesh, outer: str, inner: str, n: int = 1024) -> str:
    """Return the schedule of `x @ w`, x's rows over `outer` and the contraction over `inner`."""
    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=NamedSharding(mesh, P(outer, inner)))
    w = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=NamedSharding(mesh, P(inner, None)))
    out = NamedSharding(mesh, P(outer, None))
    lowered = jax.jit(jnp.matmul, out_shardings=out).lower(x, w)
    text = lowered.compile(compiler_options=compiler_options()).as_text()
    assert text is not None
    return text


def python(code: str, *, platforms: str | None) -> str:
    """Run `code` in a process of its own, where a fatal error of the compiler is only its own."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    if platforms is not None:
        env["JAX_PLATFORMS"] = platforms
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    code = (
        "from jaxoverlap.hardware.pods import *\nimport jax, jax.numpy as jnp\n"
        + textwrap.dedent(code)
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# -- what needs no plugin -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({}, "no axes for h100-sxm:8x8"),
        ({"fsdp": 8, "tp": 0}, "axis 'tp' has size 0"),
        ({"fsdp": -8, "tp": -8}, "axis 'fsdp' has size -8"),
        ({"fsdp": 8, "tp": 8.0}, "axis 'tp' has size 8.0"),
        ({"fsdp": 64, "tp": True}, "axis 'tp' has size True"),
        ({"fsdp": 8, "tp": 4}, "does not fit the pod: fsdp 8 × tp 4 is 32 .* 8 × 8 = 64"),
        ({"fsdp": 8, "tp": 16}, "does not fit the pod: fsdp 8 × tp 16 is 128 .* 8 × 8 = 64"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes, says):
    with pytest.raises(ValueError, match=says):
        pod_mesh("h100-sxm:8x8", axes)


def test_a_mesh_of_one_device_is_refused():
    with pytest.raises(ValueError, match="h100-sxm:1x1 is one device"):
        pod_mesh("h100-sxm:1x1", {"tp": 1})


def test_a_cluster_that_does_not_parse_is_refused():
    with pytest.raises(ValueError, match="unknown chip"):
        pod_mesh("h100:8x8", {"tp": 64})


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(pods, "_PLUGINS", {"jax_plugins_of_nobody.xla": "nothing"})
    with pytest.raises(
        PodsUnavailableError, match=re.escape("pip install '.[pods]' in the checkout")
    ):
        pod_mesh("h100-sxm:1x7", {"tp": 7})


@needs_plugin
def test_a_plugin_of_another_version_is_refused(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1.2" if "pjrt" in name else real(name)
    )
    with pytest.raises(PodsUnavailableError, match=r"is 0\.1\.2 and jaxlib is .*pip install"):
        pod_mesh("h100-sxm:1x7", {"tp": 7})


def test_a_plugin_that_does_not_load_says_why(monkeypatch):
    monkeypatch.setattr(pods.importlib, "import_module", _raises(OSError("no libnvidia")))
    with pytest.raises(PodsUnavailableError, match=r"no libnvidia.*JAX_PLATFORMS=cpu"):
        pods._register("jax_plugins.xla_cuda12")


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("h100-sxm:8x8", "8x1x8"),
        ("h100-sxm:8x8/8", "8x8x1"),
        ("h100-sxm:8x8/2", "8x2x4"),
        ("gb200:36x4", "2x18x4"),
        ("gb200:36x4/4", "2x72x1"),
    ],
)
def test_a_process_is_a_host_to_xla(text: str, topology: str):
    assert pods.topology_of(parse_cluster(text)) == topology


def _raises(error):
    def raising(*_):
        raise error

    return raising


@pytest.mark.parametrize("before", [None, "", "yes"])
def test_the_environment_is_left_as_it_was(monkeypatch, before):
    name = pods._SKIP_CUDA_CHECK
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with pytest.raises(KeyError), pods._cuda_check_skipped():
        assert os.environ[name] == "1"
        raise KeyError
    assert os.environ.get(name) == before


def test_a_mesh_of_real_devices_is_no_pod():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    assert not is_pod(mesh)
    assert not is_pod(mesh.abstract_mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize("chip", chips(), ids=NAMES)
def test_target_config_has_the_chips_numbers(chip):
    text = target_config(chip)
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{chip.device_name}"' in text
    for field, value in [
        ("core_count", chip.num_sms),
        ("device_memory_size", chip.memory_bytes),
        ("memory_bandwidth", int(chip.memory_bandwidth_bytes_per_s)),
        ("clock_rate_ghz", chip.clock_ghz),
    ]:
        assert re.search(rf"^  {field}: {re.escape(str(value))}$", text, re.M), field


# -- meshes ---------------------------------------------------------------------------------------


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("h100-sxm:1x8", {"tp": 8}),
        ("h100-sxm:8x8", {"fsdp": 8, "tp": 8}),
        ("a100-sxm-80:2x4", {"dp": 2, "fsdp": 2, "tp": 2}),
        ("gb200:18x4", {"fsdp": 9, "tp": 8}),
        ("gb200:36x4", {"dp": 2, "tp": 72}),
        ("h100-sxm:1x3", {"tp": 3}),
        ("h100-sxm:512x8", {"pp": 8, "fsdp": 64, "tp": 8}),
        ("h100-sxm:3x1", {"dp": 3, "one": 1}),
        ("h100-sxm:2x8/8", {"dp": 2, "tp": 8}),
        ("h100-sxm:2x8/2", {"dp": 2, "tp": 8}),
        ("gb200:2x4/4", {"tp": 8}),
    ],
)
def test_devices_stand_in_row_major_order_host_by_host(text, axes):
    mesh, cluster = pod_mesh(text, axes), parse_cluster(text)
    assert dict(mesh.shape) == axes
    assert tuple(mesh.axis_names) == tuple(axes)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert is_pod(mesh)
    devices = list(mesh.devices.flat)
    hosts = np.arange(cluster.num_devices) // cluster.gpus_per_host
    assert [d.id for d in devices] == list(range(cluster.num_devices))
    processes = np.arange(cluster.num_devices) // cluster.gpus_per_process
    assert [d.process_index for d in devices] == list(processes)
    # A device's coordinates begin with XLA's partition: the GPUs that NVLink joins.
    assert [d.coords[0] for d in devices] == list(hosts // cluster.hosts_per_nvlink_domain)
    assert {d.device_kind for d in devices} == {cluster.chip.device_name}


@needs_plugin
@pytest.mark.pods
def test_equal_pods_give_equal_meshes():
    axes = {"fsdp": 8, "tp": 8}
    mesh = pod_mesh("h100-sxm:8x8", axes)
    assert mesh == pod_mesh("h100-sxm:8x8", axes) == pod_mesh(parse_cluster("h100-sxm:8x8"), axes)
    assert hash(mesh) == hash(pod_mesh("h100-sxm:8x8", axes))
    assert mesh != pod_mesh("h200:8x8", axes)
    assert mesh != pod_mesh("h100-sxm:8x8/8", axes)
    # Other axes over the same pod: other mesh, same devices.
    flat = pod_mesh("h100-sxm:8x8", {"x": 64})
    assert list(flat.devices.flat) == list(mesh.devices.flat)


# -- compiling ------------------------------------------------------------------------------------


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("chip", NAMES)
def test_every_chip_compiles_to_a_schedule(chip):
    """Topologies of several chips live side by side in one process."""
    text = compile_matmul(pod_mesh(f"{chip}:2x2", {"fsdp": 2, "tp": 2}), "fsdp", "tp")
    assert "is_scheduled=true" in text
    assert "__cublas" in text or "__triton" in text, "the matmul is a kernel"
    assert "all-reduce" in text, "the contraction runs over tp"


@needs_plugin
@pytest.mark.pods
def test_options_are_the_compilers_own():
    options = compiler_options()
    assert options == {"xla_gpu_autotune_level": "0"}, "what XLA decides is as in a user's compile"
    options.clear()
    assert compiler_options(), "the caller's copy is the caller's"
    device = pod_mesh("h100-sxm:1x2", {"x": 2}).devices.flat[0]
    assert not jits.accepted_options({"xla_gpu_option_that_never_was": "True"}, device)


@needs_plugin
@pytest.mark.pods
def test_a_scalar_all_reduce_over_64_devices_compiles():
    """A compile without the options ends the whole process in jax 0.12.0, so it runs in its own."""
    out = python(
        """
        from jax.sharding import NamedSharding, PartitionSpec as P
        x = NamedSharding(pod_mesh("h100-sxm:8x8", {"x": 64}), P("x"))
        x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=x)
        compiled = jax.jit(jnp.sum).lower(x).compile(compiler_options=compiler_options())
        print("all-reduce" in compiled.as_text())
        """,
        platforms="cpu",
    )
    assert out.split() == ["True"]


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("platforms", [None, "", "cpu", "cuda"])
@pytest.mark.parametrize("used_before", [False, True], ids=["first", "after jax was used"])
def test_works_whatever_jax_platforms_says(platforms, used_before):
    """The plugin refuses to register with JAX_PLATFORMS unset and no GPU, unless asked nicely."""
    if used_before and platforms == "cuda":
        pytest.skip("jax itself does not start")
    out = python(
        f"""
        if {used_before}: jax.devices()
        mesh = pod_mesh("h100-sxm:1x2", {{"x": 2}})
        x = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=x)
        jax.jit(jnp.sum).lower(x).compile(compiler_options=compiler_options())
        if {platforms != "cuda"}: assert jax.devices()[0].platform != "cuda", jax.devices()
        print(is_pod(mesh))
        """,
        platforms=platforms,
    )
    assert out.split() == ["True"]
