"""Save and restore training states; a run resumes only checkpoints of the same configuration.

A checkpoint has a checksum of each of its arrays, which is looked at before a run goes on from it:
the files have none of their own, and one flipped byte of a weight trains on.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from models.checksum import checksums
from models.config import Mistake, Run

# These may change from one run to the next, as may the mesh: they say how long a run is, what it
# writes, and in which processes it runs.
FREE = {"steps", "plain", "halves", "plan", "checkpoint", "save_every", "metrics", "log_every"}
FREE |= {
    "memory",
    "attention",
    "workers",
    "profile",
    "distributed",
    "coordinator",
    "processes",
    "process",
    "timeout_s",
}


class Checkpoints:
    """The checkpoints in the folder `config.checkpoint`; saves nothing if that is None.

    Every process writes its part while the next steps run; a checkpoint has its name only when all
    parts are there.
    """

    def __init__(self, config: Run):
        self.manager = None
        if config.checkpoint is None:
            return
        directory = config.checkpoint.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        check_same_run(directory / "config.json", config)
        self.every, self.steps = config.save_every, config.steps
        waits = ocp.options.AsyncOptions(timeout_secs=config.timeout_s)
        # The next line alone decides which steps are kept.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, async_options=waits)
        self.manager = ocp.CheckpointManager(directory, options=options)

    def restore(self, abstract_state: Any) -> tuple[Any, int]:
        """Return (state, steps taken) of the newest checkpoint, or (None, 0) if there is none.

        Raises:
            Mistake: if it cannot be read, or is not what was written.
        """
        taken = self.manager.latest_step() if self.manager else None
        if taken is None:
            return None, 0
        return self.restore_state(taken, abstract_state), taken

    def newest(self) -> tuple[int, Any] | None:
        """Return the newest checkpoint's step and its state's shapes, as plain data, if any."""
        taken = self.manager.latest_step() if self.manager else None
        if not self.manager or taken is None:
            return None
        with ocp.StandardCheckpointer() as reader:
            saved: Any = reader.metadata(self.manager.directory / str(taken) / "state")
        return taken, saved.item_metadata

    def restore_state(self, taken: int, abstract_state: Any) -> Any:
        """Return the state of an existing checkpoint, with the shardings of `like`.

        Raises:
            Mistake: as `restore`.
        """
        assert self.manager is not None
        return restored(self.manager, taken, abstract_state)

    def save(self, taken: int, state: Any, span: int = 1) -> None:
        """Save the state after `taken` steps, if one of the last `span` is due or all are done.

        Due is each multiple of save_every. Batches follow from the number of the next step alone.
        """
        if self.manager and (taken % self.every < span or taken >= self.steps):
            # Orbax lets processes meet by a collective of its own. On CPUs it can wait for ever for
            # one that is still under way on another device.
            jax.block_until_ready(state)
            feed = {"next_index": taken, "checksums": checksums(state).tolist()}
            contents = ocp.args.Composite(
                state=ocp.args.StandardSave(state), feed=ocp.args.JsonSave(feed)
            )
            self.manager.save(taken, args=contents)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # Where a step failed in one of several processes nobody may be there to finish a save with:
        # it stays without its name, and is no checkpoint.
        if self.manager and (kind is None or jax.process_count() == 1):
            self.manager.close()  # waits for a save that is still being written


def restored(manager: ocp.CheckpointManager, taken: int, abstract_state: Any) -> Any:
    """Return the state of a checkpoint, with the shardings of `like`.

    Raises:
        Mistake: if it cannot be read, or is not what was written.
    """
    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state), feed=ocp.args.JsonRestore()
    )
    try:
        found = manager.restore(taken, args=wanted)
        state, feed = found["state"], found["feed"]
        same = feed["next_index"] == taken
        saved = np.array(feed["checksums"], np.uint32)
    except Exception as error:  # Orbax and what it reads with raise many kinds
        # Only the first words: TensorStore's go on for pages, and the traceback has them.
        message = (str(error).splitlines() or [""])[0].partition(". See ")[0]
        raise damaged(
            manager, taken, f"it cannot be read ({type(error).__name__}: {message})"
        ) from error
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    if len(saved) != len(names) or not same:
        raise damaged(manager, taken, "its list of checksums is not of its arrays")
    bad = [names[n] for n in np.flatnonzero(checksums(state) != saved)]
    if bad:
        raise damaged(manager, taken, f"{', '.join(bad)} is not what was written")
    return state


def damaged(manager: ocp.CheckpointManager, taken: int, what: str) -> Mistake:
    """Return the error for a damaged checkpoint, from which a run cannot resume."""
    older = [step for step in manager.all_steps() if step < taken]
    then = (
        f"delete that folder to go on from step {max(older)}"
        if older
        else "there is no older one: restore it from a copy, or begin in another directory"
    )
    return Mistake(f"--checkpoint {manager.directory}: step {taken} is damaged: {what}; {then}")


def check_same_run(path: Path, config: Run) -> None:
    """Check that the configuration is that of the checkpoints; process 0 writes it at first."""
    free = FREE | set(config.AXES)
    fixed = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    fixed = json.loads(json.dumps(fixed, default=str))
    if not path.exists():
        if jax.process_index() == 0:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(fixed, indent=1) + "\n")
            part.rename(path)  # others may be reading
        return
    try:
        saved = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise Mistake(
            f"--checkpoint {path.parent}: its config.json cannot be read ({error}); restore it "
            "from a copy, or give another directory"
        ) from error
    changed = [
        f"{k}: {saved.get(k)} there, {v} here" for k, v in fixed.items() if saved.get(k) != v
    ]
    if changed:
        raise Mistake(
            f"--checkpoint {path.parent} holds another run ({'; '.join(changed)}); give its "
            "options again, or another directory"
        )
