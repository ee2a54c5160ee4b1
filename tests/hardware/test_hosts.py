"""Processes learn from a store which of them share a host, and get the cluster that follows."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import jits
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.flags import options_for, preset
from jaxoverlap.flags.required import BY_COPY
from jaxoverlap.hardware import hosts, topology
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.topology import axis_domains, axis_processes, cluster_of, processes_of_one
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import collectives
from jaxoverlap.simulation.replay import group_of
from tests.support.many_processes import abstract, make_mesh, make_step, train
from tests.support.pods import needs_plugin
from tests.support.processes import run

H100 = parse_cluster("h100-sxm:1x8").chip


# -- what a process says ----------------------------------------------------------------------------


def test_a_host_is_named_by_its_boot(monkeypatch, tmp_path):
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(hosts, "_BOOT_ID", boot)
    assert hosts.this_host() == socket.gethostname()
    boot.write_text("\n")
    assert hosts.this_host() == socket.gethostname()
    boot.write_text("8f6f-11\n")
    assert hosts.this_host() == "8f6f-11"


class Store(dict[str, str]):
    """A store in this process, in which nobody leaves anything while somebody waits."""

    reads = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self
        self[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.reads += 1
        return [(k, v) for k, v in self.items() if k.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if key not in self:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody left it")
        return self[key]


@pytest.fixture
def store(monkeypatch) -> Store:
    """Stand in for the store of four processes, of which this is number 1."""
    store = Store()
    monkeypatch.setattr(jits, "key_value_store", lambda: store)
    monkeypatch.setattr(jits, "started_processes", lambda: (1, 4))
    monkeypatch.setattr(hosts, "this_host", lambda: "a")
    return store


def test_overlap_says_where_its_process_runs(store):
    assert not store
    jaxoverlap.overlap(lambda x: x)
    jaxoverlap.overlap(lambda x: x)
    assert store == {"jaxoverlap/hosts/1": "a"}


def test_what_all_have_said_is_read_once(store):
    for process, host in enumerate("aabb"):
        if process != 1:
            store[f"jaxoverlap/hosts/{process}"] = host
    host_of = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert hosts.hosts_of(range(4)) == host_of
    assert hosts.hosts_of((0, 3)) == {0: "a", 3: "b"}
    assert store.reads == 1


def test_one_that_does_not_say_is_named(store):
    store["jaxoverlap/hosts/0"] = "a"
    with pytest.raises(
        jaxoverlap.DisagreementError, match=r"process 2, 3 did not say .* host"
    ) as e:
        hosts.hosts_of(range(4), within_s=0.05)
    assert "overlap(agree_within_s=)" in str(e.value) and "h100-sxm:8x8/8" in str(e.value)
    assert hosts.hosts_of((0, 1), within_s=0.05) == {0: "a", 1: "a"}  # nobody else's matter
    store |= {"jaxoverlap/hosts/2": "b", "jaxoverlap/hosts/3": "b"}
    assert set(hosts.hosts_of(range(4)).values()) == {"a", "b"}


def test_one_process_asks_no_store(monkeypatch):
    def asked():
        raise AssertionError("one process has nobody to ask")

    monkeypatch.setattr(jits, "key_value_store", asked)
    assert len(hosts.hosts_of((0,))) == 1
    hosts.announce()


# -- what follows -----------------------------------------------------------------------------------


def mesh_of(shape: tuple[int, ...], gpus_of: list[int], kind: str = H100.device_name) -> Any:
    """Return a stand-in for a mesh of GPUs in processes of so many each."""
    of = [process for process, gpus in enumerate(gpus_of) for _ in range(gpus)]
    devices = np.empty(len(of), object)
    for i, process in enumerate(of):
        devices[i] = SimpleNamespace(id=i, process_index=process, device_kind=kind, client=None)
    axes = ("data", "model")[: len(shape)]
    return SimpleNamespace(
        devices=devices.reshape(shape),
        shape=dict(zip(axes, shape, strict=True)),
        axis_names=axes,
        size=len(of),
    )


@pytest.mark.parametrize(
    ("kind", "chip"), [("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H200", "h200")]
)
def test_gpus_are_known_by_what_they_call_themselves(monkeypatch, kind, chip):
    """Names are as JAX gave them on one of each."""
    monkeypatch.setattr(topology, "hosts_of", lambda processes, within_s: dict.fromkeys(processes))
    cluster = topology.cluster_of(mesh_of((8,), [8], kind))
    assert cluster is not None
    assert str(cluster) == f"{chip}:1x8"


@pytest.mark.parametrize(
    ("gpus_of", "host_of", "cluster"),
    [
        ([1] * 64, lambda p: p // 8, "h100-sxm:8x8/8"),
        ([4] * 4, lambda p: p // 2, "h100-sxm:2x8/2"),
        ([8] * 2, lambda p: p, "h100-sxm:2x8"),
        ([1] * 8, lambda p: p % 2, "h100-sxm:2x4/4"),
        ([1] * 8, lambda p: 0, "h100-sxm:1x8/8"),
        ([1] * 4, lambda p: p // 3, None),  # a host of three and one of one
        ([4, 2, 2], lambda p: min(p, 1), None),  # hosts alike, processes not
    ],
)
def test_hosts_make_a_cluster(monkeypatch, gpus_of, host_of, cluster):
    monkeypatch.setattr(
        topology, "hosts_of", lambda processes, within_s: {p: host_of(p) for p in processes}
    )
    mesh = mesh_of((sum(gpus_of),), gpus_of)
    mesh_cluster = cluster_of(mesh)
    assert (mesh_cluster and str(mesh_cluster)) == cluster
    assert cluster_of(mesh_of((sum(gpus_of),), gpus_of, "cpu")) is None


def test_domains_are_hosts_and_copies_are_a_processs(monkeypatch):
    of = {"block": lambda p: p // 4, "turns": lambda p: p % 2}
    mesh = mesh_of((2, 4), [1] * 8)

    def hosts_are(how: str) -> None:
        monkeypatch.setattr(
            topology, "hosts_of", lambda processes, within_s: {p: of[how](p) for p in processes}
        )

    hosts_are("block")
    assert axis_domains(mesh, None) == {"data": 2, "model": 1}
    assert axis_processes(mesh, None) == {"data": 2, "model": 4}
    assert groups_of(mesh, None)["model"] == jaxoverlap.cost.model.Group(
        4, 1, False, communicator=4
    )
    hosts_are("turns")
    assert axis_domains(mesh, None) == {"data": 1, "model": 2}


def test_a_named_cluster_says_what_is_a_process():
    mesh = mesh_of((2, 4), [8])  # one process of eight, as devices of a CPU are
    for name, by_copy in (
        ("h100-sxm:2x4", {"data": False, "model": True}),
        ("h100-sxm:2x4/4", {"data": False, "model": False}),
        ("h100-sxm:1x8", {"data": True, "model": True}),
        ("h100-sxm:1x8/2", {"data": False, "model": True}),
    ):
        groups = groups_of(mesh, parse_cluster(name))
        assert {axis: group.by_copy for axis, group in groups.items()} == by_copy, name


def test_devices_of_a_named_cluster_count_up_whatever_their_numbers_are():
    mesh = mesh_of((2, 2), [2, 2])
    for device, number in zip(mesh.devices.flat, (0, 1, 2048, 2049), strict=True):
        device.id = number  # as CPU devices of two processes have them
    assert axis_domains(mesh, parse_cluster("h100-sxm:1x4/2")) == {"data": 1, "model": 1}
    assert axis_domains(mesh, parse_cluster("h100-sxm:2x2")) == {"data": 2, "model": 1}
    assert axis_processes(mesh, parse_cluster("h100-sxm:1x4/2")) == {"data": 2, "model": 1}


def test_a_cluster_cannot_have_in_one_process_what_is_in_many():
    for name, real_processes in (("2x4", 4), ("2x4/2", 2), ("2x4/4", 1)):
        assert (
            processes_of_one(mesh_of((2, 4), [1] * 8), parse_cluster(f"h100-sxm:{name}"))
            == real_processes
        )
    assert processes_of_one(mesh_of((2, 4), [4] * 2), parse_cluster("h100-sxm:2x4/4")) == 1


HOP = """HloModule jit_step, is_scheduled=true, num_partitions=8
ENTRY %main (x: bf16[1024]) -> bf16[1024] {
  %x = bf16[1024]{0} parameter(0)
  %hop = (bf16[1024]{0}, bf16[1024]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/all_gather_matmul.0/ppermute"}, backend_config={"collective_backend_config":{"collectives_mode":"COLLECTIVES_PEER_MEMORY"}}
  ROOT %done = bf16[1024]{0} collective-permute-done(%hop)
}
"""


@pytest.mark.parametrize(
    ("cluster", "by_copy"),
    [
        ("h100-sxm:1x8", True),
        ("h100-sxm:1x8/4", True),
        ("h100-sxm:1x8/8", False),
        ("h100-sxm:8x1", False),
    ],
)
@pytest.mark.parametrize("mode", ["PEER", "SYMMETRIC"])
def test_a_simulated_hop_is_a_copy_inside_a_process(mode: str, cluster: str, by_copy: bool):
    """XLA's runtime falls back on NCCL's sends between processes, in both modes."""
    (hop,) = collectives(hlo.parse(HOP.replace("PEER", mode)))
    assert hop.by_copy
    assert group_of(hop, 8, parse_cluster(cluster)).by_copy == by_copy


def test_a_preset_for_a_process_a_gpu_asks_for_no_copies():
    assert BY_COPY in preset("h100-sxm:8x8").options
    assert BY_COPY in preset("h100-sxm:8x8/4").options
    left = preset("h100-sxm:8x8/8").options
    assert left == {n: v for n, v in preset("dgx-h100").options.items() if n != BY_COPY}


@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_a_step_whose_hosts_are_not_known_is_not_compiled(monkeypatch, on_error):
    def absent(processes, within_s):
        raise jaxoverlap.DisagreementError(f"process 1 did not say within {within_s:g} s")

    monkeypatch.setattr(topology, "hosts_of", absent)
    cpu = dataclasses.replace(H100, device_name="cpu")
    monkeypatch.setattr(topology, "chips", lambda: (cpu,))
    step = jaxoverlap.overlap(make_step(make_mesh()), on_error=on_error, agree_within_s=7)
    with pytest.raises(jaxoverlap.DisagreementError, match="did not say within 7 s"):
        step.lower(*abstract(make_mesh()))
    named = jaxoverlap.overlap(make_step(make_mesh()), cluster="h100-sxm:2x2/2", on_error=on_error)
    named.lower(*abstract(make_mesh()))  # nobody is asked


# -- real processes ---------------------------------------------------------------------------------


ON_HOSTS = ("on_hosts_as_they_are", "on_hosts_of_two", "on_hosts_in_turn")


def results(processes: int, *scenarios: str) -> list[dict[str, Any]]:
    """Return for each process what each scenario gave, by its name."""
    outcomes = run(processes, Path(), *scenarios)
    for code, _, err in outcomes:
        assert code == 0, err[-3000:]
    return [{name: rows[name]["result"] for name in scenarios} for _, rows, _ in outcomes]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return results(2, "says_its_host_late", ON_HOSTS[0])


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return results(4, *ON_HOSTS)


@pytest.mark.parametrize(
    ("processes", "scenario", "cluster", "domains", "by_copy"),
    [
        ("two", ON_HOSTS[0], "1x4/2", (1, 1), (False, True)),
        ("four", ON_HOSTS[0], "1x4/4", (1, 1), (False, False)),
        ("four", ON_HOSTS[1], "2x2/2", (2, 1), (False, False)),
        ("four", ON_HOSTS[2], "2x2/2", (1, 2), (False, False)),
    ],
)
def test_processes_find_their_hosts(request, processes, scenario, cluster, domains, by_copy):
    axes = ("data", "model")
    for rows in request.getfixturevalue(processes):
        row = rows[scenario]
        assert row["cluster"] == row["plan"] == f"h100-sxm:{cluster}"
        assert f"The cluster is taken to be h100-sxm:{cluster} " in row["said"]
        assert row["domains"] == dict(zip(axes, domains, strict=True))
        assert row["by_copy"] == dict(zip(axes, by_copy, strict=True))


def test_processes_on_two_hosts_train_as_one_does(four):
    plain = train(make_step(make_mesh()))
    for rows in four:
        np.testing.assert_allclose(rows[ON_HOSTS[1]]["losses"], plain, rtol=1e-5)


def test_nobody_waits_for_ever_for_a_host(two):
    waiting, late = (rows["says_its_host_late"] for rows in two)
    assert "process 1 did not say within 0.5 s on which host it runs" in waiting["said"]
    assert waiting["waited"] < 2.5 and waiting["hosts"] == 1
    assert late == 1


# -- pods -------------------------------------------------------------------------------------------


def mlp(mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of two matmuls, sequence parallel over `tp`, and its arguments as shapes."""
    rows, columns, both = P("tp"), P(None, "tp"), P("dp", "tp")

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(x, up, down):
        h = jax.lax.with_sharding_constraint(x @ up, at("dp", None, "tp"))
        return jax.lax.with_sharding_constraint(jnp.tanh(h) @ down, at("dp", "tp"))

    shapes = ((4, 8192, 4096), both), ((4096, 16384), columns), ((16384, 4096), rows)
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=at(*spec)) for s, spec in shapes]
    return jax.jit(step), tuple(args)


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("layout", ["", "/4"])
def test_hops_are_copies_inside_a_process_and_nccls_between_them(layout: str):
    cluster = f"h100-sxm:2x4{layout}"
    mesh = jaxoverlap.pod_mesh(cluster, {"dp": 2, "tp": 4})
    step, args = mlp(mesh)
    options = dict(schedule=None, granularity="one_way", never_slower=False)
    compiled = jaxoverlap.overlap(step, **options).lower(*args).compile()
    assert compiled.plan is not None and compiled.plan.made_for is not None
    assert compiled.plan.made_for.cluster == cluster  # as the pod's devices say
    audited = collectives(hlo.parse(compiled.as_text() or ""))
    hops = [c for c in audited if c.ring]
    assert len(hops) == 2 * 3 and all(c.asynchronous for c in hops)
    named = parse_cluster(cluster)
    assert {c.by_copy for c in hops} == {not layout}
    assert {group_of(c, 8, named).by_copy for c in hops} == {not layout}
    assert {group_of(c, 8, named).communicator for c in hops} == {4}
    assert (BY_COPY in options_for(mesh)) == (not layout)
    assert compiled.simulate().cluster == named


@needs_plugin
@pytest.mark.pods
def test_a_plan_is_for_one_layout_of_processes():
    axes = {"dp": 2, "tp": 4}
    plan = jaxoverlap.overlap(mlp(jaxoverlap.pod_mesh("h100-sxm:2x4", axes))[0]).explain(
        *mlp(jaxoverlap.pod_mesh("h100-sxm:2x4", axes))[1]
    )
    step, args = mlp(jaxoverlap.pod_mesh("h100-sxm:2x4/4", axes))
    with pytest.raises(ValueError, match="cluster: the plan's h100-sxm:2x4, here h100-sxm:2x4/4"):
        jaxoverlap.overlap(step, plan=plan).explain(*args)


@needs_plugin
@pytest.mark.pods
def test_a_cluster_that_is_no_such_processes_is_refused():
    step, args = mlp(jaxoverlap.pod_mesh("h100-sxm:2x4/4", {"dp": 2, "tp": 4}))
    with pytest.raises(ValueError, match=r"cluster h100-sxm:2x4 has in one process are in 4.*/8'"):
        jaxoverlap.overlap(step, cluster="h100-sxm:2x4").explain(*args)
    plan = jaxoverlap.overlap(step, cluster="h100-sxm:2x4/4").explain(*args)
    assert plan.edits


@needs_plugin
@pytest.mark.pods
def test_a_part_of_a_pod_is_a_cluster_too():
    whole = jaxoverlap.pod_mesh("h100-sxm:4x4/2", {"x": 16}).devices
    part = jax.sharding.Mesh(whole.reshape(4, 4)[1:3], ("dp", "tp"))
    assert str(cluster_of(part)) == "h100-sxm:2x4/2"
    assert axis_domains(part, None) == {"dp": 2, "tp": 1}
