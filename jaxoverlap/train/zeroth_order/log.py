"""Log a run as scalars, and replay it: its initial parameters and the log give the final ones.

A file has one line of JSON, the header, then for each step float32 values in little-endian order
(its learning rate and its projected gradients) and a checksum: 12 bytes a step with one direction.
A record's checksum is the CRC-32 of its values continued from the record before, and from the
header for the first one. So a bit that flips, bytes that are lost and records of two writers are
found at the record where they begin.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxoverlap.train.zeroth_order.estimator import Mezo, Pending
from jaxoverlap.train.zeroth_order.state import ZOState, as_arrays, new_state, nothing

_FORMAT = "jaxoverlap zeroth-order log 2"
_BEGINS = b'{"format":"jaxoverlap zeroth-order log '
_RATES_AT = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)  # steps by which schedules are told


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run to which a log's scalars belong.

    Attributes:
        format: of the file.
        seed: of the run's key.
        directions, eps, weight_decay: the estimator's.
        rates: the learning rate at some steps.
        decays: a hash of the parameters that decay.
        rounding: the estimator's.
        params: a hash of the parameters that the run began at: paths, shapes, dtypes and values.
        run: what else identifies this run, as its data: of the caller's choice.
    """

    format: str
    seed: int
    directions: int
    eps: float
    weight_decay: float
    rates: list[float]
    decays: str
    rounding: str
    params: str
    run: dict[str, str]


class LogDamagedError(ValueError):
    """Records of a log do not have the checksum that they were written with.

    Attributes:
        good: how many records from the start are as they were written.
    """

    def __init__(self, message: str, good: int):
        super().__init__(message)
        self.good = good


def digest(tree: Any) -> str:
    """Return a hash of a tree of arrays: of their paths, shapes, dtypes and all values."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        value = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {value.shape} {value.dtype};".encode())
        found.update(np.ascontiguousarray(value).view(np.uint8).data)
    return found.hexdigest()[:32]


def header_of(
    params: Any, transform: Mezo, *, seed: int, run: Mapping[str, Any] | None = None
) -> Header:
    """Return the header of a run that begins at these parameters; it hashes all their values.

    Args:
        params: what is trained.
        transform: the estimator.
        seed: of the run's key.
        run: what else the scalars depend on and a resumed run has to have again: its data, batch
            size, frozen parameters (`digest`). Values are stored as text.
    """
    params = as_arrays(params)
    decayed = [
        transform.decays(jax.tree_util.keystr(p), x) for p, x in jax.tree.leaves_with_path(params)
    ]
    return Header(
        format=_FORMAT,
        seed=seed,
        directions=transform.directions,
        eps=float(transform.eps),
        weight_decay=float(transform.weight_decay),
        rates=[float(transform.rate(jnp.int32(step))) for step in _RATES_AT],
        decays=hashlib.sha256(bytes(map(bool, decayed))).hexdigest()[:16],
        rounding=transform.rounding,
        params=digest(params),
        run={name: str(value) for name, value in (run or {}).items()},
    )


class Log:
    """A log that is open to be read and added to, in the one process that writes it.

    A step's record is on its way to the disk when `add` returns. An incomplete record of a killed
    run is truncated when the log is opened again.
    """

    def __init__(self, path: str | Path, header: Header, *, cut: bool = False):
        """Open a log, or begin one.

        Args:
            path: of the file; folders above it are made.
            header: of the run.
            cut: whether a damaged log is truncated where the damage begins; the file as it was is
                then saved in the same folder, with ".damaged" behind its name.

        Raises:
            LogDamagedError: if records are not as they were written.
            ValueError: if the file is no such log, or that of another run, or is open in another
                process.
        """
        self.header, self._values = header, 1 + header.directions
        path = Path(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder: expected a file; give the name of one in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._open(path, cut)
        except BaseException:
            os.close(self._file)
            raise

    def _open(self, path: Path, cut: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"{path} is open in another process, which adds its own steps to it; wait for that "
                "run, or give another path"
            ) from error
        encoded = msgspec.json.encode(self.header) + b"\n"
        first, newline, body = path.read_bytes().partition(b"\n")
        if not newline and (first.startswith(_BEGINS) or _BEGINS.startswith(first)):
            os.ftruncate(self._file, 0)  # killed before it had a record
            self._write(encoded, 0)
            first, body = encoded[:-1], b""
        check_same(path, first, self.header)
        self._records, self._crc, good = _read(body, zlib.crc32(encoded), self._values)
        self._end = len(encoded) + len(self._records) * 4 * (self._values + 1)
        if not good:
            if not cut:
                raise _damaged(path, len(self._records), len(body) // (4 * self._values + 4))
            path.with_name(path.name + ".damaged").write_bytes(path.read_bytes())
        os.ftruncate(self._file, self._end)

    @property
    def steps(self) -> int:
        """Return the number of logged steps."""
        return len(self._records)

    @property
    def records(self) -> np.ndarray:
        """Return the logged scalars, float32 [steps, 1 + directions]."""
        return np.array(self._records, np.float32).reshape(-1, self._values)

    def add(self, metrics: dict[str, Any]) -> None:
        """Log a step, by its metrics.

        Raises:
            ValueError: if they are not of the header's estimator, or not finite; nothing is
                written then.
        """
        record = np.array([metrics["rate"], *np.ravel(metrics["scalars"])], "<f4")
        if len(record) != self._values or not np.isfinite(record).all():
            raise ValueError(
                f"a step's rate and scalars {record.tolist()}: expected {self._values} finite "
                "numbers, as this log's estimator gives; add the metrics of its step"
            )
        crc = zlib.crc32(record.tobytes(), self._crc)
        self._end = self._write(record.tobytes() + crc.to_bytes(4, "little"), self._end)
        self._records.append(record)
        self._crc = crc

    def _write(self, data: bytes, at: int) -> int:
        """Write bytes at an offset and return their end; if that fails, truncate the file there."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], at + written)
        except OSError:
            os.ftruncate(self._file, at)
            raise
        return at + written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def replay(records: np.ndarray, transform: Mezo, params: Any, *, seed: int) -> ZOState:
    """Return the state after the steps of a log, bit by bit that of the run; nothing is pending.

    Args:
        records: `Log.records`, float32 [steps, 1 + directions].
        transform: the run's estimator.
        params: where the run began; they are not donated.
        seed: of its key.
    """
    records = np.asarray(records, np.float32)
    if records.ndim != 2 or records.shape[1] != 1 + transform.directions:
        raise ValueError(
            f"records of shape {records.shape}: expected [steps, {1 + transform.directions}], a "
            f"rate and {transform.directions} projected gradients a step; give the run's estimator"
        )
    params = jax.tree.map(jnp.asarray, as_arrays(params))
    at = jax.tree.map(lambda leaf: leaf.sharding, params)
    state = new_state(params, transform, seed)

    def through(params: Any, records: jax.Array) -> Any:
        def one(params: Any, numbered: Any) -> Any:
            step, record = numbered
            pending = Pending(record[1:], record[0], step)
            return transform.applied(pending, state.key, params), None

        return jax.lax.scan(one, params, (jnp.arange(len(records)), records))[0]

    made = jax.jit(through, out_shardings=at)(params, jnp.asarray(records))
    return ZOState(made, state.key, jnp.int32(len(records)), nothing(transform))


def check_same(path: Path, first: bytes, header: Header) -> None:
    """Raise a ValueError if a log's first line is not this header."""
    try:
        found = msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a log of a zeroth-order run, or of another version ({error}): expected "
            f"a file that begins with {_FORMAT!r}; give another path"
        ) from error
    differs = [
        f"{name} {getattr(found, name)!r} there, {getattr(header, name)!r} here"
        for name in header.__struct_fields__
        if getattr(found, name) != getattr(header, name)
    ]
    if differs:
        raise ValueError(
            f"{path} is the log of another run ({'; '.join(differs)}): its scalars mean nothing "
            "here; begin at the parameters, data, seed and estimator that it began with, or "
            "give another path"
        )


def _read(body: bytes, crc: int, values: int) -> tuple[list[np.ndarray], int, bool]:
    """Read records up to the first damaged one.

    Returns:
        The records, the checksum of the last one, and whether none is damaged.
    """
    records, size = list[np.ndarray](), 4 * values
    for at in range(0, len(body) - size - 3, size + 4):
        part, kept = body[at : at + size], body[at + size : at + size + 4]
        now = zlib.crc32(part, crc)
        record = np.frombuffer(part, "<f4")
        if now != int.from_bytes(kept, "little") or not np.isfinite(record).all():
            return records, crc, False
        records.append(record)
        crc = now
    return records, crc, True


def _damaged(path: Path, good: int, count: int) -> LogDamagedError:
    steps = f"steps 0 to {good - 1} are" if good else "no step is"
    return LogDamagedError(
        f"{path} is damaged: the record of step {good}, of {count}, does not have its checksum; "
        f"{steps} as written. Restore the file from a copy, or open it with cut=True (the "
        f"trainer's --cut-log), which goes on from step {good} and keeps the file as it is beside "
        "it",
        good,
    )
