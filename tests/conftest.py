"""Give tests eight CPU devices, set before JAX looks for any, and caches of their own."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Small steps compile longer than they run, so XLA's code generator, and only that, is cut back.
# Without a GPU nothing can be tuned: XLA would compile each kernel once more, to take it as it is.
# Each once, also in a worker, which has those of its parent: they are part of the cache's keys.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_gpu_autotune_level=0",
            *os.environ.get("XLA_FLAGS", "").split(),
        )
    )
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support import kept, seeds, shards
from tests.support.reach import reach

jax.config.update("jax_num_cpu_devices", 8)

ROOT = Path(__file__).parents[1]
SECONDS = shards.known_seconds()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("choice", "which of the tests run")
    group.addoption("--reach", action="store_true", help="those that the change can reach")
    group.addoption("--shard", metavar="N/M", help="those of one shard of several, as 1/2")
    group.addoption("--record-seconds", action="store_true", help="write tests/seconds.json")


def pytest_configure(config: pytest.Config) -> None:
    keep_programs(config)
    if hasattr(config, "workerinput"):
        config.stash[FILES] = config.workerinput["files"]
    else:
        config.stash[FILES], config.stash[CHOICE] = chosen(config.option)


FILES = pytest.StashKey[list[str] | None]()  # of which tests are collected; None for any
CHOICE = pytest.StashKey[list[str]]()  # says so


def chosen(option: Any) -> tuple[list[str] | None, list[str]]:
    """Return the files of tests that run, None for all that are asked for, and lines that say why."""
    files, choice = None, [f"random steps: SEEDS={'all' if seeds.turn() is None else seeds.turn()}"]
    if option.reach:
        found = reach(ROOT)
        choice.append(f"tests: {found}")
        files = None if found.files is None else sorted(found.files)
    if option.shard:
        try:
            number, count = shards.parsed(option.shard)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        every = files or [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py")]
        files = shards.shares(every, count, SECONDS)[number - 1]
        choice.append(f"shard {option.shard}: {len(files)} of {len(every)} files")
    return files, choice


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of xdist the choice."""
    node.workerinput["files"] = node.config.stash[FILES]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return config.stash.get(CHOICE, [])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    files = config.stash[FILES]
    if files is None or collection_path.is_dir():
        return None
    return str(collection_path.relative_to(ROOT)) not in files or None


KEPT = pytest.StashKey[kept.Files]()


def keep_programs(config: pytest.Config) -> None:
    """Keep what compiles in pytest's cache, for all workers and later runs.

    Most of the time of the suite is XLA's, and many tests compile the same program: two trainers
    that have to agree, a run and the one that resumes it, a test of yesterday.
    """
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = config.cache.mkdir("programs")
        if not hasattr(config, "workerinput"):
            kept.prune(folder)
        config.stash[KEPT] = kept.install(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # those are of GPUs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that workers end together."""
    items.sort(key=lambda item: -SECONDS.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.record_seconds:
        taken = defaultdict[str, float](float)
        for reports in terminalreporter.stats.values():
            for report in reports:
                if isinstance(report, pytest.TestReport):
                    taken[file_of(report.nodeid)] += report.duration
        shards.record_seconds(taken)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives as long as the run: modules and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Compile all programs of a test that is marked `anew`."""
    anew = bool(item.get_closest_marker("anew"))
    if files := item.config.stash.get(KEPT, None):
        files.used = not anew
        os.environ[kept.FOLDER] = "" if anew else str(files.folder)
    if jax.config.jax_enable_compilation_cache == anew:
        jax.config.update("jax_enable_compilation_cache", not anew)
        compilation_cache.reset_cache()  # or the setting is not read again
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory, pytestconfig: pytest.Config):
    """Keep what tests compile in children apart from the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        if KEPT in pytestconfig.stash:
            patch.setenv("PYTHONPATH", str(kept.CHILDREN), prepend=os.pathsep)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
