"""Keep what XLA compiles for tests across runs: a program that is the same compiles once.

Most of the suite's time is XLA's. Programs for CPU devices are kept by JAX's persistent cache, with
files that are written whole. JAX keeps no programs for GPUs that are not there: of these the
scheduled text, the memory and the shardings are kept, which is all that tests read. Their key holds the module with its names and the user's
lines, all options and the versions; a step's scheduler pass runs each time, and its order has to be the kept one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import secrets
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler  # noqa: TID251 # no public hook
from jax._src.compilation_cache_interface import CacheInterface  # noqa: TID251
from jax._src.lib import _jax, xla_client  # noqa: TID251

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 30
FOLDER = "JAXOVERLAP_KEPT"  # names the folder to children
CHILDREN = Path(__file__).parent / "children"  # tests/support/children/sitecustomize.py
_SCHEDULE = "jaxoverlap._jax.xla_schedule"
_HASH = re.compile(r"_([0-9a-f]{8})$")  # at the end of a scheduled step's name: of the source
_ANY_HASH = "\N{SECTION SIGN}hash"  # instead of it in a kept program


class Files(CacheInterface):
    """A folder of values by key, for several processes.

    Attributes:
        used: whether programs for GPUs are taken from it; JAX has a setting of its own.
        folder: its path.
    """

    used = True

    def __init__(self, folder: Path):
        self.folder = self._path = folder  # the latter is JAX's name
        self.folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str) -> Path:
        named = key if len(key) < 200 else hashlib.sha256(key.encode()).hexdigest()
        return self.folder / named

    def get(self, key: str) -> bytes | None:
        path = self._file(key)
        with contextlib.suppress(FileNotFoundError):
            value = path.read_bytes()
            os.utime(path)  # `prune` removes what was not used for longest
            return value
        return None

    def put(self, key: str, value: bytes) -> None:
        temporary = self.folder / f".{secrets.token_hex(8)}"
        temporary.write_bytes(value)
        temporary.replace(self._file(key))


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the files that were not used for longest, until what is left is small enough."""
    stats = {path: path.stat() for path in folder.iterdir()}
    left = sum(stat.st_size for stat in stats.values())
    for path in sorted(stats, key=lambda path: stats[path].st_mtime_ns):
        if left <= most_bytes:
            return
        path.unlink(missing_ok=True)
        left -= stats[path].st_size


# -- programs for GPUs that are not there ---------------------------------------------------------

_PARTS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # Each method of an executable that is kept: its result as something to pickle, and back.
    "get_parameter_shardings": (
        lambda found: found and [one.SerializeToString() for one in found],
        lambda kept: kept and [_sharding(one) for one in kept],
    ),
    "get_output_shardings": (
        lambda found: found and [one.SerializeToString() for one in found],
        lambda kept: kept and [_sharding(one) for one in kept],
    ),
    "get_parameter_layouts": (lambda found: found, lambda kept: kept),
    "get_output_layouts": (lambda found: found, lambda kept: kept),
    "get_output_memory_kinds": (lambda found: found, lambda kept: kept),
    "get_compiled_memory_stats": (
        lambda found: {n: getattr(found, n) for n in dir(found) if n.endswith("_in_bytes")},
        lambda kept: types.SimpleNamespace(**kept),
    ),
}


def _sharding(serialized: bytes) -> Any:
    sharding = xla_client.OpSharding()
    sharding.ParseFromString(serialized)
    return sharding


@dataclass(frozen=True)
class Asked:
    """A schedule that a scheduler pass was given, and its answer."""

    text: str
    orders: Mapping[str, Sequence[str]]


@dataclass
class KeptExecutable:
    """A compiled program for GPUs that are not there, without XLA's own object."""

    texts: list[str]
    parts: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("parts", {})
        if name not in parts:
            raise AttributeError(name)
        return lambda: _PARTS[name][1](parts[name])

    def hlo_modules(self) -> list[Any]:
        return [types.SimpleNamespace(to_string=lambda text=text: text) for text in self.texts]

    def to_bytes(self) -> bytes:
        """Serialize without this module's classes, which have another name in children."""
        asked = [(one.text, dict(one.orders)) for one in self.asked]
        return zlib.compress(pickle.dumps((self.texts, self.parts, asked)), 1)

    @classmethod
    def from_bytes(cls, serialized: bytes) -> KeptExecutable:
        texts, parts, asked = pickle.loads(zlib.decompress(serialized))
        return cls(texts, parts, [Asked(*one) for one in asked])

    def renamed(self, old: str, new: str) -> KeptExecutable:
        """Return the program with another hash in its names."""
        if not (old and new):
            return self
        texts = [text.replace(old, new) for text in self.texts]
        asked = [
            Asked(
                one.text.replace(old, new),
                {
                    name.replace(old, new): [step.replace(old, new) for step in order]
                    for name, order in one.orders.items()
                },
            )
            for one in self.asked
        ]
        return KeptExecutable(texts, self.parts, asked)


def kept_parts(executable: Any, asked: list[Asked]) -> KeptExecutable:
    parts = {}
    for name, (to_kept, _) in _PARTS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # then JAX does without it
            parts[name] = to_kept(getattr(executable, name)())
    return KeptExecutable([m.to_string() for m in executable.hlo_modules()], parts, asked)


@dataclass
class Recorder:
    """A scheduler of a step that records what it is asked."""

    scheduler: Any
    asked: list[Asked] = field(default_factory=list)
    broken: bool = False

    def orders(self, text: str) -> Mapping[str, Sequence[str]]:
        orders = self.scheduler.orders(text)
        self.asked.append(Asked(text, {name: list(order) for name, order in orders.items()}))
        return orders

    def failed(self, reason: str) -> None:
        self.broken = True
        self.scheduler.failed(reason)


@contextlib.contextmanager
def recording(module_name: str) -> Iterator[tuple[Any, str] | None]:
    """Put a recorder before the scheduler that waits for a module, and yield it, with its hash.

    It yields None if there is none. The hash may be empty.

    Raises:
        LookupError: if several wait for the module, each in a thread.
    """
    schedule = sys.modules.get(_SCHEDULE)
    waiting = schedule._wanted if schedule else []
    found = [one for one in waiting if module_name.endswith(f"_{one[0]}")]
    if not found:
        yield None
        return
    if len(found) > 1 or isinstance(found[0][1], Recorder):
        raise LookupError(module_name)
    (wanted,) = found
    recorder = Recorder(wanted[1])
    with schedule._lock:  # type: ignore[union-attr]
        waiting[waiting.index(wanted)] = (wanted[0], recorder)
    try:
        hashed = _HASH.search(wanted[0])
        yield recorder, hashed[1] if hashed else ""
    finally:
        with schedule._lock:  # type: ignore[union-attr]
            at = next(i for i, one in enumerate(waiting) if one[1] is recorder)
            waiting[at] = wanted


_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)\n", re.MULTILINE)
_CALL = re.compile(r"callsite\((#loc\d*) at (#loc\d*)\)")
_NAMED = re.compile(r'("(?:[^"\\]|\\.)*")\((#loc\d*)\)')
_LINE = re.compile(r'"((?:[^"\\]|\\.)*)":\d+:')
_NOT_THE_USERS = (f"{ROOT}/jaxoverlap/", f"{ROOT}/passes/", sys.prefix)


def with_users_lines(text: str) -> str:
    """Return a module's text with each operation's name and the innermost line of the user's.

    XLA's text has every frame down to pytest's, and this package's lines move with each edit.
    """
    locations = dict(_LOCATION.findall(text))

    @functools.cache
    def resolved(name: str) -> str:
        location = locations[name]
        if call := _CALL.fullmatch(location):
            return resolved(call[1]) or resolved(call[2])
        if line := _LINE.match(location):
            return "" if line[1].startswith(_NOT_THE_USERS) else location
        if named := _NAMED.fullmatch(location):
            inner = resolved(named[2])
            frame = _LINE.match(locations[named[2]])
            return f"{named[1]} {inner}" if inner or not frame else ""
        return re.sub(r"#loc\d*", lambda found: resolved(found[0]), location)

    return re.sub(r"#loc\d*\b", lambda found: resolved(found[0]), _LOCATION.sub("", text))


def key_of(backend: Any, module: Any, devices: Any, options: Any, found: Any) -> str:
    """Hash all that a program for GPUs depends on, but for the hash in a scheduled step's name."""
    lowered = with_users_lines(module.operation.get_asm(enable_debug_info=True))
    if found and found[1]:
        lowered = lowered.replace(found[1], _ANY_HASH)
    hasher = hashlib.sha256(lowered.encode())
    hasher.update(_serialized(options))
    topology = xla_client.get_topology_for_devices(list(devices))
    versions = (jax.__version__, xla_client._version, backend.platform_version)
    flags = (os.environ.get("XLA_FLAGS", ""), bool(found), Path(__file__).read_bytes())
    hasher.update(repr((topology.fingerprint(), versions, flags)).encode())
    return f"pod-{hasher.hexdigest()}"


def _serialized(options: Any) -> bytes:
    """Serialize options without the file of kernels, which is another in each child."""
    debug = options.executable_build_options.debug_options
    kernels = debug.xla_gpu_kernel_cache_file
    debug.xla_gpu_kernel_cache_file = ""
    try:
        return options.SerializeAsString()
    finally:
        debug.xla_gpu_kernel_cache_file = kernels


def _dumps(options: Any) -> bool:
    """Return whether a compilation is to write files, as it does only if it takes place."""
    debug = options.executable_build_options.debug_options
    return bool(debug.xla_dump_to) or any(
        n == "xla_dump_to" for n, _ in options.env_option_overrides
    )


def keeping(compile: Callable[..., Any], files: Files) -> Callable[..., Any]:
    """Return XLA's entry point with programs for GPUs that are not there taken from files."""

    @functools.wraps(compile)
    def compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        name = module.operation.attributes["sym_name"].value
        anew = not (files.used and for_no_gpu(backend)) or callbacks or _dumps(options)
        if anew or "jaxoverlap_asks" in name:  # which XLA does not compile to the end
            return compile(backend, module, devices, options, callbacks)
        try:
            with recording(name) as found:
                recorder, hashed = found or (None, "")
                key = key_of(backend, module, devices, options, found)
                if known := files.get(key):
                    kept = KeptExecutable.from_bytes(known).renamed(_ANY_HASH, hashed)
                    if _ordered_alike(kept.asked, recorder):
                        return kept
                made = compile(backend, module, devices, options, callbacks)
                if recorder is None or not recorder.broken:
                    kept = kept_parts(made, recorder.asked if recorder else [])
                    files.put(key, kept.renamed(hashed, _ANY_HASH).to_bytes())
                return made
        except LookupError:
            return compile(backend, module, devices, options, callbacks)

    return compiled


def _ordered_alike(asked: list[Asked], recorder: Recorder | None) -> bool:
    """Ask the scheduler again, which reports what it finds, and compare its orders."""
    if recorder is None:
        return not asked
    try:
        return bool(asked) and all(
            {n: list(o) for n, o in recorder.scheduler.orders(one.text).items()} == one.orders
            for one in asked
        )
    except Exception:
        return False  # XLA's thread meets it again, and reports it


def for_no_gpu(backend: Any) -> bool:
    return isinstance(backend, _jax.CompileOnlyPyClient)


def install(folder: Path) -> Files:
    """Keep the programs of this process, for CPU devices and for GPUs that are not there."""
    files, is_cache_used = Files(folder), compilation_cache.is_cache_used
    key_without_names = compilation_cache.get_cache_key

    def get_cache_key(module: Any, *others: Any) -> str:
        """Add names and lines to JAX's key: tests read both in a program's text."""
        text = with_users_lines(module.operation.get_asm(enable_debug_info=True))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{key_without_names(module, *others)}-{digest}"

    compilation_cache.get_cache_key = get_cache_key
    compilation_cache.get_file_cache = lambda path: (files, path)
    # JAX writes there what it cannot read back.
    compilation_cache.is_cache_used = lambda backend: (
        not for_no_gpu(backend) and is_cache_used(backend)
    )
    keep_for_no_gpu(files)
    return files


def keep_for_no_gpu(files: Files) -> None:
    """Keep the programs that this process compiles for GPUs that are not there."""
    compiler.backend_compile_and_load = keeping(compiler.backend_compile_and_load, files)
