"""Kernels that children hand on: files alone, no compiler."""

from __future__ import annotations

from pathlib import Path

from jaxoverlap._kernels import Kernels


def child(kernels: Kernels, adds: str, beside: str = "") -> str:
    """What a child finds; another ends while it runs, if any."""
    with kernels.lent() as file:
        found = file.read_text() if file.exists() else ""
        if beside:
            child(kernels, beside)
        if adds:
            file.write_text(found + adds)
    assert not file.exists()
    return found


def test_each_child_has_the_kernels_of_those_before_it(tmp_path: Path):
    kernels = Kernels(tmp_path / "new")
    assert [child(kernels, adds) for adds in ("a", "b", "")] == ["", "a", "ab"]
    assert child(kernels, "") == "ab", "a child that makes none takes none away"


def test_of_two_at_a_time_the_larger_file_is_kept(tmp_path: Path):
    kernels = Kernels(tmp_path)
    assert child(kernels, "a", beside="long") == ""
    assert child(kernels, "") == "long"
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
