"""Stages of an overlapped step: JAX's own `Lowered` and `Compiled`, with the plan and its audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxoverlap._jax.jit_wrappers import WrappedJit
from jaxoverlap._util.progress import working
from jaxoverlap._util.text import warn
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.hardware.pods import cannot_run, mesh_of_compiled
from jaxoverlap.passes.scheduling.scheduler import Scheduled, SchedulerPass
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.simulation.audit import Audit, audit
from jaxoverlap.simulation.simulation import Simulation, simulate
from jaxoverlap.step.notices import not_compiled


class Lowered:
    """A lowered overlapped step: all that `jax.stages.Lowered` has, and the plan.

    Attributes:
        plan: what was done with each matmul; None if the step runs plain after an error.
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        plan: Plan | None,
        wrapped_jit: WrappedJit,
        cluster: Cluster | CostModel | None,
        ordering: SchedulerPass | None,
        *,
        faster: Callable[[Lowered, dict[str, Any] | None], Compiled] | None = None,
        speedup: Speedup | None = None,
        plain: Callable[[], jax.stages.Lowered] | None = None,
    ):
        self._lowered = lowered
        self._wrapped_jit = wrapped_jit
        self._cluster = cluster
        self._ordering = ordering
        self._faster = faster  # compiles this step, or another candidate that is faster
        self._speedup = speedup
        self._plain = plain  # lowers the step as it is, where that may be taken instead
        self.plan = plan

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile; the given options win over those that jaxoverlap adds for GPUs.

        Where there is a choice (`overlap(never_slower=)`), the step as it is is compiled too, in a
        child process, and the faster by simulation is what comes out, with a warning if that is not
        the overlapped step. Where XLA compiles the step as it is and not the overlapped one, that
        is what comes out too, unless `never_slower=False` or a plan asks for the overlapped step.
        """
        try:
            with working(f"compiling {self.plan.step if self.plan else 'the step'}"):
                if self._faster is None:
                    return self.compiled(compiler_options)
                return self._faster(self, compiler_options)
        except jax.errors.JaxRuntimeError as error:
            if self._plain is None:
                raise
            return self._instead(self._plain(), error, compiler_options)

    def _instead(
        self, plain: jax.stages.Lowered, error: Exception, options: dict[str, Any] | None
    ) -> Compiled:
        """Compile the step as it is, as XLA refuses the overlapped one; say so."""
        compiled = plain.compile(options)  # if XLA refuses both, the error is the step's own
        warn(not_compiled(self.plan.step if self.plan else "the step", error))
        return Compiled(compiled, None, self._wrapped_jit, self._cluster, None)

    def instead(
        self, lowered: jax.stages.Lowered, plan: Plan | None, ordering: SchedulerPass | None
    ) -> Lowered:
        """Return the step lowered in another way, as one of its candidates."""
        return Lowered(lowered, plan, self._wrapped_jit, self._cluster, ordering)

    def compiled(self, compiler_options: dict[str, Any] | None) -> Compiled:
        """Compile this very program, whatever other may be faster."""
        if self._ordering is None:
            compiled, report = self._lowered.compile(compiler_options), None
        else:
            with self._ordering.compiling() as scheduling:
                compiled = self._lowered.compile(compiler_options)
            report = scheduling.report
        return Compiled(
            compiled, self.plan, self._wrapped_jit, self._cluster, report, self._speedup
        )

    def __str__(self) -> str:
        """Return the step's name and what is done to it."""
        if self.plan is None:
            return "the step as it is, lowered"
        return f"{self.plan.step}, lowered: {self.plan.verdict}"

    def __repr__(self) -> str:
        return f"<Lowered {self}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lowered, name)


class Compiled:
    """A compiled overlapped step: all that `jax.stages.Compiled` has, plan, audit, simulation.

    Attributes:
        plan: as in `Lowered`; that to leave the step as it is, where that is faster.
        schedule: what the scheduler pass did, and by how many seconds; None where it did not run.
        speedup: the step's simulated speed relative to plain; None where it was not simulated.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        plan: Plan | None,
        wrapped_jit: WrappedJit,
        cluster: Cluster | CostModel | None,
        schedule: Scheduled | None,
        speedup: Speedup | None = None,
    ):
        self._compiled = compiled
        self._pod_mesh = mesh_of_compiled(compiled)
        self._wrapped_jit = wrapped_jit
        self._cluster = cluster
        self.plan = plan
        self.schedule = schedule
        self.speedup = speedup

    def __str__(self) -> str:
        """Return the step's name and its speed relative to the plain step, where that is known."""
        name = self.plan.step if self.plan else "the step as it is"
        return f"{name}: {self.speedup}" if self.speedup else f"{name}, compiled"

    def __repr__(self) -> str:
        return f"<Compiled {self}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled step."""
        if self._pod_mesh is not None:
            raise cannot_run(self._pod_mesh)
        return self._wrapped_jit.around(self._compiled)(*args, **kwargs)

    def as_text(self) -> str | None:
        """Return the scheduled module, with source lines that XLA loses when a pass reorders it."""
        text, frames = self._compiled.as_text(), self.schedule and self.schedule.frames
        return frames.restored(text) if text and frames else text

    def audit(self, *, multi_streaming: bool | None = None) -> Audit:
        """Audit the compiled schedule: which communication hides behind which matmuls.

        Args:
            multi_streaming: as for `jaxoverlap.simulate`.
        """
        found = audit(self.as_text() or "", multi_streaming=multi_streaming)
        return replace(found, speedup=self.speedup)

    def simulate(
        self,
        cluster: str | Cluster | CostModel | None = None,
        *,
        multi_streaming: bool | None = None,
        max_ctas: int | None = None,
    ) -> Simulation:
        """Simulate the step on a cluster, by `jaxoverlap.simulate`, to get its seconds.

        Args:
            cluster: as for `jaxoverlap.simulate`. Default: what the step was decided by, as the
                price file or the cluster that `overlap` was given; else what its GPUs form.
            multi_streaming, max_ctas: as for `jaxoverlap.simulate`.

        Raises:
            ValueError: if no cluster is known, or `simulate` refuses it.
        """
        if isinstance(cluster, str):
            cluster = parse_cluster(cluster)
        own = self._cluster
        cluster = own if cluster is None else cluster
        if cluster is None:
            raise ValueError(
                "simulate() knows no cluster: name the GPUs, as in "
                "compiled.simulate('h100-sxm:8x8') or overlap(step, cluster='h100-sxm:8x8')"
            )
        step: Any = self
        simulation = simulate(step, cluster, multi_streaming=multi_streaming, max_ctas=max_ctas)
        is_own = cluster is own
        if isinstance(own, CostModel) and cluster == own.cluster:
            is_own = cost_model(own.cluster) == own
        is_own = is_own and max_ctas is None
        return replace(simulation, speedup=self.speedup) if is_own else simulation

    def __getattr__(self, name: str) -> Any:
        # JAX asks stages for private parts of theirs: jax.experimental.serialize_executable does.
        if name.startswith("__") or name == "_compiled":
            raise AttributeError(name)
        return getattr(self._compiled, name)
