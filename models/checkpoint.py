"""Save a training state and find it again; a run only resumes what it would have computed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from models.config import Mistake, Run

# These may change from one run to the next, as may the mesh: they say how long a run is, and what
# it writes.
FREE = {"steps", "plain", "workers", "checkpoint", "save_every", "metrics", "log_every"}


class Checkpoints:
    """The states kept in `config.checkpoint`; keeps nothing where that is None."""

    def __init__(self, config: Run):
        self.manager = None
        if config.checkpoint is None:
            return
        directory = config.checkpoint.absolute()
        if directory.exists() and not directory.is_dir():
            raise Mistake(f"--checkpoint {config.checkpoint} is a file; give a directory")
        directory.mkdir(parents=True, exist_ok=True)
        check_same_run(directory / "config.json", config)
        self.every, self.steps = config.save_every, config.steps
        # The next line alone decides which steps are kept.
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(directory, options=options)

    def restore(self, abstract_state: Any) -> tuple[Any, int]:
        """Return (state, steps taken) of the newest checkpoint, placed as asked, or (None, 0)."""
        taken = self.manager.latest_step() if self.manager else None
        if not self.manager or taken is None:
            return None, 0
        return self.manager.restore(taken, args=ocp.args.StandardRestore(abstract_state)), taken

    def save(self, taken: int, state: Any, span: int = 1) -> None:
        """Keep the state after `taken` steps, if one of the last `span` is due or all are taken.

        Due is each multiple of save_every.
        """
        if self.manager and (taken % self.every < span or taken >= self.steps):
            self.manager.save(taken, args=ocp.args.StandardSave(state))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        if self.manager:
            self.manager.close()  # waits for a save that is still being written


def check_same_run(path: Path, config: Run) -> None:
    """Write the configuration beside the checkpoints, or compare it with the one that is there."""
    free = FREE | set(config.AXES)
    fixed = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    fixed = json.loads(json.dumps(fixed, default=str))
    if not path.exists():
        path.write_text(json.dumps(fixed, indent=1) + "\n")
        return
    saved = json.loads(path.read_text())
    changed = [
        f"{k}: {saved.get(k)} there, {v} here" for k, v in fixed.items() if saved.get(k) != v
    ]
    if changed:
        raise Mistake(
            f"--checkpoint {path.parent} holds another run ({'; '.join(changed)}); give its "
            "options again, or another directory"
        )
