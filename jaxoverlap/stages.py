"""What `Overlapped.lower` and `Lowered.compile` give: JAX's own stages, and what was done."""

from __future__ import annotations

from typing import Any

import jax

from jaxoverlap._inside import Found
from jaxoverlap.cluster import Cluster
from jaxoverlap.cost import CostModel
from jaxoverlap.passes.audit import Audit, audit
from jaxoverlap.plan import Plan
from jaxoverlap.scheduler import Ordering, Scheduled
from jaxoverlap.simulate import Simulation, simulate


class Lowered:
    """A lowered overlapped step: all that `jax.stages.Lowered` has, and the plan.

    Attributes:
        plan: what was done with each matmul; None if the step runs plain after an error.
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        plan: Plan | None,
        found: Found,
        cluster: Cluster | None,
        ordering: Ordering | None,
    ):
        self._lowered = lowered
        self._found = found
        self._cluster = cluster
        self._ordering = ordering
        self.plan = plan

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile; the given options win over those that jaxoverlap adds for GPUs."""
        if self._ordering is None:
            compiled, report = self._lowered.compile(compiler_options), None
        else:
            with self._ordering.compiling() as scheduling:
                compiled = self._lowered.compile(compiler_options)
            report = scheduling.report
        return Compiled(compiled, self.plan, self._found, self._cluster, report)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lowered, name)


class Compiled:
    """A compiled overlapped step: all that `jax.stages.Compiled` has, plan, audit, simulation.

    Attributes:
        plan: as in `Lowered`.
        schedule: what the scheduler pass did, and by how many seconds; None where it did not run.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        plan: Plan | None,
        found: Found,
        cluster: Cluster | None,
        schedule: Scheduled | None,
    ):
        self._compiled = compiled
        self._found = found
        self._cluster = cluster
        self.plan = plan
        self.schedule = schedule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled step."""
        return self._found.around(self._compiled)(*args, **kwargs)

    def as_text(self) -> str | None:
        """The scheduled module, with the source lines that XLA loses when a pass reorders it."""
        text, frames = self._compiled.as_text(), self.schedule and self.schedule.frames
        return frames.restored(text) if text and frames else text

    def audit(self) -> Audit:
        """What hides behind what, in the compiled schedule."""
        return audit(self.as_text() or "")

    def simulate(self, cluster: str | Cluster | CostModel | None = None) -> Simulation:
        """What the step takes in seconds on a cluster, as `jaxoverlap.simulate` says.

        Args:
            cluster: as there. Default: the one that `overlap` was given, or that its GPUs are.

        Raises:
            ValueError: if none is known, or `simulate` refuses it.
        """
        cluster = cluster or self._cluster
        if cluster is None:
            raise ValueError(
                "simulate() knows no cluster: name the GPUs, as in "
                "compiled.simulate('h100-sxm:8x8') or overlap(step, cluster='h100-sxm:8x8')"
            )
        return simulate(self.as_text() or "", cluster)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._compiled, name)
