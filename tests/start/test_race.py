"""The race of programs: the fastest is found, in few steps, whatever the noise."""

from __future__ import annotations

import random
import statistics

import pytest

from jaxoverlap.start.race import Race


def run(
    race: Race, medians: dict[int, float], rng: random.Random, noise: float = 0.0, lag: int = 0
) -> int:
    """Run a race to its end; return how many steps were taken. Seconds come `lag` steps late."""
    under_way, steps = list[int](), 0
    while race.winner is None:
        program = race.next()
        if program is not None:
            steps += 1
            under_way.append(program)
        if len(under_way) > lag or program is None:
            ended = under_way.pop(0)
            late = rng.random() < 0.05  # as by a garbage collection
            race.put(ended, medians[ended] * (1 + rng.gauss(0, noise)) * (3 if late else 1))
    return steps


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("lag", [0, 8])
def test_the_fastest_is_kept(seed, lag):
    rng = random.Random(seed)
    programs = range(rng.randrange(2, 6))
    fastest = rng.choice(programs)
    medians = {p: 1.0 if p == fastest else rng.uniform(1.05, 1.5) for p in programs}
    race = Race(programs, 60)
    steps = run(race, medians, rng, noise=0.005, lag=lag)
    assert race.winner == fastest
    assert steps <= 60


def test_it_ends_soon_where_the_order_is_clear():
    race = Race([0, 1, 2], 60)
    assert run(race, {0: 1.0, 1: 1.3, 2: 0.8}, random.Random(0), noise=0.001) <= 12
    assert race.winner == 2


def test_it_ends_where_all_are_equal():
    race = Race(range(4), 60)
    assert run(race, dict.fromkeys(range(4), 1.0), random.Random(1), noise=0.1) <= 60
    assert race.winner in range(4)


def test_what_is_kept_is_close_to_the_best_in_noise():
    """A tenth of noise: over many races little is lost."""
    lost = []
    for seed in range(100):
        rng = random.Random(seed)
        medians = {p: rng.uniform(1, 1.2) for p in range(4)}
        race = Race(range(4), 60)
        run(race, medians, rng, noise=0.1)
        assert race.winner is not None
        lost.append(medians[race.winner] / min(medians.values()) - 1)
    assert statistics.mean(lost) < 0.03


def test_the_first_step_of_each_is_not_counted():
    race, slow = Race([0, 1], 60), {0: [1.0] * 30, 1: [9.0, *[0.5] * 30]}
    while race.winner is None:
        program = race.next()
        assert program is not None
        race.put(program, slow[program].pop(0))
    assert race.winner == 1 and 9.0 not in race.seconds[1]


def test_a_program_alone_has_no_trials():
    race = Race([0], 60)
    assert race.winner == 0 and race.next() is None


def test_programs_that_would_have_too_few_steps_are_left_out():
    race = Race(range(5), 6)
    assert {race.next() for _ in range(6)} == {0, 1}


def test_one_that_is_dropped_never_wins_and_a_failed_step_counts_as_taken():
    race = Race([0, 1, 2], 9)
    assert race.next() == 0
    race.put(0, 1.0)
    assert race.next() == 1
    race.skip()
    race.drop(1)
    while (program := race.next()) is not None:
        assert program != 1
        race.put(program, {0: 1.0, 2: 1.005}[program] + random.Random(0).random() * 1e-3)
    assert race.winner in (0, 2)
