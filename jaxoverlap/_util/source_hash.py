"""Hash this package's source, as a version for the keys of cached results."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOT = Path(__file__).parents[1]


@functools.cache
def source_hash() -> bytes:
    """A hash of every module of the package: other code may give other results."""
    return hash_of(_ROOT)


def hash_of(root: Path) -> bytes:
    """A hash of every Python and TOML file under a folder, by its path; links are followed."""
    hasher = hashlib.sha256()
    folders = root.walk(follow_symlinks=True)
    files = (folder / name for folder, _, names in folders for name in names)
    for path in sorted(file for file in files if file.suffix in (".py", ".toml")):
        hasher.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return hasher.digest()
