"""The values to keep are the best ones: as found by trying all of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

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
        offloading_s={place: rng.random() / 10 for place in places},
        ahead_bytes={place: rng.randint(1, 2) for place in places},
        copy_s={place: rng.random() for place in places},
        hiding_s=rng.uniform(0, 2),
    )
    groups = {place: n % 5 for n, place in enumerate(places)}
    return [one], groups, 5, rng.uniform(0, sum(one.bytes.values()))


def cost(one: Priced, groups: dict, kept: set[int], moved: set[int]) -> tuple[float, float]:
    """Return the seconds and the bytes of a choice, by walking from the ends."""
    places = [place for place in one.values if groups[place] in kept | moved]
    there = [place for place in places if groups[place] in moved]
    given = {one.values[place] for place in places}
    runs, stack = set[int](), [*one.ends]
    while stack:
        at = stack.pop()
        if at not in runs:
            runs.add(at)
            stack += [read for read in one.needs[at] if read not in given]
    seconds = sum(one.seconds[at] for at in runs) + sum(
        (one.offloading_s if p in there else one.keeping_s)[p] for p in places
    )
    seconds += max(sum(one.copy_s[p] for p in there) - one.hiding_s, 0.0)
    size = sum((one.ahead_bytes if p in there else one.bytes)[p] for p in places)
    return seconds, size


@pytest.mark.parametrize("offloadable", [(), (0, 1, 3)])
@pytest.mark.parametrize("seed", range(20))
def test_nothing_else_that_fits_saves_more(seed, offloadable):
    (one,), groups, count, room = drawn(seed)
    found = chosen([one], groups, room, offloadable=offloadable)
    ways = [("recompute", "keep", *(["offload"] if n in offloadable else [])) for n in range(count)]
    best_s = float("inf")
    for every in itertools.product(*ways):
        kept, moved = ({n for n, w in enumerate(every) if w == way} for way in ("keep", "offload"))
        seconds, size = cost(one, groups, kept, moved)
        best_s = min(best_s, seconds if size <= room else best_s)
    seconds, size = cost(one, groups, {*found.kept}, {*found.offloaded})
    assert not found.kept & found.offloaded and found.offloaded <= {*offloadable}
    assert seconds == pytest.approx(best_s) and size <= room


def test_copies_that_hide_are_free_and_others_are_not():
    """Two values of 4 s each, which do not fit: the link carries one of them, or both."""
    places = [(0, 0, 0), (0, 1, 0)]
    one = Priced(
        needs=((), (), (0, 1)),
        seconds=(4.0, 4.0, 1.0),
        ends=(2,),
        values={place: place[1] for place in places},
        bytes=dict.fromkeys(places, 10),
        keeping_s=dict.fromkeys(places, 0.0),
        offloading_s=dict.fromkeys(places, 0.1),
        ahead_bytes=dict.fromkeys(places, 2),
        copy_s=dict.fromkeys(places, 5.0),
        hiding_s=5.0,
    )
    groups = {place: n for n, place in enumerate(places)}
    found = chosen([one], groups, 4.0, offloadable=(0, 1))
    assert len(found.offloaded) == 1 and not found.kept
    assert chosen([replace(one, hiding_s=10.0)], groups, 4.0, offloadable=(0, 1)).offloaded == {
        0,
        1,
    }
    assert chosen([one], groups, 12.0, offloadable=(0, 1)).kept, "one fits on the device"


@pytest.mark.parametrize("seed", range(5))
def test_what_the_user_has_decided_stays(seed):
    (one,), groups, _, _ = drawn(seed)
    found = chosen([one], groups, 1e9, always=[0], never=[1], offloadable=(0, 1))
    assert 0 in found.kept and 1 not in found.kept | found.offloaded
    assert chosen([one], groups, 0.0, always=[0]).kept == {0}, "however little room there is"
