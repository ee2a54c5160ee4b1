"""Find which processes share a host: each records its host in jax.distributed's store.

SLURM starts one process for each GPU, so a process is not a host. What a device says of itself does
not tell its host: XLA numbers slices by what it finds, or by what the user says.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from jaxoverlap._jax import jits
from jaxoverlap._jax.key_value_store import DisagreementError, Store, awaited

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WHERE = "jaxoverlap/hosts"
_SHOWN = 8  # processes
WITHIN_S = 20.0

_lock = threading.Lock()
_known: tuple[Store | None, dict[int, str]] = (None, {})  # one store, and hosts in it


def this_host() -> str:
    """Return a name that the processes of this host share, and those of no other host.

    Linux draws a boot id each time it starts. Containers of one host share it, whatever their own
    names are, and their GPUs share NVLink. Elsewhere the host's name has to do.
    """
    try:
        return _BOOT_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def announce() -> None:
    """Say on which host this process runs, where there are others; waits for nobody."""
    process, processes = jits.started_processes()
    if processes > 1 and (store := jits.key_value_store()) is not None:
        _announced(store, process)


def hosts_of(processes: Collection[int], within_s: float = WITHIN_S) -> Mapping[int, str]:
    """The host of each process, by a name that only the processes of one host share.

    Each process says once where it runs, when it comes here or when `overlap` is called; the others
    wait for it. Without a store, or in one process, each process is a host.

    Args:
        processes: the processes to tell apart, this one among them.
        within_s: how long to wait for those that have not recorded it yet.

    Raises:
        DisagreementError: if one does not say in time.
    """
    me, count = jits.started_processes()
    store = jits.key_value_store() if count > 1 and len(processes) > 1 else None
    if store is None:
        return {process: f"process {process}" for process in processes}
    known, end = _announced(store, me), time.monotonic() + within_s
    if any(process not in known for process in processes):
        for key, host in store.key_value_dir_get(f"{_WHERE}/"):
            known[int(key.rpartition("/")[2])] = host
    missing = [process for process in sorted(processes) if process not in known]
    for process in missing:
        host = awaited(store, f"{_WHERE}/{process}", max(end - time.monotonic(), 0.01))
        if host is not None:
            known[process] = host
    if missing := [process for process in missing if process not in known]:
        raise DisagreementError(_absent(missing, within_s))
    return {process: known[process] for process in processes}


def _announced(store: Store, process: int) -> dict[int, str]:
    """Say once where this process runs; return the hosts known so far of the store's processes."""
    global _known
    with _lock:
        if _known[0] is not store:
            host = this_host()
            # A process that was started anew, with the number of one that died, may run elsewhere.
            store.key_value_set(f"{_WHERE}/{process}", host, allow_overwrite=True)
            _known = (store, {process: host})
        return _known[1]


def _absent(missing: list[int], within_s: float) -> str:
    shown = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
    return (
        f"process {shown} did not say within {within_s:g} s on which host it runs, so it is not "
        "known which GPUs NVLink joins. Every process of the mesh has to call overlap(), after "
        "jax.distributed.initialize(), or to come to the step; see what became of it there. If it "
        "may take longer, say so in overlap(agree_within_s=); or name the cluster, as in "
        "overlap(cluster='h100-sxm:8x8/8'), and no process is asked"
    )
