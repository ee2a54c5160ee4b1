"""Say what an overlapped step became, when it is printed."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoverlap.plan.table import mesh_text
from jaxoverlap.start.record import Trials
from jaxoverlap.step.program import StepProgram


def described(name: str, programs: Sequence[StepProgram], trials: Sequence[Trials]) -> str:
    """Return what a step became, a line for each signature that it was called with.

    Args:
        name: of the function that was given to `overlap`.
        programs: what was decided before the first step, by signature.
        trials: the records of the signatures that started as they are.
    """
    lines = [*map(str, trials), *dict.fromkeys(map(_line, programs))]
    if not lines:
        return f"overlap({name}): not called yet; print(step.explain(*args)) says what it would do"
    return "\n  ".join((f"overlap({name}):", *lines))


def _line(program: StepProgram) -> str:
    """Return what one signature became: the verdict of its plan, or why it has none."""
    if program.plan is not None:
        simulated = f"; {program.speedup}" if program.speedup else ""
        return f"on {mesh_text(program.plan.mesh)}: {program.plan.verdict}{simulated}"
    if program.notice is not None:
        return program.notice.text
    return f"runs as it is: {program.error or 'there is nothing to overlap'}"
