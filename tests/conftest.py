"""Eight CPU devices for every test that needs some, set before JAX looks for any; and a cache."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Small steps take longer to compile than to run: what XLA does before its code generator stays.
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
    """What tests compile in children is not kept among the user's results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
