"""Flags that do not go together are refused before anything is compiled."""

from pathlib import Path

import pytest

from models import configured, gpt, long_context
from models.config import Mistake


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    (
        (gpt.Config, dict(compress="qsgd:4", plan=Path("plan.json")), "--plan"),
        (gpt.Config, dict(local_updates="co2", halves=2), "--halves"),
        (long_context.Config, dict(varlen=True, compress="none"), "leave out one"),
        (long_context.Config, dict(varlen=True, longest=0), "1 token or more"),
    ),
)
def test_flags_that_would_be_ignored_are_refused(config, flags, words):
    with pytest.raises(Mistake, match=words):
        config(**flags)


def test_a_configured_mesh_has_no_workers():
    run = gpt.Config(compress="qsgd:4", configuration=Path("configured.json"))
    with pytest.raises(Mistake, match="no axis of workers"):
        configured.chosen(gpt.RECIPE, run)
