"""Propose candidates for a tuning: whole plans first, then one ring after the other in another way.

A candidate is a step by some `Options`, or the step as it is. The seeds are plans for all rings: as
Lagom's search on the model cuts them, none at all, those that the rules leave out too, scanned
weights in rings. The best are tried with other settings: more memory for the scheduler pass, other
limits for what XLA merges. A move changes how the pieces of one ring travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxoverlap.plan.plan import Decision, Plan, Skip, Variant
from jaxoverlap.step.options import Options
from jaxoverlap.step.trial import Trial
from jaxoverlap.tuning.lagom.granularity import GranularityModel

PLAIN = "plain"  # the step as it is, by XLA's defaults
RULES = "rules"  # what overlap() does unasked
_SLACK = 0.05
_CUTS = ((2, 1), (2, 2), (2, 4), (4, 1))  # parts of the rows, and steps of a scan in one body
# XLA's own thresholds merge small collectives: fewer launches, and fewer that hide.
_MERGES = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
_MOST_MERGED = 1 << 30  # as MaxText's scripts have them
# In this order they are tried: from what changes the schedule least.
_WAYS = {
    "all_gather_matmul": ("two_way", "one_way", "one_way x 2", "sliced x 2", "plain"),
    "matmul_reduce_scatter": ("direct", "one_way", "two_way", "sliced x 2", "plain"),
    "matmul_all_reduce": ("direct", "one_way", "two_way", "plain"),
    "all_to_all_matmul": ("direct", "direct x 2", "sliced x 2", "plain"),
}
_IN_SLICES = ("sliced x 2", "sliced x 4")
_LEFT = ("one_way", *_IN_SLICES)  # of what the rules leave alone


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        name: a description in words.
        options: the options of the rewrite; None for the step as it is.
        changes: the rings that differ from those of the candidate that it was made from.
        step_s: its estimated seconds, where they are known already.
    """

    name: str
    options: Options | None
    changes: Mapping[int, Variant]
    step_s: float | None = None


def seeds(
    base: Options,
    rules: Plan,
    trial: Trial | None = None,
    cuts: Sequence[Mapping[int, Variant]] = (),
) -> list[Candidate]:
    """List the candidates to try first, beside the step as it is and the rules.

    Args:
        base: the options of the rules.
        rules: the plan that they gave.
        trial: the result of that plan. Where next to nothing waits for the collectives that the
            rules leave whole, those are tried in other ways last.
        cuts: how to cut all rings, from `granularity.GranularityModel`, best first.
    """
    for_all_rings = [
        Candidate(f"lagom {place}", replace(base, choices=choices), {})
        for place, choices in enumerate(cuts, 1)
    ]
    none = dict.fromkeys((d.site for d in rules.decisions), Variant("plain"))
    for_all_rings += [Candidate("no rings", replace(base, choices=none), {})] if none else []
    if rules.prefetched and not rules.cut:
        for_all_rings.append(Candidate("fsdp in rings", replace(base, fsdp="ring"), {}))
    dear = [s for s in rules.skips if s.left_plain]
    others = list(_others(base, [s.site for s in dear]))
    waits = trial is None or sum(exposed_s(s, trial) for s in dear) > _WORTH * trial.step_s
    return [*others, *for_all_rings] if waits else [*for_all_rings, *others]


def settings(at: Candidate, plan: Plan) -> list[Candidate]:
    """Vary the settings that hold for all rings: memory for the scheduler pass, XLA's options.

    Args:
        at: the candidate whose plan it is.
    """
    options = at.options
    if options is None:
        return []
    variations = []
    if options.schedule:
        roomy = replace(options.schedule, slack=_SLACK)
        variations.append((f"slack {_SLACK}", replace(options, schedule=roomy)))
    rest = {k: v for k, v in plan.xla_options.items() if k not in _MERGES}
    if rest != plan.xla_options:
        variations.append(("XLA merges", replace(options, xla_options=rest)))
        most = dict.fromkeys(_MERGES, str(_MOST_MERGED))
        variations.append(("merges to 1 GiB", replace(options, xla_options=rest | most)))
    return [Candidate(f"{at.name}, {name}", changed, {}) for name, changed in variations]


def _others(base: Options, dear: Sequence[int]) -> Iterator[Candidate]:
    """Yield candidates with rings or slices for the matmuls that the rules leave whole."""
    if dear:
        for name, way in (("all rings", "one_way"), *((f"others {w}", w) for w in _IN_SLICES)):
            every = dict.fromkeys(dear, Variant.parse(way))
            yield Candidate(name, replace(base, choices=every), {})


def ways(base: Options) -> list[Candidate]:
    """List candidates with all rings in one way, for where nothing tells the rings apart."""
    names = ("two_way", "one_way x 2", "direct", "sliced x 2")
    return [Candidate(n, replace(base, granularity=Variant.parse(n)), {}) for n in names]


def moves(
    at: Candidate,
    plan: Plan,
    trial: Trial,
    tried: Collection[tuple[int, str]],
    model: GranularityModel,
) -> list[Candidate]:
    """List the next moves: for each ring the next way not tried, the smallest H first.

    H is Lagom's: the computation that a move adds for each second that no longer waits. Rings that
    the model does not have come last; of equal ones the ring that waits longest comes first.

    Args:
        at: the best candidate so far, with its plan and trial.
        tried: sites and variants that need no second try.
        model: prices what cutting a ring costs.
    """
    options = at.options
    if options is None:
        return []
    priced: list[tuple[float, float, Candidate]] = []
    for entry, ways in _movable(plan):
        waited = exposed_s(entry, trial)
        way = next((w for w in ways if (entry.site, w) not in tried), None)
        if way is not None and waited > _WORTH * trial.step_s:
            now = entry.variant if isinstance(entry, Decision) else Variant("plain")
            to = Variant.parse(way)
            lost = model.lost_per_second(entry.site, now, to, waited)
            name = f"{entry.source} ({entry.site}) {way}"
            changes = {entry.site: to}
            priced.append((lost, -waited, Candidate(name, changed(options, changes), changes)))
    return [candidate for _, _, candidate in sorted(priced, key=lambda one: one[:2])]


_WORTH = 0.002  # of a step: what waits for less is left as it is


def with_rows_of(base: Options, plan: Plan) -> Options:
    """Return options that cut the rows as a plan does, or not: its sites are those of all parts."""
    cut = plan.cut
    return replace(base, halves=cut and cut.parts, unroll=cut.unroll if cut else 1)


def rows(base: Options, rules: Plan) -> list[Candidate]:
    """List candidates whose rows are cut in another way than those of the rules.

    Args:
        base: the options of the rules, with rows as their plan has them.
        rules: the plan; it has a price of halves if the rows can be cut.
    """
    if rules.halves is None or rules.halves.step_s is None:
        return []
    candidates = []
    if rules.cut:
        whole = replace(base, halves=None, unroll=1)
        candidates.append(Candidate("whole rows", whole, {}, rules.halves.whole_s))
    for parts, unroll in _CUTS:
        if (parts, unroll) != (base.halves, base.unroll):
            name = f"{parts} parts" + (f", unrolled {unroll} times" if unroll > 1 else "")
            cut = replace(base, halves=parts, unroll=unroll, rings=False)
            candidates.append(Candidate(name, cut, {}))
    return candidates


def said(base: Options, plan: Plan) -> Options:
    """Return options that name every ring of a plan, so that single rings can be changed."""
    plain = {skip.site: Variant("plain") for skip in plan.skips if skip.left_plain}
    choices = {**plan.choices, **plain}
    return replace(
        base,
        choices=choices,
        sums=plan.sums,
        rings=plan.may_ring,
        layers_ahead=plan.joined_bytes > 0,
        lookups=bool(plan.scattered),
    )


def changed(options: Options, to: Mapping[int, Variant]) -> Options:
    """Return the options with some rings changed."""
    return replace(options, choices={**options.choices, **to}, rings=True)


def _movable(plan: Plan) -> Iterator[tuple[Decision | Skip, tuple[str, ...]]]:
    """Yield the matmuls that rings are named after, each with the ways that it could change to."""
    for entry in plan.entries:
        if isinstance(entry, Skip):
            if entry.left_plain:
                yield entry, _LEFT
        elif entry.site == entry.ring and entry.num_chunks > 1:
            yield entry, tuple(w for w in _WAYS[entry.kind] if w != str(entry.variant))


def exposed_s(entry: Decision | Skip, trial: Trial) -> float:
    """Sum the seconds that kernels wait for a ring; or, without a ring, at its source line."""
    name = f".{entry.site}"
    hops = [w.exposed_s for w in trial.waited if w.ring.endswith(name)]
    own = [w.exposed_s for w in trial.waited if not w.ring and w.source == entry.source]
    return sum(hops) if hops else sum(own)
