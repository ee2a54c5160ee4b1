"""Use the key-value store of jax.distributed, through which processes exchange facts.

It runs over the network and needs no device, so that a wait in it always ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import jax

from jaxoverlap._jax import jits

_POLL_S = 2.0  # the longest that a wait may hold up a Ctrl-C


class Store(Protocol):
    """The key-value store of `jax.distributed`, of which all processes are clients.

    A call that takes longer than its timeout, in milliseconds, raises a JaxRuntimeError.
    """

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set the value of a key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a value."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys that are there now below a key, which ends in "/", and their values."""
        ...

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int]
    ) -> None:
        """Wait until these processes are all here; the timeout runs from the first one's coming."""
        ...


class DisagreementError(RuntimeError):
    """The processes are not about to run one program, or one of them is missing."""


class AloneStore:
    """The store of a process whose peers are mocked: it decides for all."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set the value of a key."""
        self._values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return a value that this process has set."""
        return self._values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys below a key, and their values."""
        # As a list: another thread may set a value meanwhile.
        return [(k, v) for k, v in list(self._values.items()) if k.startswith(key)]

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int]
    ) -> None:
        """Return at once."""


_ALONE = AloneStore()


def store_of_processes() -> Store:
    """The store that all processes share; this process's own where the others are mocked.

    Raises:
        DisagreementError: if jax.distributed was not initialized.
    """
    store = jits.key_value_store()
    if store is None and jits.mocks_processes():
        return _ALONE
    if store is None:
        raise DisagreementError(
            f"{jax.process_count()} processes, but jax.distributed was not initialized, so they "
            "cannot agree on a program: call jax.distributed.initialize() first"
        )
    return store


def awaited(store: Store, key: str, within_s: float) -> str | None:
    """Wait for a value until somebody leaves it; return None if nobody does within `within_s`."""
    end = time.monotonic() + within_s
    while (left := end - time.monotonic()) > 0:
        try:
            return store.blocking_key_value_get(key, max(round(min(left, _POLL_S) * 1e3), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None
