"""The values to keep are the best ones: as found by trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxoverlap.passes.keep.choose import chosen
from jaxoverlap.passes.keep.price import Priced


def drawn(seed: int) -> tuple[list[Priced], dict, int, float]:
    """Draw a computation of 24 instructions of which 7 may be kept, in 5 decisions; and room."""
    rng = random.Random(seed)
    needs = [tuple(rng.sample(range(at), min(at, rng.randint(0, 3)))) for at in range(24)]
    places = [(0, at, 0) for at in rng.sample(range(20), 7)]
    one = Priced(
        needs=tuple(needs),
        seconds=tuple(rng.choice([0.0, rng.random()]) for _ in needs),
        ends=(23, 22),
        values={place: place[1] for place in places},
        bytes={place: rng.randint(1, 9) for place in places},
        keeping_s={place: rng.random() / 10 for place in places},
    )
    groups = {place: n % 5 for n, place in enumerate(places)}
    return [one], groups, 5, rng.uniform(0, sum(one.bytes.values()))


def cost(one: Priced, groups: dict, kept: set[int]) -> tuple[float, float]:
    """Return the seconds and the bytes of a choice, by walking from the ends."""
    places = [place for place in one.values if groups[place] in kept]
    given = {one.values[place] for place in places}
    runs, stack = set[int](), [*one.ends]
    while stack:
        at = stack.pop()
        if at not in runs:
            runs.add(at)
            stack += [read for read in one.needs[at] if read not in given]
    seconds = sum(one.seconds[at] for at in runs) + sum(one.keeping_s[p] for p in places)
    return seconds, sum(one.bytes[place] for place in places)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_else_that_fits_saves_more(seed):
    (one,), groups, count, room = drawn(seed)
    kept = chosen([one], groups, room)
    every = [{*some} for n in range(count + 1) for some in itertools.combinations(range(count), n)]
    costs = [cost(one, groups, some) for some in every]
    best_s = min(seconds for seconds, size in costs if size <= room)
    seconds, size = cost(one, groups, {*kept})
    assert seconds == pytest.approx(best_s) and size <= room


@pytest.mark.parametrize("seed", range(5))
def test_what_the_user_has_decided_stays(seed):
    (one,), groups, _, _ = drawn(seed)
    kept = chosen([one], groups, 1e9, always=[0], never=[1])
    assert 0 in kept and 1 not in kept
    assert chosen([one], groups, 0.0, always=[0]) == {0}, "however little room there is"
