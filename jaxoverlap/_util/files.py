"""Files written atomically, JSON with a checksum, and the package's own files of data."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

CACHE_VARIABLE = "JAXOVERLAP_CACHE"


def kept_folder() -> Path:
    """Return this library's folder of cached results; it may not exist yet.

    It is JAXOVERLAP_CACHE of the environment, or else in the user's cache directory.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxoverlap"


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one.

    The text goes to a new file in the same folder, on the disk, and then takes the old one's name.
    A kill in between leaves that file behind, as `.NAME.RANDOM.tmp`.

    Raises:
        OSError: if it cannot be written; the old file is then as it was.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: {_no_folder(path)}")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Check, before anything takes time, that files can be written where they are to be.

    Raises:
        ValueError: if the folder of one is missing or takes no new file, or one is a folder.
    """
    for path in (Path(path) for path in paths if path is not None):
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file to write")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: {_no_folder(path)}")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
            if path.exists():
                path.open("a").close()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error}; name another file") from error


def _no_folder(path: Path) -> str:
    return f"there is no folder {path.parent}; make it first"


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: until then a new file's name is not on it."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    """A file's layout: what kind it is, a hash of its content's compact JSON, and the content."""

    format: str
    checksum: str
    content: Any


def sealed(kind: str, content: bytes) -> str:
    """The text of a file that holds some JSON, indented, with a checksum.

    Args:
        kind: what it holds, as in "jaxoverlap plan".
        content: its compact JSON.
    """
    file = _Sealed(kind, _checksum(content), msgspec.Raw(content))
    return msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"


def opened(kind: str, raw: bytes) -> bytes:
    """The compact JSON that `sealed` was given.

    Raises:
        ValueError: if the file is empty, truncated, edited or damaged, or holds something else.
    """
    if not raw.strip():
        raise ValueError("the file is empty")
    try:
        document = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        # Cut within a number, its JSON is malformed and not truncated.
        begun = raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")
        if begun or "truncated" in str(error):
            raise ValueError(f"the file is truncated, after {len(raw)} bytes") from error
        raise ValueError(f"not JSON, as a {kind} is: {error}") from error
    if not isinstance(document, dict) or document.get("format") != kind:
        raise ValueError(f'JSON, but no {kind}: there is no "format": "{kind}" in it')
    try:
        file = msgspec.convert(document, _Sealed)
    except msgspec.ValidationError as error:
        raise ValueError(f"edited since it was written: {error}") from error
    compact = msgspec.json.encode(file.content)
    if _checksum(compact) != file.checksum:
        raise ValueError(
            f"edited or damaged since it was written: its content has {_checksum(compact)}, and "
            f"its checksum says {file.checksum}"
        )
    return compact


def _checksum(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


# -- the package's own data -----------------------------------------------------------------------


def packaged(package: str, name: str) -> bytes:
    """The contents of a file that comes with a package, such as "jaxoverlap.flags"."""
    return resources.files(package).joinpath(name).read_bytes()


def entries(package: str, name: str) -> dict[str, dict[str, Any]]:
    """The tables of a package's TOML file; one that is `like` another adds to its fields."""
    known: dict[str, dict[str, Any]] = {}
    tables = msgspec.toml.decode(packaged(package, name), type=dict[str, dict[str, Any]])
    for key, given in tables.items():
        like = given.pop("like", None)
        known[key] = {**(known[like] if like else {}), **given}
    return known


def converted[Kind](kind: type[Kind], fields: Mapping[str, Any]) -> Kind:
    """An object of a dataclass, each field converted to its type.

    Raises:
        KeyError: for a field that the class has not.
        msgspec.ValidationError: for a value of another type.
    """
    types = get_type_hints(kind)
    return kind(**{name: msgspec.convert(value, types[name]) for name, value in fields.items()})
