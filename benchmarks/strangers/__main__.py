"""Does overlap() hold on train steps that were not written for it?

python -m benchmarks.strangers                         # all of them
python -m benchmarks.strangers --only tunix --only gemma

Installs published trainers, each into an environment of its own under out/, shrinks their
configurations, and runs their train steps plain and overlapped: in float32 on 8 CPU devices, where
losses, gradients and states are compared, and compiled in their own sizes (two layers) for eight
H100s, where the schedules are audited. Needs no GPU. Every run is a process of its own.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.pod_audit import commit
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.stranger import Case
from rich.console import Console
from rich.table import Table

WHAT = ("numbers", "plain", "overlapped")
MAX_DIFFERENCE = 1e-4  # of a gradient, in float32: rings add in another order

console = Console(width=180)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Cases whose names have this.")] = None,
    jax: Annotated[str, typer.Option(help="The jax version to try them on.")] = "0.12.0.1",
    out: Annotated[Path, typer.Option(help="Where rows go, as JSON lines.")] = Path(
        "out/strangers.jsonl"
    ),
) -> None:
    """Run, compare, print; exit 1 if a step failed or differs."""
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("")
    for case in [c for c in CASES if not only or any(o in c.name for o in only)]:
        python = environment(case, jax)
        for what in WHAT:
            with console.status(f"{case.name}: {what}"):
                rows.append({**in_child(python, case, what), "commit": commit()})
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            if "error" in rows[-1]:
                console.print(f"{case.name}: {what}: {rows[-1]['error']}", markup=False)
    print_rows(rows)
    if problems := [p for row in rows for p in shortfalls(row)]:
        console.print("\n".join(problems), markup=False)
        raise typer.Exit(1)


def environment(case: Case, jax: str) -> str:
    """The Python that has the stranger, in an environment made under out/.

    uv installs: pip's own resolver was still looking after twenty minutes.
    """
    folder = Path("out/environments") / f"{case.module}-jax-{jax}"
    python, stamp = folder / "bin" / "python", folder / "finished"
    if not stamp.exists():  # written last: an install that was cut short starts again
        with console.status(f"installing {case.module} into {folder}"):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
            uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
            subprocess.run([*uv, f"jax=={jax}", *case.packages], check=True)
            if case.bare:
                subprocess.run([*uv, "--no-deps", *case.bare], check=True)
            stamp.touch()
    return str(python)


def in_child(python: str, case: Case, what: str) -> dict[str, Any]:
    """One run in a process of its own; a row, also where the compiler aborts."""
    command = [python, "-m", "benchmarks.strangers.child", case.name, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        error = f"exit {done.returncode}: {' '.join((named or lines)[-1:])[:500]}"
        return {"case": case.name, "what": what, "error": error, "stderr": lines[-60:]}
    return json.loads(done.stdout.splitlines()[-1])


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(title="published train steps, overlapped")
    for name in ("step", "axes"):
        table.add_column(name)
    for name in ("matmuls", "ringed", "none", "skipped", "loss", "gradient", "state"):
        table.add_column(name, justify="right")
    for name in ("hops covered", "GB covered", "plain: covered", "temp", "compile s"):
        table.add_column(name, justify="right")
    by = {(row["case"], row["what"]): row for row in rows if "error" not in row}
    reasons = {}
    for name in dict.fromkeys(row["case"] for row in rows):
        cells = [by.get((name, what), {}) for what in WHAT]
        table.add_row(name, *_cells(*cells))
        reasons[name] = cells[2].get("skips") or {}
    console.print(table)
    for name, skips in reasons.items():
        for reason, count in skips.items():
            console.print(f"{name}: {count} left alone: {reason}", markup=False)


def _cells(numbers: dict, plain: dict, ringed: dict) -> list[str]:
    plan = ringed or numbers
    cells = [plan.get("axes", "")]
    cells += [str(plan.get(k, "")) for k in ("sites", "ringed", "no_collective")]
    cells.append(str(sum(plan.get("skips", {}).values())))
    names = ("loss_difference", "gradient_difference", "state_difference")
    cells += [f"{numbers[k]:.1e}" if k in numbers else "" for k in names]
    cells.append(f"{ringed['hops']['covered']} of {ringed['hops']['count']}" if ringed else "")
    cells += [_gigabytes(row) for row in (ringed, plain)]
    both = ringed and plain
    cells.append(f"{ringed['temp_bytes'] / plain['temp_bytes']:.2f} x" if both else "")
    cells.append(f"{ringed['compile_s']:.0f} ({plain['compile_s']:.0f})" if both else "")
    return cells


def _gigabytes(row: dict) -> str:
    if not row:
        return ""
    total = row["all"]
    return f"{total['bytes_covered'] / 1e9:.2f} of {total['bytes_moved'] / 1e9:.2f}"


def shortfalls(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, a line each."""
    name = f"{row['case']}: {row['what']}"
    if "error" in row:
        return [f"{name} failed: {row['error']}"]
    if row["what"] == "numbers" and not row["gradient_difference"] <= MAX_DIFFERENCE:
        return [f"{name}: gradient {row['worst_gradient']} is {row['gradient_difference']:.1e} off"]
    if row["what"] == "overlapped" and row["hops"]["synchronous"]:
        return [f"{name}: {row['hops']['synchronous']} hops are synchronous"]
    return []


if __name__ == "__main__":
    app()
