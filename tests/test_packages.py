"""The package is built with every folder, and every file counts in the source's hash."""

from __future__ import annotations

import ast
import itertools
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import jaxoverlap
from jaxoverlap._util.source_hash import hash_of, source_hash
from jaxoverlap.cli import app

ROOT = Path(__file__).parents[1]


def folders() -> set[str]:
    """Return the folders that hold modules, as packages; `passes` stands beside the package."""
    packages = set()
    for top in ("jaxoverlap", "passes"):
        for file in (ROOT / top).rglob("*.py"):
            name = ".".join(file.parent.relative_to(ROOT).parts)
            packages.add(name if top == "jaxoverlap" else f"jaxoverlap.{name}")
    return packages


def test_every_folder_of_modules_is_built():
    """A wheel without a folder builds all the same, and fails where it is installed."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == folders()
    assert all((ROOT / "passes" / name).is_dir() for name in ("planning", "rings"))


def test_no_two_classes_share_a_name():
    """A reader who meets a class knows which; words for kinds of things are Literals or enums."""
    found = defaultdict[str, list[str]](list)
    for top in ("jaxoverlap", "passes"):
        for file in (ROOT / top).rglob("*.py"):
            if file.parent.name == "targets":
                continue  # templates become files of users
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(file.relative_to(ROOT)))
    assert len(found) > 200
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_new_file_in_a_new_folder_changes_the_hash(tmp_path: Path):
    (tmp_path / "a.py").write_text("a = 1\n")
    before = hash_of(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "b.py").write_text("b = 1\n")
    after = hash_of(tmp_path)
    assert before != after
    (tmp_path / "new" / "b.py").rename(tmp_path / "new" / "c.py")
    assert hash_of(tmp_path) not in (before, after)


def test_the_hash_follows_the_link_to_passes(tmp_path: Path):
    other = tmp_path / "passes"
    other.mkdir()
    (other / "a.py").write_text("a = 1\n")
    package = tmp_path / "package"
    package.mkdir()
    without = hash_of(package)
    (package / "passes").symlink_to("../passes")
    assert hash_of(package) != without
    assert len(source_hash()) == 32


def test_a_checkout_without_links_says_what_to_do(tmp_path: Path):
    """Git writes the link as a text file where links are off, and the passes are not found."""
    copy = tmp_path / "jaxoverlap"
    shutil.copytree(Path(jaxoverlap.__file__).parent, copy, ignore=lambda *_: ["passes"])
    (copy / "passes").write_text("../passes")
    command = [sys.executable, "-c", "import jaxoverlap"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "ImportError" in child.stderr and "git config core.symlinks true" in child.stderr


PUBLIC = [
    "Audit",
    "ChannelRow",
    "Chip",
    "Cluster",
    "Collective",
    "Compiled",
    "Configuration",
    "Configurations",
    "Coverage",
    "Decision",
    "DisagreementError",
    "Link",
    "LostError",
    "Lowered",
    "MadeFor",
    "Measured",
    "Nccl",
    "NothingFitsError",
    "Overlapped",
    "Plan",
    "PodsUnavailableError",
    "Predictions",
    "Program",
    "Reason",
    "RewriteError",
    "Schedule",
    "Scheduled",
    "Scheduler",
    "Simulation",
    "Skip",
    "Speedup",
    "Transformer",
    "Trials",
    "Tuning",
    "Variant",
    "__version__",
    "agreed",
    "attention",
    "audit",
    "chips",
    "compiler_options",
    "configure",
    "decisions",
    "dot_general",
    "einsum",
    "lost_named",
    "matmul",
    "overlap",
    "parse_cluster",
    "per_sequence",
    "pipeline",
    "pod_mesh",
    "profile",
    "ring",
    "simulate",
    "softmax_cross_entropy_with_integer_labels",
    "tune",
]


COMMANDS = """
    advise: --debug --json --mesh --pod --processes-per-host STEP
    audit: --at-least --debug --json --keep-rings --mesh --plain --pod --processes-per-host STEP
    cache clear: --cache --debug --json KEY
    cache list: --cache --debug --json
    cache show: --cache --debug --json KEY
    configure: --axes --compile --debug --dtype --global-batch --json --keep --memory-fraction \\
        --over --picture --plain --pod --recompute --sequence --stack --trainer MODEL
    doctor: --debug --json
    explain: --debug --json --mesh --plan --pod --processes-per-host --verbose STEP
    flags: --as --check --debug --json POD
    new-target: --debug --json --style FILE
    plan diff: --debug --json A B
    plan show: --as --debug --json FILE
    pods: --debug --json CLUSTER
    profile: --at-least --debug --hlo --html --json --module --perfetto --pod --prices \
        --processes-per-host --svg --verbose PATH
    simulate: --at-least --debug --html --json --keep-rings --mesh --meshes --perfetto --plain --pod \\
        --processes-per-host --svg --without STEP
    tune: --budget --cache --debug --json --measure --mesh --out --pod --processes-per-host STEP
""".replace("\\\n", "")


def commands(command: Any, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each command with its options and arguments."""
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, f"{name} {inner}".strip())
    if not hasattr(command, "commands"):
        options = [
            p.opts if p.param_type_name == "option" else [p.name.upper()] for p in command.params
        ]
        yield name, sorted(itertools.chain.from_iterable(options))


def test_the_commands_stay():
    lines = (line.partition(":") for line in COMMANDS.strip().splitlines())
    expected = {name.strip(): options.split() for name, _, options in lines}
    assert dict(commands(typer.main.get_command(app))) == expected


def test_the_public_names_stay():
    assert sorted(jaxoverlap.__all__) == PUBLIC
    assert all(hasattr(jaxoverlap, name) for name in PUBLIC)
