"""Word the notices, once per step: why it is not overlapped, and what it loses as written."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from jaxoverlap._jax import jits
from jaxoverlap._util.text import first_line
from jaxoverlap.passes.analysis.mesh import MeshError, NoMeshError
from jaxoverlap.plan.edits import REPAIRS
from jaxoverlap.plan.limits import MUCH_LOST
from jaxoverlap.plan.plan import Plan

_REASONS = 5  # that are named of a longer one


class Notice(NamedTuple):
    """A message that the user gets once a step.

    Attributes:
        topic: what it is about; of several notices on one topic only the first is shown.
        text: what to say.
    """

    topic: str
    text: str


def no_mesh(call: jits.Call, error: MeshError) -> Notice:
    """Explain why a step on no mesh, on two or on one device runs as it is."""
    text = str(error)
    if isinstance(error, NoMeshError) and any(map(jits.is_tracer, call.flat)):
        text = (
            f"{call.params['name']} is called under jit, grad or vmap, where the shardings of its "
            "arguments are not known. Overlap the outermost function, or give the step "
            "in_shardings or sharding constraints"
        )
    return Notice("no mesh", f"overlap() changes nothing: {text}")


def inside(name: str) -> str:
    """Word the warning that a step is called inside a transformation, where little can be done."""
    return (
        f"{name} is overlapped inside another transformation (jax.jit, grad, vmap or scan): there "
        "it gets rings alone, by estimate; no batch split, XLA options or scheduler pass, and no "
        f"comparison with the original step. Put overlap() around the outermost jit: "
        f"overlap(jax.jit(...)), with jax.grad inside"
    )


def not_rewritten(name: str, plan: Plan) -> Notice:
    """Word the notice for a step on a mesh of which no operation is changed."""
    reasons = Counter(skip.reason for skip in plan.skips).most_common(_REASONS)
    lines = "".join(f"\n  {count} matmuls: {reason}" for reason, count in reasons)
    given = {"XLA options": plan.xla_options, "the scheduler pass": plan.schedule}
    gets = [what for what, there in given.items() if there]
    only = f" and adds {' and '.join(gets)} only" if gets else ""
    said = f"overlap() rewrites nothing in {name}{only}; explain() says why of each matmul"
    mostly = f", mostly:{lines}" if lines else ""
    return Notice("no ring", f"{said}{mostly}")


def unpriced(name: str, device: str) -> Notice:
    """Word the notice for a step without rings, on devices whose costs are not known."""
    return Notice(
        "no prices",
        f"overlap() makes no rings in {name}: there is no cost table of {device}, and rings by "
        "rule may cost time. Measure one (`python -m jaxoverlap.calibrate --here FILE`, then "
        "prices=FILE), name a known chip in cluster=, let trial steps choose (start='plain'), or "
        "ask for rings: granularity='one_way'",
    )


def repaired(plan: Plan) -> Notice | None:
    """Word the notice that a step loses much time by how it is written; None if it does not."""
    repairs = any(isinstance(edit, REPAIRS) for edit in plan.edits)
    if plan.price is None or not repairs:
        return None
    share = plan.price.lost_share
    if share <= MUCH_LOST:
        return None
    return Notice(
        "lost sharding",
        f"as written, {plan.step} loses {share:.0%} of its estimated time to shardings, which "
        f"overlap() repairs: {plan.notes[0]} `jaxoverlap advise` prints the constraints to write",
    )


def not_compiled(step: str, error: Exception) -> str:
    """Word the warning that a step runs as it is, as XLA refuses the overlapped program."""
    return (
        f"{step} runs as it is: XLA does not compile the overlapped program ({first_line(error)}). "
        "overlap(never_slower=False) raises XLA's error"
    )
