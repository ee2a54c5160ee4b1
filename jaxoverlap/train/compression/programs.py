"""Compiled programs by their settings: made when first needed, or beside the one that runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any


class Programs:
    """Keep compiled programs by key; compile some in a thread while others run."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._on_the_way: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a program; wait for it, or make it, if it is not there."""
        if key in self._on_the_way:
            self._made[key] = self._on_the_way.pop(key).result()  # raises what the thread did
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def beside(self, key: Hashable, make: Callable[[], Any]) -> None:
        """Make a program in a thread of its own, unless it is there or on the way."""
        if key in self._made or key in self._on_the_way:
            return
        future = self._on_the_way[key] = Future[Any]()

        def run() -> None:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="compile beside", daemon=True).start()

    def __len__(self) -> int:
        return len(self._made) + len(self._on_the_way)
