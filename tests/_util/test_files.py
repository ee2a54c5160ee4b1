"""A place where no file can be written is refused before anything takes time."""

from __future__ import annotations

import pytest

from jaxoverlap._util.files import check_writable


def test_a_place_that_takes_a_file_is_left_as_it_was(tmp_path):
    (tmp_path / "there").write_text("as it was")
    check_writable(tmp_path / "new", tmp_path / "there", None)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "as it was"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no/such/file", "there is no folder"),
        (".", "is a folder: name a file"),
        ("/proc/plan.json", "cannot be written"),
    ],
)
def test_others_are_refused_in_a_sentence(path, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        check_writable(tmp_path / path)
