"""Tell a process that joins a running job which workers have the state, through JAX's store.

Process 0 runs the coordinator, without which no process goes on, so it always knows. A process that
joins leaves a token of its own before it is counted as alive, and process 0 answers to the token.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import msgspec

from jaxoverlap._jax.key_value_store import awaited

_ROOT = "jaxoverlap/elastic"


class JoinReply(msgspec.Struct):
    """The answer of process 0 to a process that joins.

    Attributes:
        stay: the workers that have the state.
        changes: how often the workers changed so far.
    """

    stay: tuple[int, ...]
    changes: int


class Newcomers:
    """One process's side of the exchange.

    Args:
        store: of `jax.distributed`; None in a single process, which has nobody to ask.
        within_s: how long an answer is waited for.
    """

    def __init__(self, store: Any, within_s: float):
        self._store, self._within_s = store, within_s
        self._token, self._asked = uuid.uuid4().hex, 0
        self._answered: dict[str, int] = {}
        if store is not None:
            mine = f"{_ROOT}/token/{jax.process_index()}"
            store.key_value_set(mine, self._token, allow_overwrite=True)

    def ask(self) -> JoinReply:
        """Return what process 0 answers in this round.

        Raises:
            RuntimeError: if it does not.
        """
        text = awaited(self._store, self._key(self._token, self._asked), self._within_s)
        self._asked += 1
        if text is None:
            raise RuntimeError(
                f"process 0 did not answer within {self._within_s:g} s: every process of the job "
                "has to call round() of an Elastic that is made alike"
            )
        return msgspec.json.decode(text, type=JoinReply)

    def answer(self, processes: Iterable[int], stay: Sequence[int], changes: int) -> None:
        """Answer to processes that join, as process 0."""
        text = msgspec.json.encode(JoinReply(tuple(stay), changes)).decode()
        for process in processes:
            token = awaited(self._store, f"{_ROOT}/token/{process}", self._within_s)
            if token is None:
                raise RuntimeError(
                    f"process {process} is alive and made no Elastic within {self._within_s:g} s"
                )
            times = self._answered.get(token, 0)
            self._store.key_value_set(self._key(token, times), text)
            self._answered[token] = times + 1

    def _key(self, token: str, times: int) -> str:
        return f"{_ROOT}/answer/{token}/{times}"
