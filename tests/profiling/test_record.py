"""`jaxoverlap.profile` runs a step under JAX's profiler on the devices that are here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxoverlap
from tests.profiling import synthetic

pytestmark = pytest.mark.anew


def test_a_step_is_run_and_read():
    step, args = synthetic.sharded_step()
    profile = jaxoverlap.profile(step, *args, steps=3)
    assert (profile.platform, len(profile.devices)) == ("CPU", 8)
    assert len(profile.steps_s) + profile.incomplete == 3
    audit = jaxoverlap.audit(step.lower(*args).compile())
    assert {r.collective.name for r in profile.collectives} == {c.name for c in audit.collectives}
    assert profile.sums.step_s > 0 and profile.sums.communication_s > 0
    parts = profile.sums.compute_s + profile.sums.exposed_s + profile.sums.idle_s
    assert parts == pytest.approx(profile.sums.step_s)


def test_every_hop_of_a_ring_is_found():
    step, args = synthetic.sharded_step()
    overlapped = jaxoverlap.overlap(step)
    profile = jaxoverlap.profile(overlapped, *args, steps=2)
    hops = [c for c in overlapped.lower(*args).compile().audit().collectives if c.ring]
    assert hops
    found = [run.collective for run in profile.collectives if run.collective.ring]
    assert sorted(c.name for c in found) == sorted(c.name for c in hops)
    assert {row.ring for row in profile.rows if row.ring} == {c.ring for c in hops}


def test_a_loops_collectives_run_as_often_as_scheduled():
    step, args = synthetic.scanned_step()
    profile = jaxoverlap.profile(step, *args, steps=2)
    audit = jaxoverlap.audit(step.lower(*args).compile())
    assert max(c.runs for c in audit.collectives) == synthetic.LAYERS
    found = Counter(run.collective.name for run in profile.collectives)
    assert found == {c.name: c.runs for c in audit.collectives}
    # The loop's own event wraps those of its body: it would hide all of them.
    assert profile.sums.hidden < 0.9


def test_donated_arrays_live():
    step, args = synthetic.sharded_step()
    donating = jax.jit(step, donate_argnums=(0, 1))
    jaxoverlap.profile(donating, *args, steps=2)
    jaxoverlap.profile(donating.lower(*args).compile(), *args, steps=1)
    assert all(np.asarray(array).sum() > 0 for array in args)


def test_the_files_are_kept_in_a_folder(tmp_path: Path):
    step, args = synthetic.sharded_step()
    kept = tmp_path / "kept"
    profile = jaxoverlap.profile(step, *args, steps=1, folder=kept)
    again = jaxoverlap.profile(kept)
    assert again.sums == profile.sums
    with pytest.raises(ValueError, match="has files in it"):
        jaxoverlap.profile(step, *args, folder=kept)


def test_what_cannot_be_profiled():
    step, args = synthetic.sharded_step()
    with pytest.raises(ValueError, match="steps=0: expected a whole number, 1 or more"):
        jaxoverlap.profile(step, *args, steps=0)
    with pytest.raises(ValueError, match="give arguments, steps and folder with a step"):
        jaxoverlap.profile("folder", *args)
    with pytest.raises(ValueError, match="give arguments, steps and folder with a step"):
        jaxoverlap.profile("folder", steps=5)
    with pytest.raises(ValueError, match="has no event of a device"):
        jaxoverlap.profile(lambda: None, steps=1)
