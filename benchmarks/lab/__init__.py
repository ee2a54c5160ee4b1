"""A cluster on one machine: hosts as network namespaces, joined by links of the rates you name.

    from benchmarks.lab import Lab, Network

    with Lab(Network(hosts=4, rate_mbit=1000)) as lab:
        rows = lab.run("benchmarks.lab.examples:all_reduce", megabytes=4)

`lab.run` starts a process on each host, calls the function there, and gives what each returned.
Everything in this package but the races imports the standard library alone, so that a host may run
another Python (PyTorch's, say). docs/lab.md tells the rest.
"""

from benchmarks.lab.hosts import Host
from benchmarks.lab.lab import HostError, Lab, Outcome
from benchmarks.lab.network import Counters, LabError, Network, why_not

__all__ = ["Counters", "Host", "HostError", "Lab", "LabError", "Network", "Outcome", "why_not"]
