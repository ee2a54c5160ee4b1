"""Draw the plan in docs/varlen.md: one batch of a real list on two nodes of eight H100s.

python -m benchmarks.varlen.picture --lengths FOLDER docs/varlen.png
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.varlen.table import first, place_of
from jaxoverlap.train.varlen import Planner


def main(out: Path, lengths: Annotated[Path, typer.Option(help="Folder of lists.")]) -> None:
    """Plan a batch of 64K tokens whose longest document is longer than a GPU holds."""
    known = np.loadtxt(lengths / "wlbllm.txt", dtype=int)
    place = place_of("C", 2, 4096)
    made = first(known, 16 * 4096, 40, seed=1)
    batch = max(made, key=lambda b: int(b.max()) if len(b) > 6 else 0)
    plan = Planner(place.costs, place.nodes, capacity=place.capacity)(batch)
    print(plan)
    plan.draw(out)


if __name__ == "__main__":
    typer.run(main)
