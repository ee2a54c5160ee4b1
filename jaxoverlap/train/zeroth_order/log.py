"""Write a run down as scalars, and replay it: its parameters follow from where it began and these.

A file has one line of JSON, the header, then for each step float32 values in little-endian order:
its learning rate and its projected gradients, so 8 bytes a step with one direction.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxoverlap.train.zeroth_order.estimator import Mezo, Pending
from jaxoverlap.train.zeroth_order.state import ZOState, new_state, nothing

_FORMAT = "jaxoverlap zeroth-order log 1"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a log's scalars belong to.

    Attributes:
        format: of the file.
        seed: of the run's key.
        directions, weight_decay: the estimator's, beside its scalars.
        params: a hash of the parameters that the run began at: paths, shapes, dtypes and values.
    """

    format: str
    seed: int
    directions: int
    weight_decay: float
    params: str


def header_of(params: Any, transform: Mezo, *, seed: int) -> Header:
    """Return the header of a run that begins at some parameters, which are read whole."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {value.shape} {value.dtype};".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    return Header(
        format=_FORMAT,
        seed=seed,
        directions=transform.directions,
        weight_decay=transform.weight_decay,
        params=digest.hexdigest()[:32],
    )


class Log:
    """A log that is open to be read and added to, in the process that writes it.

    A step's record is on its way to the disk when `add` returns. What a killed run left of a record
    that it had not written whole is cut off when the log is opened again.
    """

    def __init__(self, path: str | Path, header: Header):
        """Open a log, or begin one.

        Raises:
            ValueError: if the file is no such log, or that of another run: of other parameters,
                another seed or another estimator.
        """
        self.header, self._values = header, 1 + header.directions
        self._file, self.records = _opened(Path(path), header, self._values)

    @property
    def steps(self) -> int:
        """Return how many steps are written down."""
        return len(self.records)

    def add(self, metrics: dict[str, Any]) -> None:
        """Write a step down, from its metrics."""
        record = np.array([metrics["rate"], *np.asarray(metrics["scalars"])], "<f4")
        self._file.write(record.tobytes())
        self._file.flush()
        self.records = np.concatenate([self.records, record[None]])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


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
    params = jax.tree.map(jnp.asarray, params)
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


def _opened(path: Path, header: Header, values: int) -> tuple[BinaryIO, np.ndarray]:
    encoded = msgspec.json.encode(header) + b"\n"
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded)
    first, _, body = path.read_bytes().partition(b"\n")
    try:
        found = msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a log of a zeroth-order run ({error}): expected a file that such a run "
            "began; give another path"
        ) from error
    if differs := [
        f"{name} {getattr(found, name)!r} there, {getattr(header, name)!r} here"
        for name in header.__struct_fields__
        if getattr(found, name) != getattr(header, name)
    ]:
        raise ValueError(
            f"{path} is the log of another run ({'; '.join(differs)}): its scalars mean nothing "
            "here; begin at the parameters, seed and estimator that it began with, or "
            "give another path"
        )
    whole = len(body) // (4 * values) * values
    records = np.frombuffer(body, "<f4", count=whole).reshape(-1, values).copy()
    file = path.open("r+b")
    file.truncate(len(first) + 1 + records.nbytes)
    file.seek(0, 2)
    return file, records
