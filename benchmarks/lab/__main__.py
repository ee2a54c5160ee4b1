"""Race jaxoverlap, plain jit and PyTorch on hosts of this machine whose links are slow.

    make lab                                     # all of it, under 20 minutes; root
    python -m benchmarks.lab --smoke             # two hosts, one rate, seconds
    python -m benchmarks.lab --case tensor --rate 1000 --runs 9

Let nothing else run on the machine meanwhile. docs/lab.md says what is raced and how to read it.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import frame
from benchmarks.frame import provenance
from benchmarks.lab import Lab, Network, why_not
from benchmarks.lab.peer import torch_python
from benchmarks.lab.report import draw, prediction_error, rows_of, table
from benchmarks.lab.timing import timed

JAX, TORCH = "benchmarks.lab.races.on_hosts", "benchmarks.lab.races.torch_peer"
BLOCKS = {
    "tensor": dict(rows=2048, hidden=1024, inner=4096, blocks=3),
    "data": dict(rows=2048, hidden=512, inner=2048, blocks=3),
    "fsdp": dict(rows=2048, hidden=512, inner=2048, blocks=3),
}
GPT: dict[str, Any] = dict(hidden=256, mlp=1024, heads=4, layers=2, sequence=256, batch=16)
CASES = (*BLOCKS, "gpt")
RATES = (4000.0, 2000.0, 1000.0, 500.0)
SMALL = dict(rows=64, hidden=64, inner=128, blocks=2)
SMALL_GPT: dict[str, Any] = GPT | dict(hidden=64, mlp=128, sequence=32, layers=1)
console = Console(width=110)
app = frame.app()

Row = dict[str, Any]


@app.command()
def main(
    hosts: Annotated[int, typer.Option(help="Hosts, each with one CPU device.")] = 4,
    rate: Annotated[list[float] | None, typer.Option(help="Of links, in Mbit/s.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}.")] = None,
    runs: Annotated[int, typer.Option(help="Of each contender at each rate.")] = 7,
    torch: Annotated[Path, typer.Option(help="PyTorch's own environment.")] = Path("out/lab/torch"),
    peer: Annotated[bool, typer.Option(help="Race PyTorch too.")] = True,
    out: Annotated[Path, typer.Option(help="Rows, tables, plot.")] = Path("out/lab"),
    smoke: Annotated[bool, typer.Option("--smoke", help="Two hosts, small, one rate.")] = False,
) -> None:
    """Race on hosts of this machine, show a table, and write rows and a plot."""
    if reason := why_not():
        console.print(f"no lab here: {reason}")
        raise typer.Exit(2)
    if unknown := set(case or ()) - set(CASES):
        raise typer.BadParameter(f"--case {', '.join(unknown)}: expected {', '.join(CASES)}")
    cases, rates = case or list(CASES), rate or list(RATES)
    if smoke:
        hosts, rates, runs, peer = 2, [1000.0], 2, False
    python, missing = torch_python(torch) if peer else ("", "not asked for")
    rows: list[Row] = []
    with Progress(console=console) as bar, Lab(Network(hosts=hosts, rate_mbit=None)) as lab:
        race = _Race(lab, bar, cases, rates, runs, smoke)
        out.mkdir(parents=True, exist_ok=True)
        with (out / "race.jsonl").open("w", buffering=1) as file:  # a race cut short has its rows
            for row in itertools.chain(race.jax(), race.pytorch(python) if python else ()):
                rows.append(row)
                print(json.dumps(row), file=file)
    console.print(table(rows))
    if not python:
        console.print(f"PyTorch was not raced: {missing}")
    console.print(f"mean error of the predictions: {prediction_error(rows):.1%}")
    draw(rows, out / "race.svg")
    console.print(f"rows: {out / 'race.jsonl'}; plot: {out / 'race.svg'}")


class _Race:
    """The first race on a lab that is up."""

    def __init__(
        self,
        lab: Lab,
        bar: Progress,
        cases: list[str],
        rates: list[float],
        runs: int,
        smoke: bool,
    ):
        self._lab, self._bar, self._cases, self._rates = lab, bar, cases, rates
        self._runs, self._small = runs, smoke
        self._task = bar.add_task("", total=None)

    def jax(self) -> Iterator[Row]:
        """Race what runs on JAX: at every rate prices first, then each case."""
        with self._lab.processes() as hosts:
            self._say("starting JAX")
            hosts.call(f"{JAX}:start")
            for case in self._cases:
                self._say(f"compiling {case}")
                self._add(hosts, case)
            for rate in self._rates:
                self._lab.shape(rate)
                self._say(f"prices at {rate:g} Mbit/s")
                hosts.call(f"{JAX}:measure_prices", smoke=self._small)
                for case in self._cases:
                    self._say(f"{case} at {rate:g} Mbit/s")
                    answers = hosts.call(f"{JAX}:race", case=case, runs=self._runs)
                    first = answers[0]
                    more = {k: first[k] for k in ("predicted_s", "closed_form_bytes", "plan")}
                    more |= {"error": max(a["error"] for a in answers), **self._stamp("JAX")}
                    yield from rows_of(case, rate, timed([a["rows"] for a in answers]), more)

    def pytorch(self, python: str) -> Iterator[Row]:
        """Race PyTorch's DDP and FSDP2, each against its own compute and communication."""
        ways = [case for case in self._cases if case in ("data", "fsdp")]
        if not ways:
            return
        with self._lab.processes(python=python) as hosts:
            self._say("starting PyTorch")
            version = hosts.call(f"{TORCH}:start", threads=1)[0]
            for way in ways:
                hosts.call(f"{TORCH}:add", way=way, **BLOCKS[way])
            for rate in self._rates:
                self._lab.shape(rate)
                for way in ways:
                    self._say(f"PyTorch, {way} at {rate:g} Mbit/s")
                    answers = hosts.call(f"{TORCH}:race", case=way, runs=self._runs)
                    more = {"version": version, **self._stamp("PyTorch")}
                    yield from rows_of(way, rate, timed([a["rows"] for a in answers]), more)

    def _add(self, hosts: Any, case: str) -> None:
        if case in BLOCKS:
            size = SMALL if self._small else BLOCKS[case]
            hosts.call(f"{JAX}:add_blocks", way=case, size=size)
            return
        count = self._lab.network.hosts
        axes = dict(data=2, model=count // 2) if count % 2 == 0 else dict(data=count, model=1)
        hosts.call(f"{JAX}:add_gpt", name=case, axes=axes, sizes=SMALL_GPT if self._small else GPT)

    def _stamp(self, framework: str) -> Row:
        today = datetime.date.today().isoformat()
        return {"framework": framework, "hosts": self._lab.network.hosts, "date": today} | (
            provenance()
        )

    def _say(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        if not console.is_terminal:
            console.print(f"{datetime.datetime.now():%H:%M:%S} {what}")


if __name__ == "__main__":
    app()
