"""Give tests eight CPU devices, set before JAX looks for any, and caches of their own."""

import gc
import os
from collections.abc import Iterator

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

from tests.support.pods import needs_plugin

jax.config.update("jax_num_cpu_devices", 8)

SOON_DONE = tuple(
    f"tests/{folder}/"
    for folder in ("_util", "cost", "flags", "parallelism", "plan", "profiling", "simulation")
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the programs that a run compiles for CPU devices in pytest's cache, for all workers.

    Most of the time of the suite is XLA's, and many tests compile the same program: two trainers
    that have to agree, a run and the one that resumes it. Each run starts without any: not all
    tests pass with programs that are loaded (XLA does not serialize one again).
    """
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = config.cache.mkdir("compiled")
        if not hasattr(config, "workerinput"):
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # those are of GPUs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that take seconds behind those that take minutes, so that workers end together."""
    items.sort(key=lambda item: item.nodeid.startswith(SOON_DONE))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives as long as the run: modules and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Leave the cache out where JAX writes to it what it cannot read back: programs for pods."""
    anew = item.get_closest_marker("anew") or needs_plugin.mark in item.iter_markers("skipif")
    if jax.config.jax_enable_compilation_cache == bool(anew):
        jax.config.update("jax_enable_compilation_cache", not anew)
        compilation_cache.reset_cache()  # or the setting is not read again
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep what tests compile in children apart from the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
