"""Write tuned weights to a directory of their own, and read them back as they were written."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from models.checksum import checksums
from models.config import Mistake


def write(path: Path, params: Any, run: dict[str, Any]) -> None:
    """Write parameters with their checksums; the directory is written atomically.

    Args:
        path: of the directory, which is not there yet.
        params: a tree of arrays.
        run: what made them, as plain data.
    """
    contents = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        run=ocp.args.JsonSave({**run, "checksums": checksums(params).tolist()}),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(path.absolute(), args=contents)


def read(path: Path, like: Any) -> Any:
    """Return parameters that `write` wrote, placed as arrays or shapes with shardings are.

    Raises:
        Mistake: if they are not what was written.
    """
    wanted = ocp.args.Composite(params=ocp.args.StandardRestore(like), run=ocp.args.JsonRestore())
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(path.absolute(), args=wanted)
    if checksums(found["params"]).tolist() != found["run"]["checksums"]:
        raise Mistake(f"{path}: the weights are not what was written; write them again")
    return found["params"]
