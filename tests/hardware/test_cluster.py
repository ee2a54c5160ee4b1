from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jaxoverlap.hardware.cluster import NETWORKS, Cluster, Link, chips, parse_cluster

NAMES = [chip.name for chip in chips()]


@pytest.mark.parametrize(
    "text",
    [
        *("h100-sxm:8x8", "gb200:18x4", "h100-sxm:1x8", "a100-sxm-40:1x3"),
        *("h100-sxm:8x8/8", "gb200:18x4/2", "a100-sxm-40:1x3/3"),
    ],
)
def test_a_cluster_prints_as_it_was_written(text: str):
    cluster = parse_cluster(text)
    assert str(cluster) == text
    assert parse_cluster(str(cluster)) == cluster
    assert hash(parse_cluster(text)) == hash(cluster)


def test_hosts_come_before_gpus():
    cluster = parse_cluster("gb200:18x4")
    assert (cluster.num_hosts, cluster.gpus_per_host, cluster.num_devices) == (18, 4, 72)


def test_processes_share_a_hosts_gpus():
    cluster = parse_cluster("h100-sxm:4x8/2")
    assert (cluster.processes_per_host, cluster.gpus_per_process) == (2, 4)
    assert cluster.num_devices == 32
    one = parse_cluster("h100-sxm:4x8")
    assert (one.processes_per_host, one.gpus_per_process) == (1, 8)
    assert parse_cluster("h100-sxm:4x8/1") == one and str(parse_cluster("h100-sxm:4x8/1")) == str(
        one
    )
    assert cluster != one
    assert dataclasses.replace(one, processes_per_host=2) == cluster


@pytest.mark.parametrize("processes", [0, -1, 3, 16])
def test_processes_share_them_evenly(processes: int):
    with pytest.raises(ValueError, match=f"{processes} processes on a host of 8 .* divides these"):
        parse_cluster(f"h100-sxm:2x8/{processes}")
    with pytest.raises(ValueError, match="divides these"):
        dataclasses.replace(parse_cluster("h100-sxm:2x8"), processes_per_host=processes)


def test_nvlink_does_not_end_at_a_process():
    assert parse_cluster("h100-sxm:8x8/8").gpus_per_nvlink_domain == 8
    assert parse_cluster("gb200:18x4/4").gpus_per_nvlink_domain == 72


@pytest.mark.parametrize(
    "text",
    [
        *("", "8x8", ":8x8", "h100-sxm", "h100-sxm:8", "h100-sxm:8x", "h100-sxm:8*8"),
        *("h100-sxm:8x8x8", "h100-sxm:8x8/", "h100-sxm:8x8/8/8", "h100-sxm:8/8"),
    ],
)
def test_another_form_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match=r"as a cluster.*'h100-sxm:8x8'") as error:
        parse_cluster(text)
    assert repr(text) in str(error.value)


def test_only_plain_whole_numbers_count():
    for counts in ("8.0x8", " 8x8", "8x8 ", "+8x8", "\u0668x8", "8x8/ 8", "8x8/+8"):
        with pytest.raises(ValueError, match="as a cluster"):
            parse_cluster(f"h100-sxm:{counts}")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("a100-sxm", "a100-sxm-80"),
        ("gb20", "gb200"),
    ],
)
def test_an_unknown_chip_is_told_its_neighbours(given: str, near: str):
    with pytest.raises(ValueError, match=f"unknown chip '{given}'.*did you mean.*{near}.*Known"):
        parse_cluster(f"{given}:1x8")


def test_an_unknown_chip_is_told_all_chips():
    with pytest.raises(ValueError) as error:
        parse_cluster("tpu:1x8")
    assert "did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("counts", ["0x8", "8x0", "-1x8", "1x-8", "0x0"])
def test_counts_are_positive(counts: str):
    with pytest.raises(ValueError, match="at least one of each"):
        parse_cluster(f"h100-sxm:{counts}")


def test_links_can_be_replaced():
    slow = Link("Ethernet", 12.5e9, 30e-6)
    cluster = dataclasses.replace(parse_cluster("h100-sxm:2x8"), network=slow)
    assert cluster.network is slow
    assert cluster != parse_cluster("h100-sxm:2x8")


@pytest.mark.parametrize("numbers", [(0.0, 1e-6), (-1.0, 1e-6), (1e9, -1e-6), (float("nan"), 0.0)])
def test_a_link_carries_bytes(numbers: tuple[float, float]):
    with pytest.raises(ValueError, match=r"a finite number (above|at least) 0"):
        Link("broken", *numbers)


@pytest.mark.parametrize(
    ("text", "hosts", "gpus"),
    [
        ("h100-sxm:1x8", 1, 8),
        ("h100-sxm:8x8", 1, 8),  # NVLink ends at the host, however few its GPUs
        ("h100-sxm:8x2", 1, 2),
        ("gb200:18x4", 18, 72),  # a rack
        ("gb200:36x4", 18, 72),  # two racks
        ("gb200:20x4", 10, 40),  # two racks, evenly
        ("gb200:19x4", 1, 4),  # 19 is prime: no even spread but one by one
        ("gb200:1x4", 1, 4),
        ("gb200:2x128", 1, 128),  # more than a rack holds: the host at least
    ],
)
def test_nvlink_domains_are_equal(text: str, hosts: int, gpus: int):
    cluster = parse_cluster(text)
    assert (cluster.hosts_per_nvlink_domain, cluster.gpus_per_nvlink_domain) == (hosts, gpus)
    assert cluster.num_devices % cluster.gpus_per_nvlink_domain == 0


def test_the_chips():
    assert NAMES == ["a100-sxm-40", "a100-sxm-80", "h100-sxm", "h200", "b200", "gb200"]


@pytest.mark.parametrize("chip", chips(), ids=NAMES)
def test_chip_facts_hang_together(chip):
    # The peak is tensor cores times clock: bf16 multiply-adds an SM a clock, from NVIDIA's papers
    # on the architectures. Boost clocks differ by product, so a tenth either way.
    per_sm = {8: 1024, 9: 2048, 10: 4096}[chip.compute_capability[0]]
    assert chip.bf16_flops_per_s == pytest.approx(
        2 * per_sm * chip.num_sms * chip.clock_ghz * 1e9, rel=0.1
    )
    # NVLink 3 and 4 carry 25 GB/s a link and direction, NVLink 5 twice that.
    assert chip.nvlink.bandwidth_bytes_per_s / chip.nvlinks in (25e9, 50e9)
    assert chip.network.bandwidth_bytes_per_s < chip.nvlink.bandwidth_bytes_per_s
    assert chip.shared_memory_per_block_bytes < chip.shared_memory_per_sm_bytes < chip.l2_bytes
    assert chip.l2_bytes < chip.memory_bytes
    assert "openxla/xla" in chip.source
    assert "NVIDIA" in chip.source


def test_direct_construction_is_checked_too():
    chip = chips()[2]
    with pytest.raises(ValueError, match="h100-sxm:0x8"):
        Cluster(chip, 0, 8, chip.nvlink, chip.network)


def test_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None; import runpy; runpy.run_path(sys.argv[1])"
    from jaxoverlap.hardware import cluster as module

    assert module.__file__ is not None
    subprocess.run([sys.executable, "-c", code, module.__file__], check=True)


@pytest.mark.parametrize(
    ("text", "gbit_a_gpu", "latency_us"),
    (
        ("a100-sxm-80:16x8@80", 10, 18),
        ("a100-sxm-80:16x8@80,50", 10, 50),
        ("a100-sxm-80:16x8@800,5", 100, 5),
        ("h100-sxm:8x8/8@33.3", 33.3 / 8, 18),
    ),
)
def test_a_name_can_say_the_network_of_a_host(text: str, gbit_a_gpu: float, latency_us: float):
    cluster = parse_cluster(text)
    assert cluster.network.bandwidth_bytes_per_s == pytest.approx(gbit_a_gpu * 1e9 / 8)
    assert cluster.network.latency_s == pytest.approx(latency_us * 1e-6)
    assert str(cluster) == text and parse_cluster(str(cluster)) == cluster
    usual = parse_cluster(text.partition("@")[0])
    assert dataclasses.replace(cluster, network=usual.network) == usual


@pytest.mark.parametrize(
    "text", ("h100-sxm:2x8@", "h100-sxm:2x8@-5", "h100-sxm:2x8@80,", "h100-sxm:2x8@efa,5")
)
def test_a_network_in_another_form_is_refused(text: str):
    with pytest.raises(ValueError, match="@80,50"):
        parse_cluster(text)


def test_a_network_of_nothing_is_refused():
    with pytest.raises(ValueError, match="more than 0 Gbit/s"):
        parse_cluster("h100-sxm:2x8@0")


def test_a_cloud_s_network_has_a_name():
    cluster = parse_cluster("b200:4x8@efa")
    assert cluster.network == NETWORKS["efa"]
    assert str(cluster) == "b200:4x8@efa" and cluster.names_network
    assert parse_cluster(str(parse_cluster("h100-sxm:2x8/8@tcpx"))).network == NETWORKS["tcpx"]
    with pytest.raises(ValueError, match=r"unknown network 'x'.*efa, tcpx, gib"):
        parse_cluster("h100-sxm:2x8@x")
