"""Run a step as it is at once, find better programs meanwhile, and keep what the clock prefers."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._jax.thread_config import inheriting
from jaxoverlap._util.ending import EndingError, check_running
from jaxoverlap._util.short_turns import short_turns
from jaxoverlap._util.text import first_line, warn
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.search.found import found
from jaxoverlap.start import contender, kept
from jaxoverlap.start.board import Board
from jaxoverlap.start.candidates import Offers, offers_of, tuned_offers_of
from jaxoverlap.start.contender import Contender
from jaxoverlap.start.course import Course, StepTurn
from jaxoverlap.start.kept import KeptDecision
from jaxoverlap.start.planner import Made, TrialPlanner
from jaxoverlap.start.record import PLAIN, Ran, Trials
from jaxoverlap.start.settings import Start
from jaxoverlap.step.context import mesh_of
from jaxoverlap.step.options import Options
from jaxoverlap.step.processes import DisagreementError, processes_of
from jaxoverlap.step.program import StepProgram, step_program
from jaxoverlap.tuning.tune import Tuning


class AtOnce:
    """A step for arguments of one type, from its first call on.

    Attributes:
        program: what an earlier run kept, to be run without trials; None where it kept the original
            step, or nothing is known.
    """

    def __init__(
        self, call: jits.Call, options: Options, start: Start, tuning: Tuning | None = None
    ):
        """Find what an earlier run decided.

        Args:
            call: the first call.
            options, start: the user's.
            tuning: how to search for candidates; None: as `overlap` does.
        """
        self._call = jits.without_arrays(call)
        self._options, self._start, self._tuning = options, start, tuning
        self._board = Board(processes_of(mesh_of(call)))
        self._planner = TrialPlanner(self._board, call.name, start.trials)
        self._course = Course(self._board, self._planner.plan)
        self._programs: dict[int, Contender] = {}
        self._lock = threading.Lock()
        self._steps, self._trial_steps, self._trial_s = 0, 0, 0.0
        self._ran = list[Ran]()
        self._record: Trials | None = None
        self._names = [PLAIN]
        self._has_run = self._begun = False
        self.program: StepProgram | None = None
        self._follow_earlier()

    @property
    def trials(self) -> Trials:
        """The record so far."""
        record = self._record or Trials(step=self._call.name)
        return msgspec.structs.replace(
            record,
            ran=tuple(self._ran),
            trial_steps=self._trial_steps,
            trial_s=self._trial_s,
        )

    # -- an earlier run's decision ----------------------------------------------------------------

    def _follow_earlier(self) -> None:
        """Take what an earlier run decided, as process 0 finds it.

        Raises:
            DisagreementError: if process 0 runs another step, or by other options.
        """
        identity = kept.identity(self._call, self._options, self._tuning)
        if self._board.leads:
            self._key = kept.key_of(identity)
            known = kept.read(self._start.folder, self._key)
            if known is not None and known.plan is not None:
                try:
                    self.program = self._following(known)
                except (RewriteError, ValueError) as error:
                    warn(f"the cached decision is ignored, and made again: {error}")
                    known = None
            if not self._board.is_alone:
                self._board.give("step", identity)
                self._board.give("known", msgspec.json.encode(known).decode())
        else:
            if self._board.get("step") != identity:
                raise DisagreementError(
                    f"{self._call.name} is not the same step in processes {self._board.me} and "
                    f"{self._board.processes[0]}, or overlap() has other arguments or versions "
                    "there, so it was not compiled. Give all the same code, versions and arguments"
                )
            known = msgspec.json.decode(self._board.get("known"), type=KeptDecision | None)
            if known is not None and known.plan is not None:
                self.program = self._following(known)
        if known is not None:
            self._record = msgspec.structs.replace(known.trials, cached=True, since=0)

    def _following(self, known: KeptDecision) -> StepProgram:
        options = dataclasses.replace(self._options, plan=known.plan)
        return step_program(self._call, options, found)

    # -- the steps --------------------------------------------------------------------------------

    def run(self, call: jits.Call, plain: Callable[[], Any]) -> Any:
        """Run a step.

        Args:
            call: its call.
            plain: runs the original step on the same arguments.
        """
        with self._lock:
            number, turn = self._next(call)
        if turn.program and turn.timed:
            return self._trial(call, plain, number, turn.program)
        if turn.program:
            flat = self._programs[turn.program].run
            assert flat is not None
            return jax.tree.unflatten(call.out_tree, flat(call.flat))
        results = plain() if not turn.timed else self._timed(plain, call, number)
        self._has_run = True
        return results

    def _next(self, call: jits.Call) -> tuple[int, StepTurn]:
        number = self._steps
        self._steps += 1
        if self._record is not None and self._record.cached:
            turn = StepTurn(0)
        else:
            if self._has_run and not self._begun:
                self._begin(call)
            turn = self._course.turn(number)
        if turn.record and self._record is None:
            self._finish(msgspec.json.decode(turn.record, type=Trials), turn.program)
        self._note(number, self._names[turn.program])
        return number, turn

    def _note(self, number: int, name: str) -> None:
        """Note which program runs; only the last row of the record changes as steps go on."""
        if self._ran and self._ran[-1].name == name:
            last = self._ran.pop()
            self._ran.append(msgspec.structs.replace(last, steps=last.steps + 1))
        else:
            self._ran.append(Ran(name=name, first=number, steps=1))

    def _trial(self, call: jits.Call, plain: Callable[[], Any], number: int, program: int) -> Any:
        """Time a step with a candidate; one that fails before it runs leaves all as it was."""
        run = self._programs[program].run
        assert run is not None
        try:
            flat = self._timed(lambda: run(call.flat), call, number)
        except Exception as error:
            # Elsewhere it may have run, and the other processes wait for this one.
            if contender.is_taken(call.flat) or not self._board.is_alone:
                raise
            self._drop(program, f"{type(error).__name__}: {first_line(error)}")
            return plain()
        return jax.tree.unflatten(call.out_tree, flat)

    def _timed(self, run: Callable[[], Any], call: jits.Call, number: int) -> Any:
        """Run a trial step, and report its seconds."""
        seconds = None
        try:
            results, seconds = contender.timed(run, call.flat)
        finally:
            with self._lock:
                self._course.put(number, seconds)
        with self._lock:
            self._trial_steps += 1
            self._trial_s += seconds
        return results

    def _drop(self, program: int, why: str) -> None:
        with self._lock:
            self._planner.drop(program, why)
        warn(f"{self._call.name}: {self._names[program]} was dropped: {why}")

    def _finish(self, record: Trials, program: int) -> None:
        """Keep the program that was taken, and only that; say so."""
        self._record = record
        self._programs = {n: one for n, one in self._programs.items() if n == program}
        if self._board.leads and any(one.seconds for one in record.candidates):
            plan = self._programs[program].plan if program else None
            mesh = mesh_of(self._call)
            devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
            decision = KeptDecision(devices=devices, plan=plan, trials=self.trials)
            kept.write(self._start.folder, self._key, decision)
        if self._board.leads and (notice := self._planner.offers.notice):
            warn(notice)
        if self._start.on_trials is not None:
            self._start.on_trials(self.trials)
        elif self._board.leads:
            if record.why:
                warn(str(record))
            else:
                print(record, file=sys.stderr, flush=True)

    # -- meanwhile --------------------------------------------------------------------------------

    def _begin(self, call: jits.Call) -> None:
        """Search and compile in a thread, which has the caller's contexts of JAX.

        It begins with the second call: a step that is called once has nothing to gain.
        """
        self._begun = True
        room = contender.room_bytes(call.flat)
        self._call.traced()  # found again by the thread, also where only this one could trace it
        work = inheriting(lambda: self._prepare(room))
        # No daemon: its call into XLA would outlive the interpreter, and end it by a signal.
        threading.Thread(target=work, name="jaxoverlap start", daemon=False).start()

    def _prepare(self, room: float) -> None:
        """Report what can run, in the thread."""
        try:
            with short_turns():
                offers = self._offers()
                made = tuple(self._made(offers, room))
        except EndingError:
            return
        self._names = [PLAIN, *(offer.name for offer in offers.offers)]
        self._planner.offers = offers
        self._board.report("made", msgspec.json.encode(made).decode())

    def _offers(self) -> Offers:
        """Return what is worth a trial: what process 0 finds."""
        if not self._board.leads:
            return msgspec.json.decode(self._board.get("offers"), type=Offers)
        try:
            if self._tuning is None:
                offers = offers_of(self._call, self._options)
            else:
                offers = tuned_offers_of(self._call, self._options, self._tuning)
        except Exception as error:  # training goes on with the original step
            offers = Offers(why=f"{type(error).__name__}: {error}")
        if not self._board.is_alone:
            self._board.give("offers", msgspec.json.encode(offers).decode())
        return offers

    def _made(self, offers: Offers, room: float) -> Sequence[Made]:
        """Compile the candidates, one after the other."""
        made = list[Made]()
        for number, offer in enumerate(offers.offers, 1):
            check_running()
            one = contender.contender(self._call, self._options, offer, room)
            self._programs[number] = one
            made.append(Made(digest=one.digest, peak_bytes=one.peak_bytes, why_not=one.why_not))
        return made
