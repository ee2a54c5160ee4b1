"""Give tests eight CPU devices, set before JAX looks for any, and a cache of their own."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Small steps compile longer than they run, so XLA's code generator, and only that, is cut back.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        os.environ.get("XLA_FLAGS", ""),
    )
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep what tests compile in children apart from the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
