"""Propose candidates for a tuning: full plans first, then plans with one ring's variant changed.

A candidate is a plan, what the rules make of some `Options`, or the step as it is. The seeds are
plans for all rings: as Lagom's search on the model splits them, none at all, those that the rules
leave out too, scanned weights in rings. The best are tried with other settings: more memory for the
scheduler pass, other limits for what XLA merges. A move changes how the pieces of one ring travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from jaxoverlap.passes.planning.matmuls import variant_of
from jaxoverlap.plan.edits import GatherAhead, MakeRing, ReadGathered, ShareViews
from jaxoverlap.plan.evaluation import Times
from jaxoverlap.plan.limits import WORTH_MOVING
from jaxoverlap.plan.plan import Decision, Plan, Skip, Variant
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.stages import SPLIT
from jaxoverlap.step.options import Options
from jaxoverlap.tuning.lagom.granularity import GranularityModel

PLAIN = "plain"  # the step as it is, by XLA's defaults
RULES = "rules"  # what overlap() does unasked
_SLACK = 0.05
_PLANS = 3  # of the model's best, that are tried
_CUTS = ((2, 1), (2, 2), (2, 4), (4, 1))  # parts of the rows, and steps of a scan in one body
# XLA's own thresholds merge small collectives: fewer launches, and fewer that hide.
_MERGES = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
_MOST_MERGED = 1 << 30  # as MaxText's scripts have them
# In this order they are tried: from what changes the schedule least.
_VARIANTS = {
    "all_gather_matmul": ("two_way", "one_way", "one_way x 2", "sliced x 2", "plain"),
    "matmul_reduce_scatter": ("direct", "one_way", "two_way", "sliced x 2", "plain"),
    "matmul_all_reduce": ("direct", "one_way", "two_way", "plain"),
    "all_to_all_matmul": ("direct", "direct x 2", "sliced x 2", "plain"),
}
_IN_SLICES = ("sliced x 2", "sliced x 4")
_LEFT = ("one_way", *_IN_SLICES)  # of what the rules leave alone


Decide = Callable[[str, Options], Candidate]
"""Decides on a step by options: a candidate of this name, with its plan and estimated seconds."""


def seeds(
    base: Options,
    rules: Plan,
    decide: Decide,
    times: Times | None = None,
    model: GranularityModel | None = None,
) -> Iterator[Candidate]:
    """Yield the candidates to try first, after the plain step and the rules' plan.

    Args:
        base: the options of the rules.
        rules: the plan that they gave.
        decide: decides by other options.
        times: the times of that plan. Where next to nothing waits for the collectives that the
            rules do not decompose, candidates that decompose them come last.
        model: knows all rings that there could be, and how best to split them.
    """
    model = model or GranularityModel()
    not_ringed = [s for s in rules.skips if s.left_plain]
    others = _others(rules, [s.site for s in not_ringed], model.rings)
    waits = (
        times is None or sum(exposed_s(s, times) for s in not_ringed) > WORTH_MOVING * times.step_s
    )
    if waits:
        yield from others
    if (every := model.every) is not None:
        for number, granularity in enumerate(model.plans(_PLANS), 1):
            yield Candidate.planned(f"lagom {number}", with_variants(every, granularity))
    if none := dict.fromkeys((ring.site for ring in rules.rings), Variant("plain")):
        yield Candidate.planned("no rings", with_variants(rules, none))
    ahead = any(isinstance(edit, GatherAhead) for edit in rules.edits)
    if ahead and not rules.split:
        yield decide("fsdp in rings", replace(base, fsdp="ring"))
    if not waits:
        yield from others


def settings(candidate: Candidate) -> list[Candidate]:
    """Vary the settings that hold for all rings: memory for the scheduler pass, XLA's options."""
    plan, variations = candidate.plan, []
    assert plan is not None
    if plan.schedule:
        roomy = structs.replace(plan.schedule, slack=_SLACK)
        variations.append((f"slack {_SLACK}", structs.replace(plan, schedule=roomy)))
    unmerged = {k: v for k, v in plan.xla_options.items() if k not in _MERGES}
    if unmerged != plan.xla_options:
        variations.append(("XLA merges", structs.replace(plan, xla_options=unmerged)))
        most = dict.fromkeys(_MERGES, str(_MOST_MERGED))
        variations.append(("merges to 1 GiB", structs.replace(plan, xla_options=unmerged | most)))
    return [Candidate.planned(f"{candidate.stage}, {name}", new) for name, new in variations]


def _others(
    rules: Plan, not_ringed: Sequence[int], rings: Mapping[int, MakeRing]
) -> Iterator[Candidate]:
    """Yield candidates with rings or slices for the matmuls that the rules do not decompose."""
    if not rings.keys().isdisjoint(not_ringed):
        for name, variant in (("all rings", "one_way"), *((f"others {w}", w) for w in _IN_SLICES)):
            every = dict.fromkeys(not_ringed, Variant.parse(variant))
            yield Candidate.planned(name, with_variants(rules, every, rings))


def ways(base: Options, decide: Decide) -> list[Candidate]:
    """List candidates in which all rings have one variant, for use without a cost model."""
    names = ("two_way", "one_way x 2", "direct", "sliced x 2")
    return [decide(name, replace(base, granularity=Variant.parse(name))) for name in names]


def moves(
    plan: Plan,
    times: Times,
    tried: Collection[tuple[int, str]],
    model: GranularityModel,
) -> list[Candidate]:
    """List the next moves: for each ring the next way not tried, the smallest H first.

    H is Lagom's: the computation that a move adds for each second that no longer waits. Rings that
    the model does not have come last; of equal ones the ring that waits longest comes first.

    Args:
        plan, times: those of the best candidate so far.
        tried: matmul ids and variants that need no second try.
        model: prices what cutting a ring costs.
    """
    ranked: list[tuple[float, float, Candidate]] = []
    for entry, variants in _movable(plan, model.rings):
        waited = exposed_s(entry, times)
        variant = next((w for w in variants if (entry.site, w) not in tried), None)
        if variant is not None and waited > WORTH_MOVING * times.step_s:
            now = entry.variant if isinstance(entry, Decision) else Variant("plain")
            to = Variant.parse(variant)
            lost = model.lost_per_second(entry.site, now, to, waited)
            name = f"{entry.source} ({entry.site}) {variant}"
            changes = {entry.site: to}
            moved = with_variants(plan, changes, model.rings)
            ranked.append((lost, -waited, Candidate.planned(name, moved, changes=changes)))
    return [candidate for _, _, candidate in sorted(ranked, key=lambda one: one[:2])]


def with_batch_split_of(base: Options, plan: Plan) -> Options:
    """Return options with a plan's batch split: matmul ids count the matmuls of all parts."""
    split = plan.split
    return replace(base, halves=split and split.parts, unroll=split.unroll if split else 1)


def rows(base: Options, rules: Plan, decide: Decide) -> Iterator[Candidate]:
    """Yield candidates with another batch split than the plan of the rules.

    Args:
        base: the options of the rules, with the batch split of their plan.
        rules: the plan; its search has estimated a batch split if the batch can be split.
        decide: decides by other options.
    """
    splits = (one for one in rules.trail if one.stage == SPLIT)
    if all(one.evaluation.step_s is None for one in splits):
        return
    if rules.split:
        yield decide("no batch split", replace(base, halves=None, unroll=1))
    for parts, unroll in _CUTS:
        if (parts, unroll) != (base.halves, base.unroll):
            name = f"{parts} parts" + (f", unrolled {unroll} times" if unroll > 1 else "")
            yield decide(name, replace(base, halves=parts, unroll=unroll, rings=False))


def with_variants(
    plan: Plan, variants: Mapping[int, Variant], rings: Mapping[int, MakeRing] | None = None
) -> Plan:
    """Return a plan with the variants of some rings changed, or with those rings removed.

    Args:
        plan: the plan.
        variants: the variant of each ring to change, by the id of its first matmul; "plain" does
            not decompose it.
        rings: the rings that there could be, for those that the plan has not.
    """
    gone = {site for site, variant in variants.items() if variant.style == "plain"}
    rings_kept, taken = list[MakeRing | ReadGathered](), set[int]()
    for edit in plan.rings:
        if edit.site not in gone:
            rings_kept.append(_with_variant(edit, variants.get(edit.site, edit.variant)))
            taken.update(matmul.site for matmul in edit.matmuls)
    for site, variant in variants.items():
        new = (rings or {}).get(site)
        if new and site not in gone and taken.isdisjoint(matmul.site for matmul in new.matmuls):
            rings_kept.append(_with_variant(new, variant))
            taken.update(matmul.site for matmul in new.matmuls)
    sites = {edit.site for edit in rings_kept if isinstance(edit, MakeRing)}
    for edit in plan.edits:
        if isinstance(edit, ReadGathered) and edit.matmul.site not in taken:
            still = tuple(site for site in edit.rings if site in sites)
            if still or edit.matmul.moves:
                rings_kept.append(structs.replace(edit, rings=still))
    others = [e for e in plan.edits if not isinstance(e, MakeRing | ReadGathered | ShareViews)]
    ahead = [e for e in others if isinstance(e, GatherAhead)]
    before = [e for e in others if not isinstance(e, GatherAhead)]
    return structs.replace(plan, plain=False, edits=(*before, *rings_kept, *ahead, ShareViews()))


def _with_variant(ring: MakeRing, variant: Variant) -> MakeRing:
    fits, _ = variant_of(ring.kind, variant.slices, variant)
    return structs.replace(ring, variant=fits)


def _movable(
    plan: Plan, rings: Mapping[int, MakeRing]
) -> Iterator[tuple[Decision | Skip, tuple[str, ...]]]:
    """Yield the matmuls that rings are named after, each with the variants it could change to."""
    for entry in plan.entries:
        if isinstance(entry, Skip):
            if entry.left_plain and entry.site in rings:
                yield entry, _LEFT
        elif entry.site == entry.ring and entry.num_chunks > 1:
            yield entry, tuple(w for w in _VARIANTS[entry.kind] if w != str(entry.variant))


def exposed_s(entry: Decision | Skip, times: Times) -> float:
    """Sum the seconds that kernels wait for a ring; or, without a ring, at its source line."""
    name = f".{entry.site}"
    hops = [w.exposed_s for w in times.waited if w.ring.endswith(name)]
    at_line = [w.exposed_s for w in times.waited if not w.ring and w.source == entry.source]
    return sum(hops) if hops else sum(at_line)
