"""Compile and simulate what a user has without this library: XLA's defaults and published options.

`jaxoverlap.configure`, `simulate --without` and README name the same baseline: the fastest of these
on the fastest mesh, with nothing of this library in it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jaxoverlap._jax.jobs import job_of
from jaxoverlap._util.files import kept_folder
from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.target import Target
from jaxoverlap.cost.find import cost_model
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import compiler_options, devices
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.compiled import MOST_WORKERS, writable
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from jaxoverlap.step.trial import Request, attempt

DEFAULTS = "XLA's defaults"
_TIMEOUT_S = 3600.0  # of a child; what takes as long is stuck


@dataclass(frozen=True)
class Without:
    """The simulated seconds of a step as it is, by sets of XLA options.

    Attributes:
        mesh: its mesh, as text.
        seconds: of the steps that compile, fit the GPU and have a known number of iterations; the
            fastest first.
        refused: why others have no seconds.
        peak_bytes: bytes that a device needs for the fastest; 0 if unknown.
    """

    mesh: str
    seconds: dict[str, float]
    refused: dict[str, str]
    peak_bytes: int

    @property
    def step_s(self) -> float | None:
        """Seconds of the fastest; None if there is none."""
        return next(iter(self.seconds.values()), None)

    def __str__(self) -> str:
        why = "".join(f"; {name}: {reason}" for name, reason in self.refused.items())
        if self.step_s is None:
            return f"without jaxoverlap on {self.mesh}: no figure{why}"
        (name, _), *others = self.seconds.items()
        rest = "".join(f"; {other} {milliseconds(s)}" for other, s in others)
        first = f"{milliseconds(self.step_s)} on {self.mesh} by {name}"
        return f"without jaxoverlap: {first}{rest}{why}"

    def compared(self, mesh: str, step_s: float) -> str:
        """Return it as text, followed by the overlapped step on a mesh."""
        if self.step_s is None:
            return str(self)
        times = f"{self.step_s / step_s:.2f} x"
        return f"{self}\nwith it: {milliseconds(step_s)} on {mesh}, {times}"


def without(built: Target, mesh: str) -> Without:
    """Compile a step as it is with each set of options, in child processes, and simulate it.

    Args:
        built: the step with its arguments, on a pod.
        mesh: its mesh, as text.

    Raises:
        ValueError: if the step calls back into Python, or was overlapped already.
    """
    assert built.pod is not None
    cluster = parse_cluster(built.pod)
    kept, cost = writable(kept_folder() / "trials"), cost_model(cluster)
    with working(f"lowering the step as it is on {mesh}"):
        lowered = built.lower_plain()
    device = devices(cluster)[0]
    sets = {DEFAULTS: {}, **{name: accepted(name, device)[0] for name in COMPARED}}

    def answer(options: dict[str, str]) -> Evaluation:
        request = Request(job_of(lowered, {**compiler_options(), **options}), cost, None)
        return attempt(request, kept, _TIMEOUT_S)

    with (
        working(f"compiling the step as it is on {mesh}, by {', '.join(sets)}"),
        ThreadPoolExecutor(MOST_WORKERS) as pool,
    ):
        answers = dict(zip(sets, pool.map(answer, sets.values()), strict=True))
    refused = {name: _refusal(one, cluster.chip.memory_bytes) for name, one in answers.items()}
    fit = sorted((n for n in answers if not refused[n]), key=lambda n: answers[n].seconds)
    return Without(
        mesh,
        {name: answers[name].seconds for name in fit},
        {name: why for name, why in refused.items() if why},
        answers[fit[0]].peak_bytes if fit else 0,
    )


def _refusal(one: Evaluation, most_bytes: float) -> str:
    """Say why a compiled step has no seconds; "" if it has."""
    if one.refusal:
        return one.refusal
    if one.peak_bytes > most_bytes:
        return f"needs {one.peak_bytes / 1e9:.0f} GB of {most_bytes / 1e9:.0f}"
    return UNKNOWN_TRIPS if UNKNOWN_TRIPS in one.simulated.unknown else ""
