"""One host's side of the lab: its process, which calls functions by name on request.

    python -m benchmarks.lab.hosts REQUESTS RESULTS     # started by the lab, in a host's namespace

The two are file descriptors. A request is a line of JSON, {"function": "module:name", "arguments":
{...}}; a result is one too, {"value": ...} or {"error": text, "trace": text}. A function gets a
`Host` and the arguments, and returns what JSON can hold. The process lives on between calls, so
that one call may prepare what others time.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COORDINATOR_PORT = 7700


@dataclass(frozen=True)
class Host:
    """The host that a function runs on.

    Attributes:
        rank: its number, from 0.
        count: the number of hosts.
        addresses: its addresses, one a rail.
        group: the group that it is in.
        coordinator: address and port of host 0, where processes find each other.
        folder: a folder that all hosts share.
    """

    rank: int
    count: int
    addresses: tuple[str, ...]
    group: int
    coordinator: str
    folder: str

    @classmethod
    def here(cls) -> Host:
        """Return the host that this process runs on, from the lab's variables.

        Raises:
            RuntimeError: outside a lab.
        """
        text = os.environ.get("JAXOVERLAP_LAB_HOST")
        if text is None:
            raise RuntimeError("this process runs on no host of a lab: start it by Lab.run")
        fields = json.loads(text)
        return cls(**fields | {"addresses": tuple(fields["addresses"])})

    def environment(self) -> dict[str, str]:
        """Return the variables that identify a process's host."""
        return {"JAXOVERLAP_LAB_HOST": json.dumps(asdict(self))}

    def start_jax(self, *, devices: int = 1, **options: Any) -> None:
        """Start JAX on CPUs as one process of `count`, with gloo over this host's first rail.

        Args:
            devices: CPU devices of this process.
            options: more for `jax.distributed.initialize`.
        """
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", devices)
        if self.count > 1:
            jax.distributed.initialize(self.coordinator, self.count, self.rank, **options)

    def mesh(self, **sizes: int) -> Any:
        """Return a mesh of automatic axes over all devices, host by host, the last axis fastest.

        Hosts have boot ids of their own, as real ones have, so JAX counts several slices, which
        `jax.make_mesh` refuses.
        """
        import jax
        import numpy as np

        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
        shape = tuple(sizes.values())
        return jax.sharding.Mesh(np.array(devices).reshape(shape), tuple(sizes), axis_types=kinds)

    def sent_bytes(self) -> int:
        """Return the bytes that this host has sent on all its rails, with headers."""
        lines = Path("/proc/net/dev").read_text().splitlines()
        rows = (line.split(":") for line in lines if line.strip().startswith("rail"))
        return sum(int(numbers.split()[8]) for _, numbers in rows)


def main() -> None:
    """Answer requests until there are no more."""
    requests, results = (int(number) for number in sys.argv[1:3])
    host = Host.here()
    with os.fdopen(requests) as lines, os.fdopen(results, "w") as answers:
        for line in lines:
            request = json.loads(line)
            try:
                module, _, name = request["function"].partition(":")
                function = getattr(importlib.import_module(module), name)
                answer = {"value": function(host, **request["arguments"])}
                text = json.dumps(answer)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                text = json.dumps({"error": message, "trace": traceback.format_exc()})
            print(text, file=answers, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # leaving JAX's processes in order needs all of them; results are written


if __name__ == "__main__":
    assert socket.gethostname() == f"host{Host.here().rank}", "the lab names its hosts"
    main()
