"""The two public functions, `overlap` and `tune`, and the step that they return."""

from jaxoverlap.api.decorator import overlap, tune
from jaxoverlap.api.overlapped import Overlapped

__all__ = ["Overlapped", "overlap", "tune"]
