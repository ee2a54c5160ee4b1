"""Time the candidates of a tuning in trial steps on copies of the arguments, as nothing trains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap._jax import jits
from jaxoverlap._util.text import first_line
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.start import contender
from jaxoverlap.start.candidates import Offer
from jaxoverlap.start.contender import Contender
from jaxoverlap.start.race import Race
from jaxoverlap.start.settings import LEAST_TRIALS, TRIAL_STEPS
from jaxoverlap.step.options import Options
from jaxoverlap.tuning.by_clock import Clocked, measured


class TrialsOnCopies:
    """Trial steps of a call, whose arguments stay as they are; each candidate is compiled once."""

    def __init__(self, call: jits.Call, options: Options):
        """Prepare the trial steps.

        Args:
            call: the step's call; for its ShapeDtypeStructs arrays of ones are made.
            options: the user's options.
        """
        self._call, self._options = call, options
        self._made: dict[str, Contender] = {}

    def __call__(self, candidates: Sequence[Candidate]) -> Clocked:
        """Run trial steps of some candidates, the original step first, until the order is clear.

        One that does not compile, does not fit, has other results than the original step, or fails
        in a trial step is dropped.

        Raises:
            Exception: what the original step raises.
        """
        for one in candidates:
            if one.stage not in self._made:
                self._made[one.stage] = self._contender(one)
        made = [self._made[one.stage] for one in candidates]
        dropped = {n: one.why_not for n, one in enumerate(made) if one.run is None}
        most = max(TRIAL_STEPS, LEAST_TRIALS * len(made))
        race = Race([n for n in range(len(made)) if n not in dropped], most)
        while (number := race.next()) is not None:
            try:
                race.put(number, self._seconds(made[number]))
            except Exception as error:
                if number == 0:
                    raise
                race.skip()
                race.drop(number)
                dropped[number] = f"{type(error).__name__}: {first_line(error)}"
        assert race.winner is not None
        times = {n: seconds for n, seconds in race.seconds.items() if seconds and n not in dropped}
        medians = {n: statistics.median(seconds) for n, seconds in times.items()}
        followed = [replace(one, plan=made[n].plan or one.plan) for n, one in enumerate(candidates)]
        ended = [measured(c, medians.get(n), dropped.get(n, "")) for n, c in enumerate(followed)]
        return Clocked(ended, ended[race.winner], min(map(len, times.values()), default=0))

    def _contender(self, candidate: Candidate) -> Contender:
        if candidate.plan is None:
            return contender.original(self._call)
        offer = Offer(name=candidate.stage, plan=candidate.plan)
        room = contender.room_bytes(self._copies())
        return contender.contender(self._call, self._options, offer, room)

    def _seconds(self, one: Contender) -> float:
        assert one.run is not None
        flat, run = self._copies(), one.run
        _, seconds = contender.timed(lambda: run(flat), flat)
        return seconds

    def _copies(self) -> list[Any]:
        return [_copy(x) for x in self._call.flat]


def _copy(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jnp.ones(value.shape, value.dtype, device=value.sharding)
    return jnp.copy(value) if isinstance(value, jax.Array) else value
