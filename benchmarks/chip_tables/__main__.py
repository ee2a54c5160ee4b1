"""Make the package's tables again: jaxoverlap/cost/data/CHIP.json, from published measurements.

    pip install '.[chip-tables]'
    python -m benchmarks.chip_tables

It prints the errors of the fits on measurements that were held back.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import track

import jaxoverlap.cost
from benchmarks.chip_tables.sources import SOURCES, chip_tables
from jaxoverlap.calibrate.calibrate import errors, write

PACKAGED = Path(jaxoverlap.cost.__path__[0]) / "data"


def main() -> None:
    today, made = datetime.date.today().isoformat(), []
    for source in track(SOURCES, "chips"):
        made.append(chip_tables(source, today))
        write(made[-1], PACKAGED / f"{source.chip}.json")
    Console().print(errors(made))


if __name__ == "__main__":
    typer.run(main)
