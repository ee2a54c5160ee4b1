"""Select the files of tests that a change can reach.

A test file is reached if a changed file is among what it imports, what those modules import, and
so on. Names in text count as imports too: a child is started by `python -m models.train_gpt`, a
page's block calls `jaxoverlap.tune`. Whatever is not understood reaches every test.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grimp

PACKAGES = ("jaxoverlap", "models", "benchmarks", "tests")
CONFTEST = "tests.conftest"  # every test imports it
OWN = "tests/support/reach.py"  # names modules, and runs none
# These read the source of every module, or files that no module names. They take seconds.
ALWAYS = (
    "tests.docs.test_docstrings",
    "tests.docs.test_words",
    "tests.test_desk",
    "tests.test_front_door",
    "tests.test_packages",
    "tests.test_readme",
)
# Files that are read as text, by what reads them. Data below a package belong to its modules.
READERS = {
    "jaxoverlap/cli/targets/": ("jaxoverlap.cli.new_target",),
    "docs/": ("tests.docs.blocks", "tests.docs.test_pages", "tests.docs.test_clusters"),
    "docs/clusters/": ("tests.benchmarks.lab.test_training",),
    "docs/start.md": ("tests.cli.test_targets",),
    "README.md": ("tests.docs.blocks", "tests.docs.test_pages"),
    "mkdocs.yml": ("tests.docs.test_pages",),
    "tools/find-python": ("tests.tools.test_find_python",),
    # Nothing but ALWAYS reads these.
    "tools/count-lines": (),
    "CHANGELOG.md": (),
    "CONTRIBUTING.md": (),
    "LICENSE": (),
    ".ci/": (),
    ".github/": (),
    ".gitignore": (),
    ".pre-commit-config.yaml": (),
}

_NAME = re.compile(rf"\b({'|'.join(PACKAGES)})\b((?:\.\w+)*)(\.\{{)?")
_PATH = re.compile(rf"\b(?:{'|'.join((*PACKAGES, 'passes'))})(?:/\w+)*/\w+\.py\b")
_DOCSTRING = re.compile(r'''(?:\A|:\n)\s*"""[\s\S]*?"""''')
_SCRIPT = re.compile(r"""["'](\w+)\.py["']""")
_FROM = re.compile(rf"from ((?:{'|'.join(PACKAGES)})[\w.]*) import (\([^)]*\)|[^(\n]+)")
_COMMAND = re.compile(r"""^ *(?:\$ )?jaxoverlap \w|-m["', ]+jaxoverlap\b""", re.MULTILINE)
_AS_A_VALUE = re.compile(r"\(jaxoverlap[,)]|, jaxoverlap[,)]|=jaxoverlap\b|import jaxoverlap as")


class EverythingError(Exception):
    """Raised with the reason for which every test has to run."""


@dataclass
class Graph:
    """The modules and pages of a checkout.

    Attributes:
        files: each module's file, relative to the root.
        imports: the modules that a module, or a page, imports or names.
        pages: the texts that are run as code; their names are paths.
    """

    files: Mapping[str, str]
    imports: Mapping[str, Collection[str]]
    pages: Collection[str] = field(default_factory=tuple)

    def reached(self, changed: Collection[str]) -> set[str]:
        """Return the modules and pages that import, at any depth, one of these, and these."""
        importers = defaultdict[str, list[str]](list)
        for importer, names in self.imports.items():
            for name in names:
                importers[name].append(importer)
        found, todo = set(changed), list(changed)
        while todo:
            more = [one for one in importers[todo.pop()] if one not in found]
            found.update(more)
            todo.extend(more)
        return found


# -- the graph ------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """Return the module of a Python file; `passes` is linked into the package."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"jaxoverlap.{name}" if path.startswith("passes/") else name


def graph_of(root: Path, lazy: Mapping[str, str], removed: Iterable[str] = ()) -> Graph:
    """Read the imports and names in every module and page.

    Args:
        root: the checkout.
        lazy: the module of each name that `jaxoverlap` imports when it is first used.
        removed: modules that are gone; what still names one is reached by its removal.
    """
    files = {
        module_of(path): path
        for top in (*PACKAGES, "passes")
        for path in (
            str(file.relative_to(root))
            for file in (root / top).rglob("*.py")  # links are not followed
        )
    }
    gone = {*removed}
    known = {*files, *gone}
    grimps = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = dict[str, set[str]]()
    for module, path in files.items():
        imports[module] = set()
        if module == "jaxoverlap":  # imports its names for type checkers, and when they are used
            imports[module] = {"jaxoverlap._util.passes_link"}
        elif module in grimps.modules:
            imports[module] = set(grimps.find_modules_directly_imported_by(module))
        text = _DOCSTRING.sub(":\n", (root / path).read_text())
        if module.startswith("jaxoverlap"):  # imports all that it uses, but for scripts
            scripts = {f".{name}" for name in _SCRIPT.findall(text)}
            imports[module] |= {m for m in known if m[m.rfind(".") :] in scripts}
            imports[module] |= gone & named(text, known, lazy)
        elif path != OWN:
            imports[module] |= named(text, known, lazy)
        imports[module] = with_parents({*imports[module], module}) - {module}
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    for page in pages:
        name = str(page.relative_to(root))
        imports[name] = with_parents(named(page.read_text(), known, lazy))
    return Graph(files, imports, tuple(str(page.relative_to(root)) for page in pages))


def with_parents(modules: Iterable[str]) -> set[str]:
    """Add the packages around modules: Python imports them first."""
    found = set(modules)
    for module in modules:
        while "." in module:
            module = module.rpartition(".")[0]
            found.add(module)
    return found


def named(text: str, known: Collection[str], lazy: Mapping[str, str]) -> set[str]:
    """Return the modules that a text names, in imports, strings or sentences."""
    found = set[str]()
    for top, names, computed in _NAME.findall(text):
        module = top + names
        if computed:  # f"models.{name}"
            found |= {one for one in known if one.startswith(f"{module}.")}
        found |= _module(module, known, lazy)
    for path in _PATH.findall(text):
        found |= {module_of(path)} & set(known)
    for module, names in _FROM.findall(text):
        for name in re.findall(r"\w+", names):
            found |= _module(f"{module}.{name}", known, lazy)
    if _COMMAND.search(text):
        found |= {"jaxoverlap.__main__"}
    if _AS_A_VALUE.search(text):  # any name of it may be used
        found |= set(lazy.values())
    return found & set(known)


def _module(name: str, known: Collection[str], lazy: Mapping[str, str]) -> set[str]:
    """Return the module of a dotted name that may go on behind it, as in "a.module.function"."""
    top, *rest = name.split(".")
    if top == "jaxoverlap" and rest and rest[0] in lazy:
        return {lazy[rest[0]]}
    while name not in known:
        if "." not in name:
            return set()
        name = name.rpartition(".")[0]
    if name == "jaxoverlap":  # its command is found by _COMMAND
        return {name}
    return {name, f"{name}.__main__"}  # `python -m` runs the latter of a package


# -- the change -----------------------------------------------------------------------------------


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EverythingError(f"git {arguments[0]} fails: {done.stderr.strip()[:80]}")
    return done.stdout.splitlines()


def changed_files(root: Path) -> tuple[list[str], str]:
    """Return the files that differ from the base, those outside git's index too, and the base.

    The base is the merge base with origin/main, or with main where there is no such remote. If
    nothing differs from main, the last commit is the change.

    Raises:
        EverythingError: if there is nothing to compare with, as in a fresh clone.
    """
    (top,) = _git(root, "rev-parse", "--show-toplevel")
    if Path(top).resolve() != root.resolve():
        raise EverythingError("this is no checkout")
    remote = bool(_git(root, "for-each-ref", "refs/remotes/origin/main"))
    (base,) = _git(root, "merge-base", "HEAD", "origin/main" if remote else "main")
    files, name = _differing(root, base), "origin/main" if remote else "main"
    if not files and remote:
        raise EverythingError("nothing differs from origin/main")
    if not files:
        files, name = _differing(root, "HEAD~1"), "HEAD~1"
    return files, f"{name} ({base[:9]})" if name != "HEAD~1" else name


def _differing(root: Path, base: str) -> list[str]:
    tracked = _git(root, "diff", "--name-only", "--no-renames", base, "--")
    return sorted({*tracked, *_git(root, "ls-files", "--others", "--exclude-standard")})


def _near(path: str, graph: Graph, folders: int) -> set[str]:
    """Return the modules of the nearest folders around a file that have some: they may read it."""
    near = set[str]()
    while folders and (path := path.rpartition("/")[0]):
        here = {m for m, file in graph.files.items() if file.rpartition("/")[0] == path}
        near |= here
        folders -= bool(here)
    return near


def sources(path: str, graph: Graph) -> set[str]:
    """Return the modules and pages that are changed with a file.

    Raises:
        EverythingError: if it is not known who reads the file.
    """
    top = path.partition("/")[0]
    readers = [modules for start, modules in READERS.items() if path.startswith(start)]
    found = {module for modules in readers for module in modules}
    if path.endswith(".py") and top in (*PACKAGES, "passes"):
        module = module_of(path)
        if module == "jaxoverlap":
            return set(graph.files)
        imported = is_test(module) or any(module in names for names in graph.imports.values())
        return {module, *found} if imported else {module, *found, *_near(path, graph, 2)}
    if top in (*PACKAGES, "passes"):  # data of the nearest modules
        if near := _near(path, graph, 1):
            return near
        raise EverythingError(f"{path} is of no package")
    if not readers:
        raise EverythingError(f"{path} changed")
    return found | ({path} & set(graph.pages))


# -- both -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reach:
    """The tests that a change reaches.

    Attributes:
        files: their files, relative to the root; None for all there are.
        why: what changed, or why all of them run.
        total: the number of files of tests.
    """

    files: frozenset[str] | None
    why: str
    total: int = 0

    def __str__(self) -> str:
        if self.files is None:
            return f"every test: {self.why}"
        return f"{len(self.files)} of {self.total} files of tests, reached from {self.why}"


def is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


def reach(root: Path) -> Reach:
    """Find the tests that the checkout's changes reach."""
    try:
        changed, base = changed_files(root)
        text = (root / "jaxoverlap" / "__init__.py").read_text()
        gone = [module_of(p) for p in changed if p.endswith(".py") and not (root / p).exists()]
        return reached(changed, graph_of(root, lazy_names(text), gone), base)
    except EverythingError as error:
        return Reach(None, str(error))


def lazy_names(text: str) -> dict[str, str]:
    """Read the module of each name from the block of `jaxoverlap/__init__.py` for type checkers."""
    block = text.partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    found = dict[str, str]()
    for module, names in re.findall(r"from (\S+) import (\([^)]*\)|[^(\n]+)", block):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            found[name] = f"{module}.{name}" if module == "jaxoverlap" else module
    return found


def reached(changed: Collection[str], graph: Graph, base: str) -> Reach:
    """Return the tests that changed files reach in a graph; see `sources` for what it raises."""
    start = {source for path in changed for source in sources(path, graph)}
    found = graph.reached(start)
    if CONFTEST in found:
        raise EverythingError("the tests' conftest.py is reached")
    tests = [module for module in graph.files if is_test(module)]
    files = frozenset(graph.files[m] for m in tests if m in found or m in ALWAYS)
    several = f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else changed[0]
    return Reach(files, f"{several} against {base}", len(tests))
