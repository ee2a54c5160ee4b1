"""Make a file of cost tables: `python -m jaxoverlap.calibrate`.

With `--here`, of the devices that JAX sees on this machine; with `--links` as well, only of what
joins them. With `--from-profile`, the tables of a
chip, corrected by what a profile of your own step shows. The package's own tables are made by
benchmarks/chip_tables.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import msgspec
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from jaxoverlap._util.files import check_writable, write_atomically
from jaxoverlap.calibrate import from_profile, links, this_machine
from jaxoverlap.calibrate.this_machine import USUAL
from jaxoverlap.cost import find
from jaxoverlap.cost.interpolation import FitError
from jaxoverlap.cost.tables import ChipTables, decode, packaged
from jaxoverlap.hardware.cluster import Cluster, chips
from jaxoverlap.profiling import profile


def write(tables: ChipTables, path: Path) -> None:
    """Write a file of cost tables atomically.

    Where only the date would change the file keeps the one that it has.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):  # none, or of another format
        before = decode(path.read_bytes(), str(path))
        tables = msgspec.structs.replace(tables, date=before.date)
        if tables == before:
            return
    text = msgspec.json.format(msgspec.json.encode(tables), indent=1).decode()
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s+", " ", match.group()), text)
    write_atomically(path, text + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m jaxoverlap.calibrate", description=__doc__)
    parser.add_argument(
        "--here", type=Path, metavar="FILE", help="measure this machine's devices, and write FILE"
    )
    parser.add_argument(
        "--links",
        action="store_true",
        help="with --here: measure links alone, in under a minute; kernels by the package's tables "
        "of the chip, or by those that FILE has",
    )
    job = parser.add_argument_group(
        "several processes", "one on each host, all started alike: the links between are measured"
    )
    job.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, for all the same")
    job.add_argument("--processes", type=int, help="in all")
    job.add_argument("--process", type=int, help="this one, from 0")
    own = parser.add_argument_group(
        "a profile", "your own step's, as `jaxoverlap profile` reads it"
    )
    own.add_argument("--from-profile", type=Path, metavar="PATH", help="its file or folder")
    own.add_argument("--pod", metavar="CLUSTER", help="where it ran, as in h100-sxm:8x8")
    own.add_argument("--prices", type=Path, metavar="FILE", help="correct this price file instead")
    own.add_argument("--out", type=Path, metavar="FILE", help="for overlap(prices=FILE)")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.here, options.out)
    except ValueError as error:
        parser.error(str(error))
    if not options.from_profile and (options.pod or options.prices or options.out):
        parser.error("--pod, --prices and --out go with --from-profile")
    if options.from_profile:
        if options.here or options.links or not options.out or not (options.pod or options.prices):
            parser.error(
                "--from-profile needs --out, and --pod or --prices; without --here and --links"
            )
        _from_profile(options.from_profile, options.pod, options.prices, options.out)
        return
    if not options.here:
        parser.error("give --here FILE, also with --links, or --from-profile PATH")
    said = (options.coordinator, options.processes, options.process)
    if any(s is not None for s in said):
        if None in said:
            parser.error("--coordinator, --processes and --process go together")
        jax.distributed.initialize(*said)
    today = datetime.date.today().isoformat()
    console = Console()
    console.quiet = bool(options.process)  # only process 0 speaks
    try:
        measure = _links(options.here) if options.links else _whole()
    except ValueError as error:
        parser.error(str(error))
    made = _measured(measure, today, console)
    if jax.process_index() == 0:
        write(made, options.here)
    console.print(errors([made]))


class _Measurement(NamedTuple):
    """A measurement, which calls `advance` so many times."""

    tables: Callable[[str, Callable[[str], None]], ChipTables]
    advances: int


def _whole() -> _Measurement:
    tables = partial(this_machine.tables_here, grid=USUAL)
    return _Measurement(tables, this_machine.measurements(USUAL))


def _links(path: Path) -> _Measurement:
    """Return the measurement of links, with kernels by the tables of the chip or of a file.

    Raises:
        ValueError: if there are no such tables.
    """
    hosts, sizes = links.hosts_here(), links.USUAL
    chip = next((c for c in chips() if c.device_name == jax.devices()[0].device_kind), None)
    loops = None
    if chip and packaged(chip.name):
        one = Cluster(chip, 1, 1, chip.nvlink, chip.network)
        base, loops = find.cost_model(one).tables, find.cost_model(one, loops=True).tables
    elif path.exists():
        base = decode(path.read_bytes(), str(path))
    else:
        raise ValueError(
            f"--links: the package has no tables of {jax.devices()[0].device_kind}, and {path} is "
            "not there; measure all first, without --links"
        )
    tables = partial(links.tables_with_links, base, loops=loops, hosts=hosts, sizes=sizes)
    return _Measurement(tables, links.measurements(sizes, hosts))


def _measured(measurement: _Measurement, today: str, console: Console) -> ChipTables:
    """Measure; show what is measured, and how long it will still take."""
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("here", total=measurement.advances)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        return measurement.tables(today, advance)


def _from_profile(path: Path, pod: str | None, prices: Path | None, out: Path) -> None:
    """Correct a cost model by a profile, write its tables, and show by how much."""
    cost = find.cost_model(pod, table=prices)
    found = profile.read(path, cost)
    tables = from_profile.corrected(found, cost)
    write(tables, out)
    grid = Table(title=f"Measured / predicted by {path}, in {out}")
    for column in ("class", "measured ms", "predicted ms", "ratio", "in the file"):
        grid.add_column(column, justify="left" if column == "class" else "right")
    for r in found.ratios:
        used = tables.profiled[1].get(r.kind)
        seconds = (f"{s * 1e3:.2f}" for s in (r.measured_s, r.predicted_s))
        grid.add_row(r.kind, *seconds, f"{r.ratio:.2f}", f"{used:.2f}" if used else "no table")
    Console().print(grid)


def errors(made: Sequence[ChipTables]) -> Table:
    """Tabulate the error of each fit on the measurements that were held back from it."""
    grid = Table(title="Error of the fits, on rows held back")
    for column in ("chip", "rows of", "held back", "mean", "median", "worst"):
        grid.add_column(column, justify="left" if column in ("chip", "rows of") else "right")
    for tables in made:
        errors: dict[str, FitError | None] = {
            f"{dtype} matmuls": table.error for dtype, table in tables.matmuls.items()
        }
        if tables.attention:
            errors["attention"] = tables.attention.error
            errors["attention without a mask (not fitted)"] = tables.attention.error_full
        errors["collectives"] = tables.collectives.error
        errors["collectives of other sizes"] = tables.collectives.error_new_sizes
        errors["permutes (all fitted)"] = tables.permutes.error
        for name, error in errors.items():
            if error and error.rows:
                parts = (f"{part:.1%}" for part in (error.mean, error.median, error.worst))
                grid.add_row(tables.chip, name, str(error.rows), *parts)
    return grid
