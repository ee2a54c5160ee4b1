"""Clusters: what the compiler and the cost model need to know of hosts, GPUs and networks.

A cluster is named by a string: chip, hosts, GPUs a host. `parse_cluster("h100-sxm:8x8")` is eight
hosts of eight, each with one JAX process for its eight GPUs; "h100-sxm:8x8/8" has eight processes
on each host, one for each GPU, as SLURM starts them. After an @ comes the network of a host, in
Gbit/s, and after a comma its latency in microseconds, where they are not the chip's usual ones:
"a100-sxm-80:16x8@80" has 80 Gbit/s a host, "a100-sxm-80:16x8@80,50" a latency of 50 µs besides.
A network of a cloud that NCCL was measured on has a name: "b200:4x8@efa". Nothing here needs JAX.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import Integer, checked
from jaxoverlap.hardware.chips import CHIPS, KNOWN, Chip, Link


@dataclass(frozen=True)
@checked
class Cluster:
    """Equal hosts of equal GPUs. `str(cluster)` gives back the string it was parsed from.

    Devices are counted host by host: device `i` is GPU `i % gpus_per_host` of host
    `i // gpus_per_host`; and within a host process by process. Of links that were replaced the
    string says nothing; of a network that the string named (`host_network`) it does.

    Attributes:
        chip: the GPUs.
        num_hosts: hosts of the cluster.
        gpus_per_host: GPUs of each host.
        nvlink, network: a GPU's links.
        processes_per_host: JAX processes on each host, which share its GPUs evenly. A GPU copies
            from another of its own process; what goes to another process, NCCL sends.
    """

    chip: Chip
    num_hosts: Integer
    gpus_per_host: Integer
    nvlink: Link
    network: Link
    processes_per_host: Integer = 1

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.gpus_per_host < 1:
            raise ValueError(
                f"cluster {str(self)!r} has {self.num_hosts} hosts of {self.gpus_per_host} GPUs: "
                "give at least one of each"
            )
        if self.processes_per_host < 1 or self.gpus_per_host % self.processes_per_host:
            raise ValueError(
                f"cluster {str(self)!r} has {self.processes_per_host} processes on a host of "
                f"{self.gpus_per_host} GPUs: expected a number that divides these, such as 1 for "
                f"one process a host or {self.gpus_per_host} for one a GPU"
            )

    def __str__(self) -> str:
        processes = f"/{self.processes_per_host}" if self.processes_per_host != 1 else ""
        return f"{self.chip.name}:{self.num_hosts}x{self.gpus_per_host}{processes}{self._network}"

    @property
    def _network(self) -> str:
        """Return the suffix after "@", if the network is one that a string can name."""
        if name := next((n for n, link in NETWORKS.items() if link == self.network), ""):
            return f"@{name}"
        gbit_per_s = self.network.bandwidth_bytes_per_s * 8 * self.gpus_per_host / 1e9
        latency_us = self.network.latency_s * 1e6
        if not self.names_network:
            return ""
        usual = self.network.latency_s == self.chip.network.latency_s
        return f"@{gbit_per_s:.9g}" + ("" if usual else f",{latency_us:.9g}")

    @property
    def names_network(self) -> bool:
        """Return whether the cluster's string names its network."""
        if self.network in NETWORKS.values():
            return True
        if self.gpus_per_host < 1:
            return False
        gbit_per_s = self.network.bandwidth_bytes_per_s * 8 * self.gpus_per_host / 1e9
        named = host_network(gbit_per_s, self.gpus_per_host, self.network.latency_s)
        return self.network.name == named.name

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.num_hosts * self.gpus_per_host

    @property
    def gpus_per_process(self) -> int:
        """GPUs of one JAX process: devices k·n to k·n + n - 1 are one process's."""
        return self.gpus_per_host // self.processes_per_host

    @property
    def hosts_per_nvlink_domain(self) -> int:
        """Hosts whose GPUs reach each other by NVLink; all other traffic takes the network.

        One, save where NVLink leaves the host (GB200 NVL72). Domains are equal in size, so a
        cluster that does not fill its racks is spread evenly over as few as can hold it.
        """
        most = min(self.chip.nvlink_rack_gpus // self.gpus_per_host, self.num_hosts)
        return max((n for n in range(1, most + 1) if self.num_hosts % n == 0), default=1)

    @property
    def gpus_per_nvlink_domain(self) -> int:
        """GPUs that reach each other by NVLink: devices k·n to k·n + n - 1 are one such group."""
        return self.hosts_per_nvlink_domain * self.gpus_per_host


# Networks of clouds by name, each GPU's share. Latencies and rates are fitted to the collectives of
# one publication each, by NCCL's tuning model (`jaxoverlap.cost.nccl`).
NETWORKS = {
    # stas00/ml-engineering, network/README.md: all-reduces of 4 x 8 B200s, 256 kB to 16 GB
    "efa": Link("EFA, 400 Gb/s a GPU", 50e9, 150e-6),
    # GoogleCloudPlatform/cluster-toolkit, gke-a3-highgpu: all-gathers of 2 x 8 H100s
    "tcpx": Link("GPUDirect-TCPX, 100 Gb/s a GPU", 12.5e9, 70e-6, simple_only=True),
    # google/dranet: all-gathers of 2 x 8 B200s in pods, which reach 0.7 of 400 Gb/s
    "gib": Link("gIB over RoCE, 0.7 of 400 Gb/s a GPU", 35e9, 74e-6, simple_only=True),
}
_FORM = re.compile(
    r"(?P<chip>[^:\s]+):(?P<hosts>-?\d+)x(?P<gpus>-?\d+)(?:/(?P<processes>-?\d+))?"
    r"(?:@(?:(?P<network>[a-z]\w*)|(?P<gbit>\d+(?:\.\d+)?)(?:,(?P<latency>\d+(?:\.\d+)?))?))?",
    re.ASCII,
)
_TPU = re.compile(r"tpu.*|v[2-7](?:e|p|lite.*)?|trillium|ironwood")


def chips() -> tuple[Chip, ...]:
    """All chips that can be compiled for, oldest first; `parse_cluster` knows more."""
    return tuple(CHIPS.values())


def host_network(gbit_per_s: float, gpus_per_host: int, latency_s: float) -> Link:
    """Return each GPU's share of a network of so many Gbit/s a host.

    A GPU alone cannot send at the host's rate: its share is a link of its own, as with a NIC for
    each GPU. In a ring through all GPUs of several hosts, all shares of a host count.
    """
    share = gbit_per_s * 1e9 / 8 / gpus_per_host
    return Link(f"network of {gbit_per_s:.9g} Gbit/s a host", share, latency_s)


def _like(chip: str) -> list[str]:
    """Return the known chips that a name may mean: h100 is h100-sxm, and not h200."""
    begin = [name for name in KNOWN if name.startswith(chip)]
    return begin or difflib.get_close_matches(chip, KNOWN, cutoff=0.5)


def parse_cluster(text: str) -> Cluster:
    """The cluster that a string such as "h100-sxm:8x8" names: chip, hosts, GPUs a host.

    After a slash comes how many JAX processes each host runs, if more than one, as in
    "h100-sxm:8x8/8". After an @ comes the network: a name of `NETWORKS`, as in "b200:4x8@efa"; or
    Gbit/s a host, and after a comma its latency in microseconds, as in "a100-sxm-80:16x8@80,50".
    Its other links are those of the chip.

    Raises:
        ValueError: The string has another form, the chip or the network is unknown, a count or the
            network's rate is not positive, or the processes cannot share a host's GPUs evenly.
    """
    expect(isinstance(text, str), "cluster", text, "a string like 'h100-sxm:8x8'")
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(
            f"cannot read {text!r} as a cluster: write CHIP:HOSTSxGPUS_A_HOST, for instance "
            "'h100-sxm:8x8' for eight hosts of eight GPUs, 'h100-sxm:8x8/8' where each host runs "
            "eight processes, or 'h100-sxm:8x8@80,50' for a network of 80 Gbit/s a host and 50 µs, "
            f"or with one of {', '.join(NETWORKS)} after the @"
        )
    chip = KNOWN.get(form["chip"])
    if chip is None:
        if _TPU.fullmatch(form["chip"].lower()):
            raise ValueError(f"{text!r}: TPUs are not supported. Known are {', '.join(KNOWN)}")
        near = _like(form["chip"].lower())
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown chip {form['chip']!r} in {text!r}: {hint}Known are {', '.join(KNOWN)}"
        )
    gpus, processes, network = int(form["gpus"]), int(form["processes"] or 1), chip.network
    if name := form["network"]:
        if name not in NETWORKS:
            raise ValueError(
                f"unknown network {name!r} in {text!r}: known are {', '.join(NETWORKS)}"
            )
        network = NETWORKS[name]
    if form["gbit"] and gpus > 0:
        gbit_per_s = float(form["gbit"])
        if not gbit_per_s > 0:
            raise ValueError(f"{text!r}: expected a network of more than 0 Gbit/s a host")
        latency_us = form["latency"]
        latency_s = float(latency_us) / 1e6 if latency_us else network.latency_s
        network = host_network(gbit_per_s, gpus, latency_s)
    return Cluster(chip, int(form["hosts"]), gpus, chip.nvlink, network, processes)


def cluster_from(cluster: Any) -> Cluster:
    """Return the cluster that a caller names by its string, or gives.

    Raises:
        ValueError: if it is neither, or as `parse_cluster`.
    """
    what = "a string like 'h100-sxm:8x8', or a Cluster"
    expect(isinstance(cluster, str | Cluster), "cluster", cluster, what)
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster
