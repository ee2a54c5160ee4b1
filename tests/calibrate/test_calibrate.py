"""Fits find again what made-up rows were made of; then the command runs."""

import importlib.metadata
import itertools
import math

import jax
import msgspec
import numpy as np
import pytest

from benchmarks.chip_tables import fit as chips_fit
from benchmarks.chip_tables import sources, xla_perf_table
from benchmarks.chip_tables.fit import M_KNOTS, NK_KNOTS
from jaxoverlap.calibrate import calibrate, fit, step_factors, this_machine
from jaxoverlap.calibrate.this_machine import Grid
from jaxoverlap.cost import adjusted_tables, find, nccl
from jaxoverlap.cost import model as cost
from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.collective_tables import Permutes, Skew
from jaxoverlap.cost.interpolation import Curve
from jaxoverlap.simulation.replay import replay

RATES = fit.Rates(3e-6, 8e14, 3e12, 2.0, 2.0)


def _rows(count=3000, noise=0.0):
    random = np.random.default_rng(1)
    m, n, k = (np.exp(random.uniform(math.log(32), math.log(16384), count)) for _ in range(3))
    base = 3e-6 + 2 * m * n * k / 8e14 + 2 * (m * k + k * n + m * n) / 3e12
    return fit.MatmulRows(m, n, k, 1.3 * base * np.exp(random.normal(0, noise, count)))


def test_a_constant_factor_is_found():
    table = fit.fit_matmuls(_rows(), RATES, "made up", M_KNOTS, NK_KNOTS)
    assert table.error.worst < 0.01
    assert table.seconds(1000, 1000, 1000) == pytest.approx(
        1.3 * (3e-6 + 2e9 / 8e14 + 6e6 / 3e12), rel=0.01
    )


def test_noise_is_told_as_error():
    table = fit.fit_matmuls(_rows(noise=0.1), RATES, "made up", M_KNOTS, NK_KNOTS)
    assert 0.05 < table.error.mean < 0.12
    assert 500 < table.error.rows < 700


def test_a_fit_is_the_same_each_time():
    fits = [fit.fit_matmuls(_rows(noise=0.1), RATES, "", M_KNOTS, NK_KNOTS) for _ in range(2)]
    assert fits[0] == fits[1]


def test_permutes_are_found():
    rows = []
    for power in range(10, 31):
        moved = float(1 << power)
        rate = nccl.permute_rate(moved, nccl.permute_channels(moved, 8), 20e9)
        seconds = 10e-6 + moved / min(rate, 300e9)
        rows.append(fit.CollectiveRow("collective-permute", 8, moved, seconds))
    permutes = chips_fit.fit_permutes(rows, "made up")
    assert permutes.latency_s == pytest.approx(10e-6, rel=0.01)
    assert permutes.channel_bytes_per_s == pytest.approx(20e9, rel=0.01)
    assert permutes.bytes_per_s == pytest.approx(300e9, rel=0.01)
    assert permutes.error is not None and permutes.error.worst < 0.01


def test_held_back_rows_have_no_part_in_a_curve():
    rows = [fit.CollectiveRow("all-gather", 2, 2.0**p, 1e-6 * 2**p) for p in range(20)]
    curves = fit.fit_collectives(rows, "made up")
    assert curves.error_new_sizes.worst < 1e-3  # a straight line: interpolation has nothing to lose
    out = fit.held_back(len(rows))
    out[[0, -1]] = False
    rows = [
        fit.CollectiveRow(r.kind, r.size, r.bytes_moved, r.seconds * (3 if o else 1))
        for r, o in zip(rows, out, strict=True)
    ]
    assert fit.fit_collectives(rows, "made up").error.median == pytest.approx(2 / 3, abs=0.01)


def test_a_file_keeps_its_date_where_nothing_else_changed(tmp_path):
    path, tables = tmp_path / "t.json", measured.packaged("h100-sxm")
    assert tables is not None
    calibrate.write(msgspec.structs.replace(tables, date="2020-01-01"), path)
    calibrate.write(tables, path)
    assert measured.read(path).date == "2020-01-01"
    calibrate.write(msgspec.structs.replace(tables, channels=1), path)
    assert measured.read(path).channels == 1
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def _installed(*packages):
    distributions = {d.name for d in importlib.metadata.distributions()}
    return distributions.issuperset(packages)


@pytest.mark.skipif(
    not _installed(sources.PACKAGE, xla_perf_table.PACKAGE),
    reason="the measurements are in the extra `chip-tables`",
)
@pytest.mark.parametrize("source", sources.SOURCES, ids=lambda s: s.chip)
def test_the_packages_tables_are_what_their_measurements_make(source):
    committed = measured.packaged(source.chip)
    assert committed is not None
    assert sources.chip_tables(source, committed.date) == committed


def test_this_machine_is_measured(tmp_path, monkeypatch, capsys):
    """A short measurement is written and read back, and prices what was measured."""
    small = dict(m=(8, 16, 64), nk=(16, 32, 64), elements=(64, 256, 1024), rounds=2)
    grid = Grid(dtypes=("f32",), whole_groups=True, **small)
    monkeypatch.setattr(calibrate, "USUAL", grid)
    monkeypatch.setattr(this_machine, "_MOST_SETS", 2)
    monkeypatch.setattr(this_machine, "_RUNS_BEFORE", (1, 2))
    monkeypatch.setattr(this_machine, "_TARGET_S", 1e-4)
    steps = tuple((how, (16, 32, 1)) for how, _ in step_factors.STEPS[::2])
    monkeypatch.setattr(step_factors, "STEPS", steps)
    # Factors are given because steps as small as this may not take longer than their kernels.
    times = measured.InAStep(2.0, 3.0, 4.0)
    monkeypatch.setattr(
        step_factors, "in_a_step", lambda _, loops: adjusted_tables.in_a_step(loops, times)
    )
    path = tmp_path / "here.json"
    calibrate.main(["--here", str(path)])
    assert "f32 matmuls" in capsys.readouterr().out
    model = find.cost_model(table=path)
    devices = model.cluster.num_devices
    assert devices == model.cluster.gpus_per_nvlink_domain == 8
    assert model.matmul_s(16, 16, 16, dtype="f32") > 0
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        assert model.collective_s(kind, 4096, cost.Group(devices)) > 0
        assert model.share(kind, 4096, cost.Group(devices)) == cost.ALONE
    assert model.memory_s(4096, transcendentals=10**6) >= model.memory_s(4096) > 0
    assert model.skew_s(1.0, "collective-permute", cost.Group(2)) >= 0
    assert model.tables.here and model.tables.here.in_a_step == times
    with pytest.raises(ValueError, match="no matmuls of fp8"):
        model.matmul_s(1, 1, 1, dtype="fp8")
    with pytest.raises(ValueError, match="no attention of bf16"):
        model.attention_s(128, 128, 8, 64)


def test_attention_is_fitted_and_a_kernel_without_a_mask_only_tested():
    random = np.random.default_rng(2)
    length, heads, size = (random.choice(c, 2000) for c in ((64, 1024, 8192), (1, 64), (64, 128)))
    seconds = 5e-6 + 2.0 * heads * length**2 * size / 5e14
    rows = fit.MatmulRows(length.astype(float), heads.astype(float), size.astype(float), seconds)
    twice = fit.MatmulRows(rows.m, rows.n, rows.k, 5e-6 + 2 * (seconds - 5e-6))
    attention = chips_fit.fit_attention(rows, twice, 3e12, "made up")
    assert attention.error.mean < 0.05
    assert (
        attention.error_full
        and attention.error_full.rows == 2000
        and attention.error_full.mean < 0.15
    )
    assert attention.seconds(1024, 64, 128) == pytest.approx(
        5e-6 + 2 * 64 * 1024**2 * 128 / 5e14, rel=0.05
    )


def test_a_row_that_took_too_long_moves_a_fit_less_than_one_that_took_too_short():
    rows = _rows()
    off = []
    for times in (3.0, 1 / 3.0):
        disturbed = rows.seconds.copy()
        disturbed[::4] *= times
        made = fit.MatmulRows(rows.m, rows.n, rows.k, disturbed)
        table = fit.fit_matmuls(made, RATES, "", M_KNOTS, NK_KNOTS)
        want = 1.3 * (3e-6 + 2e9 / 8e14 + 6e6 / 3e12)
        off.append(abs(math.log(table.seconds(1000, 1000, 1000) / want)))
    assert off[0] < off[1]


def test_the_wait_for_the_last_device_is_found_under_noise():
    computed_s = np.array([3e-4, 6e-4, 12e-4, 24e-4])
    skew = Skew(8e-4, {2: 1e-4, 8: 5e-4}, "")
    waited_s = np.array([[skew.seconds(s, size) for s in computed_s] for size in (2, 8)])
    noise = np.random.default_rng(0).normal(scale=2e-5, size=waited_s.shape)
    got = fit.fit_skew(computed_s, waited_s + noise, (2, 8), "made up")
    for size, second in itertools.product((2, 8), (2e-4, 1e-3, 1e-2)):
        assert got.seconds(second, size) == pytest.approx(skew.seconds(second, size), abs=6e-5)
    assert fit.fit_skew(computed_s, -waited_s, (2, 8), "").most_s == {2: 0.0, 8: 0.0}


def _loops() -> measured.ChipTables:
    """Return tables as of loops, of nothing in particular."""
    curve = Curve((1e3, 1e7), (1e-6, 1e-3))
    permutes = Permutes(1e-4, 0.0, 1e10, "", None, curve)
    gathers = {kind: {2: curve, 8: curve} for kind in ("all-gather", "reduce-scatter")}
    h100 = measured.packaged("h100-sxm")
    assert h100 is not None
    return msgspec.structs.replace(
        h100,
        matmuls={"f32": msgspec.structs.replace(h100.matmuls["bf16"], launch_s=1e-2)},
        memory=measured.MemoryTable(1e-6, 1e10, "", curve, 1e-9),
        collectives=msgspec.structs.replace(h100.collectives, curves=gathers, graph_sizes=()),
        permutes=permutes,
        channels=0,
        skew=Skew(1e-3, {2: 1e-4, 8: 5e-4}, ""),
        here=measured.Here(8, "cpu", "", measured.InAStep()),
    )


def test_what_takes_longer_in_a_step_is_found_from_steps_that_do():
    loops, times = _loops(), measured.InAStep(3.0, 1.25, 0.75)
    longer = step_factors.cost_of(adjusted_tables.in_a_step(loops, times))
    steps = [(how, (16, 32, 2)) for how, _ in step_factors.STEPS[::2]]
    taken = {key: replay(step_factors.module(*key), longer).step_s for key in steps}
    got = step_factors.in_a_step(taken, loops).here
    assert got
    factors = got.in_a_step.memory, got.in_a_step.matmuls, got.in_a_step.collectives
    assert factors == pytest.approx((3.0, 1.25, 0.75), rel=1e-6)
    with pytest.raises(ValueError, match=r"steps of alone took less.*measure again"):
        step_factors.in_a_step({**taken, steps[1]: 1e-9}, loops)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_measured_step_runs_on_and_on(monkeypatch, count: int):
    devices = jax.devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    step_factors._compiled.cache_clear()
    clock = step_factors.clock(step_factors.RINGS, (24, 32, 1))
    assert clock() > 0 and clock() > 0
    assert step_factors.module(step_factors.RINGS, (24, 32, 1)).num_devices == count
    step_factors._compiled.cache_clear()
