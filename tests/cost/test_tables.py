"""The package's table files are whole and sane, and others are refused by name."""

import json
import math

import msgspec
import pytest

from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.collective_tables import Collectives, Skew
from jaxoverlap.cost.interpolation import Curve, FitError
from jaxoverlap.hardware.cluster import chips

TABLES = {chip.name: measured.packaged(chip.name) for chip in chips()}
NAMES = sorted({tables.chip for tables in TABLES.values() if tables})


def _tables(name):
    tables = TABLES[name]
    assert tables is not None
    return tables


def test_every_chip_has_tables():
    assert all(TABLES.values())
    assert _tables("a100-sxm-40") == _tables("a100-sxm-80")
    assert measured.packaged("no-such-chip") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_whole_and_sane(name):
    tables = _tables(name)
    chip = next(c for c in chips() if c.name == name)
    bf16 = tables.matmuls["bf16"]
    assert len(bf16.log_factor) == len(bf16.m) * len(bf16.n) * len(bf16.k)
    assert 0.6 < bf16.flops_per_s / chip.bf16_flops_per_s < 1
    assert 0.6 < tables.memory.bytes_per_s / chip.memory_bandwidth_bytes_per_s < 1
    assert 1e-6 < bf16.launch_s < 5e-6
    for kind, curves in tables.collectives.curves.items():
        for size, curve in curves.items():
            assert list(curve.bytes_moved) == sorted(set(curve.bytes_moved)), (kind, size)
            assert len(curve.seconds) == len(curve.bytes_moved), (kind, size)
            assert 2e-6 < curve.floor_s < 2e-4, (kind, size)
            assert curve.bytes_per_s < 1.5 * chip.nvlink.bandwidth_bytes_per_s, (kind, size)
    assert "aiconfigurator-core" in tables.collectives.source and tables.date


@pytest.mark.parametrize("name", NAMES)
def test_the_fits_are_as_good_as_the_documents_say(name):
    tables = _tables(name)
    assert all(table.error.mean <= 0.08 for table in tables.matmuls.values())
    assert tables.attention and tables.attention.error.mean <= 0.08
    assert tables.collectives.error.mean <= 0.10
    assert tables.collectives.error_new_sizes.mean <= 0.10
    assert tables.matmuls["bf16"].error.rows > 7000


def test_a_matmul_at_a_knot_is_the_base_times_the_factor():
    table = _tables("h100-sxm").matmuls["bf16"]
    m, n, k = table.m[4], table.n[3], table.k[3]
    index = (4 * len(table.n) + 3) * len(table.k) + 3
    base = (
        table.launch_s
        + 2 * m * n * k / table.flops_per_s
        + 2 * (m * k + k * n + m * n) / table.bytes_per_s
    )
    assert table.seconds(m, n, k) == pytest.approx(base * math.exp(table.log_factor[index]))


def test_a_batch_is_looked_up_as_more_rows():
    table = _tables("h100-sxm").matmuls["bf16"]
    assert table.bytes_touched(8, 4, 2, batch=3) == 3 * 2 * (16 + 8 + 32)
    assert table.seconds(512, 2048, 2048, batch=8) > table.seconds(4096, 2048, 2048)


def test_a_curve_meets_its_points_and_runs_on_at_its_last_rate():
    curve = Curve((1e3, 1e6), (1e-5, 1e-4))
    last_s = 1e-4 + (1e9 - 1e6) / (1e6 - 1e3) * 9e-5  # the last interval's rate
    assert [curve.at(b) for b in (0, 1e3, 1e6, 1e9)] == pytest.approx([1e-5, 1e-5, 1e-4, last_s])
    assert curve.at(math.sqrt(1e9)) == pytest.approx(math.sqrt(1e-9))


def test_groups_past_the_largest_pay_for_more_steps():
    curves = {
        2: Curve((1.0, 2.0), (1e-6, 1e-6)),
        4: Curve((1.0, 2.0), (3e-6, 3e-6)),
    }
    error = FitError(0, 0, 0, 0)
    table = Collectives({"all-gather": curves}, "", error, error)
    assert table.seconds("all-gather", 1, 8) == pytest.approx(3e-6 + 4 * 1e-6)


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode(_tables("b200")))
    assert measured.read(path) == _tables("b200")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"chip": 3}')
    with pytest.raises(ValueError, match=r"table\.json is no table.*chip"):
        measured.read(path)
    old = json.loads(msgspec.json.encode(_tables("b200")))
    path.write_text(json.dumps(old | {"format": 0}))
    with pytest.raises(ValueError, match="format 0"):
        measured.read(path)


def test_collectives_wait_longer_after_more_compute():
    skew = Skew(1e-3, {2: 2e-4, 8: 5e-4}, "")
    assert skew.seconds(0.0, 2) == 0
    assert skew.seconds(1e-6, 2) == pytest.approx(2e-7, rel=1e-3)
    assert skew.seconds(1.0, 2) == pytest.approx(2e-4)
    assert skew.seconds(1.0, 4) == skew.seconds(1.0, 8) == skew.seconds(1.0, 16) == 5e-4
