"""Tables are scaled by a profile's ratios, each class by its own."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from jaxoverlap.calibrate import from_profile
from jaxoverlap.cost.collective_tables import Skew
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.model import CostModel
from jaxoverlap.profiling.compare import COPIES, NETWORK, KindRatio
from jaxoverlap.profiling.profile import Profile, read
from tests.profiling import synthetic

POD = "h100-sxm:1x2"
PAIR, BYTES = Group(2), 1 << 24
ATTENTION = dict(queries=2048, keys=2048, heads=64, head_size=128)


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Profile:
    path = tmp_path_factory.mktemp("profile") / "a.xplane.pb"
    return read(synthetic.write(path, synthetic.two_gpus(), synthetic.MODULES))


def with_ratios(profile: Profile, ratios: dict[str, float]) -> Profile:
    """The profile, had it these ratios, all of as many predicted seconds."""
    rows = (KindRatio(kind, 1, ratio, 1.0) for kind, ratio in ratios.items())
    return replace(profile, ratios=tuple(rows))


def seconds(cost: CostModel) -> dict[str, float]:
    return {
        "matmul": cost.matmul_s(4096, 4096, 4096),
        "matmul of fp8": cost.matmul_s(512, 4096, 4096, dtype="f8e4m3fn"),
        "attention": cost.attention_s(**ATTENTION),
        "memory": cost.memory_s(1 << 26),
        "all-gather": cost.collective_s("all-gather", BYTES, PAIR),
        "all-reduce": cost.collective_s("all-reduce", BYTES, PAIR),
        "collective-permute": cost.collective_s("collective-permute", BYTES, PAIR),
    }


def times(cost: CostModel, ratios: dict[str, float], profile: Profile) -> dict[str, float]:
    """Return how many times longer each takes by the corrected tables."""
    tables = from_profile.corrected(with_ratios(profile, ratios), cost)
    before, after = seconds(cost), seconds(CostModel(cost.cluster, tables))
    return {name: after[name] / before[name] for name in before}


def test_each_class_by_its_own_ratio(profile: Profile):
    ratios = {"matmul": 1.5, "memory": 1.25, "all-gather": 3.0, "collective-permute": 2.0}
    assert times(cost_model(POD), ratios, profile) == pytest.approx(
        {
            "matmul": 1.5,
            "matmul of fp8": 1.5,
            "attention": 1.0,  # of which the profile has none
            "memory": 1.25,
            "all-gather": 3.0,
            "all-reduce": 1.0,
            "collective-permute": 2.0,
        }
    )
    assert times(cost_model(POD), {"attention": 1.7}, profile)["attention"] == pytest.approx(1.7)


def test_where_tables_have_the_wait_one_ratio_corrects_all_collectives(profile: Profile):
    cost = cost_model(POD)
    skew = Skew(slice_s=1e-3, most_s={2: 4e-6}, source="made up")
    waits = CostModel(cost.cluster, msgspec.structs.replace(cost.tables, skew=skew))
    ratios = {"all-gather": 3.0, "all-reduce": 1.0}  # of as many seconds each
    found = times(waits, ratios, profile)
    kinds = ("all-gather", "all-reduce", "collective-permute")
    assert {kind: found[kind] for kind in kinds} == pytest.approx(dict.fromkeys(kinds, 2.0))
    tables = from_profile.corrected(with_ratios(profile, ratios), waits)
    assert tables.skew and tables.skew.most_s == {2: pytest.approx(8e-6)}


def test_what_no_table_has_is_not_applied(profile: Profile):
    ratios = {"all-gather" + NETWORK: 5.0, "collective-permute" + COPIES: 5.0}
    with pytest.raises(ValueError, match="shows no kernel that was predicted"):
        from_profile.corrected(with_ratios(profile, ratios), cost_model(POD))
    tables = from_profile.corrected(with_ratios(profile, {**ratios, "matmul": 2}), cost_model(POD))
    assert tables.profiled == (POD, {"matmul": 2})
