"""A check that the link to the passes is one: git writes a text file where links are off."""

from pathlib import Path

_PASSES = Path(__file__).parents[1] / "passes"

if not _PASSES.is_dir():
    raise ImportError(
        f"{_PASSES} is no folder: it is a symbolic link to the passes, and this copy of jaxoverlap "
        "has been made without links. In a git checkout run `git config core.symlinks true` and "
        "`git checkout jaxoverlap/passes`; else copy the folder passes to that place"
    )
