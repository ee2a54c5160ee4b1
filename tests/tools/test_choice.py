"""A change runs the tests of its reach, its shard, and its windows of seeds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grimp
import pytest

from tests.support import seeds, shards
from tests.support.reach import (
    ALWAYS,
    READERS,
    EverythingError,
    Graph,
    changed_files,
    graph_of,
    lazy_names,
    named,
    reached,
    sources,
)

ROOT = Path(__file__).parents[2]
LAZY = {"tune": "jaxoverlap.tuning.tune", "Plan": "jaxoverlap.plan.plan"}
KNOWN = {
    "jaxoverlap",
    "jaxoverlap.__main__",
    "jaxoverlap.plan",
    "jaxoverlap.plan.plan",
    "jaxoverlap.tuning.tune",
    "benchmarks.lab",
    "benchmarks.lab.__main__",
    "models.gpt",
    "models.moe",
    "tests.support.build_step",
}
GRAPH = Graph(
    {
        "jaxoverlap.a": "jaxoverlap/a.py",
        "jaxoverlap.b.c": "jaxoverlap/b/c.py",
        "tests.conftest": "tests/conftest.py",
        "tests.test_a": "tests/test_a.py",
        "tests.test_c": "tests/test_c.py",
        "tests.docs.test_words": "tests/docs/test_words.py",
        "tests.docs.test_pages": "tests/docs/test_pages.py",
    },
    {
        "jaxoverlap.b.c": {"jaxoverlap.a"},
        "tests.test_a": {"jaxoverlap.a"},
        "tests.test_c": {"jaxoverlap.b.c"},
        "docs/x.md": {"jaxoverlap.b.c"},
        "tests.docs.test_pages": {"docs/x.md"},
    },
    ("docs/x.md",),
)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("from jaxoverlap.plan.plan import Plan", {"jaxoverlap.plan.plan"}),
        ("jaxoverlap.tune(step)", {"jaxoverlap.tuning.tune"}),
        ("from jaxoverlap import (\n    Plan,\n    tune,\n)", set(LAZY.values())),
        ("getattr(jaxoverlap, name)", set(LAZY.values())),
        ('["-m", "benchmarks.lab"]', {"benchmarks.lab", "benchmarks.lab.__main__"}),
        ('["-m", "jaxoverlap", "flags"]', {"jaxoverlap.__main__"}),
        ("    $ jaxoverlap explain step.py", {"jaxoverlap.__main__"}),
        ('import_module(f"models.{name}")', {"models.gpt", "models.moe"}),
        ('"tests/support/build_step.py:build"', {"tests.support.build_step"}),
        ('"tests.support.build_step:build"', {"tests.support.build_step"}),
        ("from models import gpt, config", {"models.gpt"}),
        ("another.models_of, jaxoverlapping", set()),
    ],
)
def test_modules_that_a_text_names(text: str, modules: set[str]):
    assert named(text, KNOWN, LAZY) - {"jaxoverlap"} == modules


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("jaxoverlap/a.py", {"tests/test_a.py", "tests/test_c.py", "tests/docs/test_pages.py"}),
        ("jaxoverlap/b/c.py", {"tests/test_c.py", "tests/docs/test_pages.py"}),
        ("jaxoverlap/b/data/rates.json", {"tests/test_c.py", "tests/docs/test_pages.py"}),
        ("tests/test_a.py", {"tests/test_a.py"}),
        ("docs/x.md", {"tests/docs/test_pages.py"}),
        ("CHANGELOG.md", set()),
    ],
)
def test_tests_that_a_change_reaches(changed: str, tests: set[str]):
    found = reached([changed], GRAPH, "main")
    assert found.files == tests | {"tests/docs/test_words.py"}  # which is always run
    assert str(found).startswith(f"{len(tests) + 1} of 4 files of tests, reached from {changed}")


@pytest.mark.parametrize("file", ["tests/conftest.py", "pyproject.toml", "Makefile", "new/file"])
def test_what_all_tests_depend_on_reaches_all(file: str):
    with pytest.raises(EverythingError):
        reached(["jaxoverlap/a.py", file], GRAPH, "main")


@pytest.fixture(scope="module")
def ours() -> Graph:
    return graph_of(ROOT, lazy_names((ROOT / "jaxoverlap" / "__init__.py").read_text()))


@pytest.mark.parametrize(
    ("changed", "other"),
    [
        ("jaxoverlap/train/compression/control.py", "tests/passes/test_registry.py"),
        ("jaxoverlap/cli/explain.py", "tests/train/test_states.py"),
        ("jaxoverlap/profiling/xplane.py", "tests/passes/test_registry.py"),
        ("jaxoverlap/parallelism/configure.py", "tests/passes/test_registry.py"),
        ("docs/start.md", "tests/cli/test_cli.py"),
    ],
)
def test_a_change_above_reaches_less_than_half_of_the_files(changed: str, other: str, ours: Graph):
    folder = changed.rpartition("/")[0]
    every = [file for file in ours.files.values() if file.startswith(f"{folder}/")]
    found = reached(every or [changed], ours, "main")
    assert found.files is not None and len(found.files) < found.total / 2
    assert other not in found.files


def test_what_the_tests_own_support_needs_reaches_all(ours: Graph):
    for file in ("tests/support/children/sitecustomize.py", "jaxoverlap/_jax/xla_schedule.py"):
        with pytest.raises(EverythingError, match="conftest"):
            reached([file], ours, "main")


def test_the_graph_has_every_import(ours: Graph):
    """The top package is left out: it imports most names when they are first used."""
    lazy = lazy_names((ROOT / "jaxoverlap" / "__init__.py").read_text())
    assert lazy["overlap"] == "jaxoverlap.api" and lazy["ring"] == "jaxoverlap.ring"
    theirs = grimp.build_graph("jaxoverlap", "models", "benchmarks", "tests", cache_dir=None)
    assert set(ours.files) >= theirs.modules
    for module in theirs.modules - {"jaxoverlap"}:
        known = theirs.find_modules_directly_imported_by(module) - {module}
        assert known <= set(ours.imports[module])
    assert set(ALWAYS) <= set(ours.files)
    assert {module for readers in READERS.values() for module in readers} <= set(ours.files)
    assert not [path for path in READERS if not (ROOT / path).exists()]
    scripts = ours.imports["jaxoverlap.flags.compiler"]
    assert "jaxoverlap._jax.xla_flags_probe" in scripts
    targets = sources("jaxoverlap/cli/targets/plain.py", ours)
    assert "jaxoverlap.cli.new_target" in ours.reached(targets)
    assert sources("tests/golden/golden.json", ours) >= {"tests.golden.test_golden"}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, file: str) -> None:
    (folder / file).write_text(file)
    git(folder, "add", ".")
    git(folder, "commit", "-m", file)


def test_changes_are_found(tmp_path: Path):
    """The files are those of a branch, not committed, outside git's index, or of HEAD."""
    first, clone = tmp_path / "first", tmp_path / "clone"
    first.mkdir()
    git(first, "init", "-b", "main")
    commit(first, "a")
    with pytest.raises(EverythingError, match="git diff fails"):
        changed_files(first)
    commit(first, "b")
    assert changed_files(first) == (["b"], "HEAD~1")
    git(first, "checkout", "-b", "branch")
    commit(first, "c")
    (first / "a").write_text("other")
    (first / "d").touch()
    assert changed_files(first)[0] == ["a", "c", "d"]
    git(tmp_path, "clone", "-b", "main", str(first), str(clone))
    with pytest.raises(EverythingError, match="nothing differs from origin/main"):
        changed_files(clone)
    commit(clone, "e")
    assert changed_files(clone)[0] == ["e"]
    (tmp_path / "archive").mkdir()
    with pytest.raises(EverythingError):
        changed_files(tmp_path / "archive")


def test_windows_of_seeds_cover_all():
    windows = [seeds.window(50, range(100, 300), turn) for turn in range(8)]
    assert windows[:2] == [range(100, 150), range(150, 200)]
    assert sorted(seed for w in windows[:4] for seed in w) == [*range(100, 300)]
    assert windows[4:] == windows[:4]
    with pytest.raises(ValueError, match="30 seeds are not windows of 20"):
        seeds.window(20, range(30), 0)


def test_the_turn_may_be_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDS", "12")
    assert seeds.turn.__wrapped__() == 12
    monkeypatch.setenv("SEEDS", "all")
    assert seeds.turn.__wrapped__() is None


def test_shards_take_equally_long_and_have_every_file_once():
    seconds = {"a": 8.0, "b": 5.0, "c": 4.0}
    first, second = shards.shares(["d", "a", "b", "c"], 2, seconds)
    assert (first, second) == (["a", "d"], ["b", "c"])
    assert shards.parsed("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(ValueError, match="--shard"):
            shards.parsed(wrong)


def test_the_table_of_seconds_names_files_that_exist():
    assert all((ROOT / file).is_file() for file in shards.known_seconds())
