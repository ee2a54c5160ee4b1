"""Let the processes of a step read what others have written, without a barrier.

Process 0 of the mesh decides; all else is reports to it. In one process the same holds, by a store
of its own.
"""

from __future__ import annotations

import jax

from jaxoverlap._jax import jits
from jaxoverlap._jax.key_value_store import AloneStore, Store, store_of_processes
from jaxoverlap._util.ending import check_running
from jaxoverlap.step.processes import next_meeting

_POLL_MS = 1000  # the longest that a wait may hold up a Ctrl-C


class Board:
    """Holds the values that the processes of one step have written, by name.

    Attributes:
        processes: those that run the step.
        me: this one.
    """

    def __init__(self, processes: tuple[int, ...]):
        if jits.mocks_processes():
            processes = ()  # the others report nothing
        self.me = jax.process_index()
        self.processes = processes or (self.me,)
        self._store: Store = store_of_processes() if processes else AloneStore()
        self._where = next_meeting("start", processes) if processes else "start"

    @property
    def leads(self) -> bool:
        """Whether this process decides for all."""
        return self.me == self.processes[0]

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return len(self.processes) == 1

    def give(self, name: str, value: str) -> None:
        """Write what all may read."""
        self._store.key_value_set(f"{self._where}/{name}", value)

    def get(self, name: str) -> str:
        """Return what process 0 gives under a name; wait until it does.

        Raises:
            JaxRuntimeError: if the store is gone, as where process 0 ended.
            EndingError: if the interpreter ends.
        """
        while True:
            try:
                return self._store.blocking_key_value_get(f"{self._where}/{name}", _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            check_running()

    def report(self, name: str, value: str) -> None:
        """Write what process 0 reads of each process."""
        self._store.key_value_set(f"{self._where}/{name}/{self.me}", value)

    def reports(self, name: str) -> list[str] | None:
        """Return the reports of all processes, in their order; None until all have reported."""
        found = self._store.key_value_dir_get(f"{self._where}/{name}/")
        by_process = {int(key.rpartition("/")[2]): value for key, value in found}
        if by_process.keys() != set(self.processes):
            return None
        return [by_process[process] for process in self.processes]
