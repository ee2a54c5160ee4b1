"""Python imports this where a test's child starts: programs for GPUs are kept there too.

The children that compile candidates are the package's own and know nothing of tests.
"""

import importlib.util
import os
import sys
from pathlib import Path


class _BeforeJobs:
    """Installs `kept` when the package's module of compilations is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "jaxoverlap._jax.jobs":
            sys.meta_path.remove(self)
            file = Path(__file__).parents[1] / "kept.py"
            spec = importlib.util.spec_from_file_location("kept", file)
            kept = sys.modules["kept"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(kept)
            kept.keep_for_no_gpu(kept.Files(Path(os.environ[kept.FOLDER])))


if os.environ.get("JAXOVERLAP_KEPT"):
    sys.meta_path.insert(0, _BeforeJobs())
