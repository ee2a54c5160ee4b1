"""Find the rules that made an overlapped step slower than plain, by source lines.

A line's kernels and waits are looked up in both timelines. Lines whose matmuls are in rings of the
same kinds count together, as one rule; what other lines lose has no rule's name, but a line's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxoverlap.plan.plan import Plan
from jaxoverlap.simulation.timeline import Timeline

_SHOWN = 3
_LEAST = 0.05  # of all that is lost: what lost less is not named

_Rule = tuple[tuple[str, str], ...]  # kinds of rings and their axes; empty for lines without any


@dataclass
class _Loss:
    """A rule's extra seconds over plain, of kernels and of waiting for collectives."""

    compute_s: float = 0.0
    exposed_s: float = 0.0
    lines: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s


def lost(plan: Plan, overlapped: Timeline, plain: Timeline) -> str:
    """Return the rules that lost most, each with its extra time over plain; empty if none."""
    losses = sorted(_losses(plan, overlapped, plain).items(), key=lambda item: -item[1].seconds)
    least = _LEAST * sum(max(loss.seconds, 0.0) for _, loss in losses)
    said = [
        f"{_name(rule, plan, loss)} ({_ms(loss.compute_s)} of compute, "
        f"{_ms(loss.exposed_s)} exposed)"
        for rule, loss in losses
        if loss.seconds > least
    ]
    return "; ".join(said[:_SHOWN])


def _losses(plan: Plan, overlapped: Timeline, plain: Timeline) -> dict[_Rule, _Loss]:
    rules = _rules(plan)
    losses: defaultdict[_Rule, _Loss] = defaultdict(_Loss)
    for sign, timeline in ((1, overlapped), (-1, plain)):
        for line, compute_s, exposed_s in _spent(timeline):
            loss = losses[rules.get(line, ())]
            loss.compute_s += sign * compute_s
            loss.exposed_s += sign * exposed_s
            loss.lines[line] = loss.lines.get(line, 0.0) + sign * (compute_s + exposed_s)
    return losses


def _rules(plan: Plan) -> dict[str, _Rule]:
    """Map each source line with rings to its rule."""
    kinds: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for d in plan.decisions:
        kinds[d.source].add((d.kind, d.axis))
    return {line: tuple(sorted(pairs)) for line, pairs in kinds.items()}


def _spent(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """Yield the source line of each kernel and wait, and its seconds as a kernel and as a wait.

    One of the two is zero; collectives in flight are left out.
    """
    for e in timeline.events:
        if e.kind == "wait":
            yield e.source, 0.0, e.seconds
        elif e.kind != "collective":
            yield e.source, e.seconds, 0.0


def _name(rule: _Rule, plan: Plan, loss: _Loss) -> str:
    if not rule:
        worst = max(loss.lines, key=lambda line: loss.lines[line])
        return f"what has no ring, most at {worst or 'lines that XLA does not name'}"
    rings = {d.ring for d in plan.decisions if d.source in loss.lines and (d.kind, d.axis) in rule}
    several = "s" * (len(rings) > 1)
    if len(rule) == 1:
        ((kind, axis),) = rule
        return f"{len(rings)} {kind} ring{several} on {axis}"
    kinds = ", ".join(f"{kind} on {axis}" for kind, axis in rule)
    return f"{len(rings)} ring{several}: {kinds}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+.1f} ms"
