"""Draw the plan in docs/varlen.md: one batch of a real list on two nodes of eight H100s.

python -m benchmarks.varlen.picture --lengths FOLDER docs/varlen.png
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.varlen.table import first, setup_of
from jaxoverlap.train.varlen import Planner


def main(out: Path, lengths: Annotated[Path, typer.Option(help="Folder of lists.")]) -> None:
    """Plan batches of 128K tokens, no document above a quarter; draw the one of most ring sizes."""
    known = np.loadtxt(lengths / "wlbllm.txt", dtype=int)
    setup = setup_of("C", 2, 8192)
    planner = Planner(setup.costs, setup.nodes, capacity=setup.capacity)
    sample = first(known, 16 * 8192, 60, seed=1, share=0.25)
    planner.fit(sample)
    plans = map(planner, sample)
    plan = max(plans, key=lambda plan: (len(set(plan.size.tolist())), plan.balance))
    print(plan)
    plan.draw(out)


if __name__ == "__main__":
    typer.run(main)
