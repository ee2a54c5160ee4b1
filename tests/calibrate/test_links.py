"""Links alone are measured; what they are, and what they take from compute, is priced."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import audit, parse_cluster
from jaxoverlap.calibrate import calibrate, links
from jaxoverlap.calibrate.links import BETWEEN, MATMUL, WITHIN, Sizes
from jaxoverlap.cost import find
from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.groups import Group
from jaxoverlap.hardware.pods import compiler_options, devices
from jaxoverlap.plan.collectives import PERMUTE
from tests.support.pods import needs_plugin

SMALL = Sizes((64, 256, 1024, 4096), (64, 64), 1 << 12, ("f32",), rounds=2, target_s=1e-4)
USUAL_MATMUL = dataclasses.replace(SMALL, matmul=(4096, 4096))
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", PERMUTE)


def _base() -> measured.ChipTables:
    return find.cost_model("h100-sxm:1x8").tables


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch):
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: devices)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_what_is_measured_is_what_a_file_of_prices_says(four, hosts: int, tmp_path):
    said = list[str]()
    made = links.tables_with_links(_base(), "2026-11-28", said.append, hosts=hosts, sizes=SMALL)
    assert len(said) == links.measurements(SMALL, hosts)
    path = tmp_path / "prices.json"
    calibrate.write(made, path)
    model = find.cost_model(table=path)
    cluster = model.cluster
    assert (cluster.num_hosts, cluster.gpus_per_host) == (hosts, 4 // hosts)
    for kind in KINDS:
        size = 2 if kind == PERMUTE else 4
        for moved in (0, 5000, 1 << 24):
            assert 0 < model.collective_s(kind, moved, Group(size, min(size, hosts))) < 60
        assert model.share(kind, 4096, Group(size, min(size, hosts))).memory_bytes_per_s == 0
    assert (made.between is None) == (hosts == 1)


def _as_f32(base: measured.ChipTables) -> measured.MatmulTable:
    return measured.replace(base.matmuls["bf16"], element_bytes=4.0, result_bytes=4.0)


def _alone(seconds: float, where: str) -> dict[links.Key, float]:
    groups = {WITHIN: (2, 4), BETWEEN: (2, 4)}[where]
    found: dict[links.Key, float] = {}
    for kind in KINDS:
        for group in groups[-1:] if kind == PERMUTE else groups:
            found |= {(kind, where, group, n): seconds * n for n in SMALL.elements}
    return found


def test_links_of_two_kinds_are_priced_apart_and_kernels_by_one_factor(four):
    """Seconds made up: the network is ten times as slow, and a collective takes a quarter."""
    base = _base()
    alone = _alone(1e-6, WITHIN) | _alone(1e-5, BETWEEN)
    alone |= {(MATMUL, "f32"): 3 * _as_f32(base).seconds(*USUAL_MATMUL.dims)}
    moved = 8.0 * SMALL.memory_elements
    alone |= {("memory",): 2 * (base.memory.launch_s + moved / base.memory.bytes_per_s)}
    both = {}
    for kind in KINDS:
        for where in (WITHIN, BETWEEN):
            collective_s = alone[kind, where, 4, SMALL.elements[-2]]
            both["alone", kind, where] = 2 * collective_s
            share = 0.25 if where == WITHIN else 0.0
            both["together", kind, where] = (2 + share) * collective_s
    made = links._tables(base, base, "2026-11-28", 2, USUAL_MATMUL, alone, both)
    assert made.here
    model = find.CostModel(find.cluster_here(made, made.here), made)
    sent = 4 * 1024
    for kind in KINDS:
        size = 2 if kind == PERMUTE else 4
        near, far = (model.collective_s(kind, sent, Group(size, n)) for n in (1, 2))
        assert far == pytest.approx(10 * near)
        assert model.share(kind, sent, Group(size)).sms == 0.25 * model.cluster.chip.num_sms
        assert model.share(kind, sent, Group(size, 2)).sms == 0
    assert made.matmuls["f32"].seconds(*USUAL_MATMUL.dims) == pytest.approx(
        alone[MATMUL, "f32"], rel=1e-6
    )
    assert made.matmuls["fp8"].launch_s == base.matmuls["fp8"].launch_s
    slower = base.matmuls["fp8"].flops_per_s / made.matmuls["fp8"].flops_per_s
    assert slower > 3
    assert made.attention and base.attention
    assert base.attention.flops_per_s / made.attention.flops_per_s == pytest.approx(slower)
    assert model.memory_s(moved) == pytest.approx(alone["memory",])
    twice = made.scaled(dict.fromkeys(KINDS, 2.0)).between
    assert twice and made.between
    assert twice.permutes.latency_s == 2 * made.between.permutes.latency_s


def test_a_chip_that_the_package_knows_keeps_its_facts():
    base = _base()
    here = measured.Here(4, "gpu", "", measured.InAStep(), processes=4)
    cluster = find.cluster_here(measured.replace(base, here=here), here)
    assert cluster.chip.num_sms == 132 and cluster.processes_per_host == 4
    assert cluster.nvlink == cluster.chip.nvlink != find.cost_model("h100-sxm:1x4").cluster.nvlink


def test_too_few_devices_or_hosts_that_do_not_divide_them_are_refused(four):
    with pytest.raises(ValueError, match="4 devices on 3 hosts: expected"):
        links.tables_with_links(_base(), "", lambda _: None, hosts=3, sizes=SMALL)


def test_the_command_measures_links_by_the_kernels_of_its_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(links, "USUAL", SMALL)
    path = tmp_path / "here.json"
    with pytest.raises(SystemExit):
        calibrate.main(["--here", str(path), "--links"])
    assert "measure all first, without --links" in capsys.readouterr().err
    calibrate.write(_base(), path)
    calibrate.main(["--here", str(path), "--links"])
    made = measured.read(path)
    assert made.here and made.here.devices == 8 and set(made.taken_by) == set(KINDS)
    assert np.isfinite(made.collectives.error.worst)


@needs_plugin
@pytest.mark.pods
def test_xla_overlaps_what_is_timed_together_on_gpus(monkeypatch):
    """And keeps each matmul whole: of a sum of its parts it would compute only these."""
    gpus = list(devices(parse_cluster("h100-sxm:1x4/4")))
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(links, "_filled", _like)
    monkeypatch.setattr(links, "replicated", lambda mesh, n: _like(np.shape(n), np.int32, on(mesh)))
    alone = {(MATMUL, "bf16"): 1e-4}
    alone |= {(k, WITHIN, 4, links.USUAL.elements[-2]): 2e-4 for k in KINDS}
    for program in links._together_programs(links.USUAL, 1, alone):
        program.prepare()
        program.compiled = program._lowered.compile(compiler_options())
        text = program.compiled.as_text()
        assert text.count(" dot(bf16[4096,4096]") + len(re.findall(r"4096\]\S* dot\(", text)) == 8
        # XLA reduces some megabytes by a kernel of its own, which runs alone.
        assert program.is_concurrent == (program.keys[0][1] != "all-reduce"), program.keys
    for program in list(links._alone(links.USUAL, 1))[1:3]:
        program.prepare()
        compiled = program._lowered.compile(compiler_options())
        assert audit(compiled.as_text()).total.count == len(links.USUAL.elements)


def _like(shape, dtype, sharding):
    whole = (sharding.mesh.size * shape[0], *shape[1:]) if sharding.spec else shape
    return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)


def on(mesh):
    return NamedSharding(mesh, P())
