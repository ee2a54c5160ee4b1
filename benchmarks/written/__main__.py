"""Compile steps as people first write them, and as an expert writes them; simulate all.

python -m benchmarks.written                            # every step
python -m benchmarks.written --only "muon" --out FILE   # one of them

Rows: each step as written and as an expert writes it, plain (the user's own compile) and
overlapped. Each is compiled for 64 H100s by XLA's GPU compiler and simulated: nothing was timed on
a GPU, and needs none. The aim: overlapped as written takes at most 1.10 of the expert's overlapped.
"""

from pathlib import Path

from rich.console import Console

from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.frame import Only, Row, Shown, Written, chosen, conclude, read_rows, write_rows
from benchmarks.written import rows as made
from benchmarks.written.rows import AS_WRITTEN, EXPERT, OVERLAPPED, PLAIN, ratio, table
from benchmarks.written.steps import STEPS

MOST = 1.10  # times the expert's overlapped step
CHILD_S = 900

app = frame.app()
console = Console(width=140)


@app.command()
def main(only: Only = None, out: Written = Path("out/written.jsonl"), shown: Shown = None) -> None:
    """Compile and simulate; exit 1 where a step is too far behind the expert's."""
    rows = read_rows(shown) if shown else _measured(chosen("only", only, STEPS), out)
    console.print(table(rows))
    ratios = {name: ratio(rows, name) for name in dict.fromkeys(row["step"] for row in rows)}
    missing = [f"{name}: a row is missing" for name, times in ratios.items() if times is None]
    far = [f"{name}: {times:.2f}" for name, times in ratios.items() if times and times > MOST]
    conclude([], [*missing, *far], console)


def _measured(names: list[str], out: Path) -> list[Row]:
    import_first([made.__name__])
    rows: list[Row] = []
    for name in names:
        for version in (AS_WRITTEN, EXPERT):
            for row in (PLAIN, OVERLAPPED):
                key = {"step": name, "mesh": STEPS[name].axes, "version": version, "row": row}
                rows.append(key | in_fork(made.measured, name, version, row, timeout_s=CHILD_S))
                write_rows(out, rows)
    return rows


if __name__ == "__main__":
    app()
