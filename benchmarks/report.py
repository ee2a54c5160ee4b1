"""Write the tables of README, docs and benchmarks/results from the rows there.

python -m benchmarks.report           # write them
python -m benchmarks.report --check   # exit 1 where a page differs from its rows, and name it

A page holds a table between `<!-- table: NAME -->` and `<!-- end table -->`; what stands there is
this command's. Each table names the commit of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import cudnn_numbers, explicit, frame, one_gpu, published_overlap, ragged
from benchmarks.drawn import rows as drawn
from benchmarks.drawn.rows import compared
from benchmarks.frame import in_ms, markdown, read_rows
from benchmarks.gpu import curve, hang, kernels, race, systems
from benchmarks.local_updates import co2_table, learning
from benchmarks.pods import rows as pods
from benchmarks.pods.names import SCHEDULED
from benchmarks.questions import answers
from benchmarks.strangers import pods as strangers
from benchmarks.varlen import table as varlen
from benchmarks.written import rows as written

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end table -->)", re.DOTALL)

app = frame.app()


@app.command()
def main(
    check: Annotated[
        bool, typer.Option(help="Write nothing; exit 1 where a page differs.")
    ] = False,
) -> None:
    """Write every table of every page, or check that they are as the rows say."""
    stale = list(pages_that_differ())
    for page, text in () if check else stale:
        page.write_text(text)
    for page, _ in stale:
        typer.echo(f"{page.relative_to(ROOT)}: {'differs from its rows' if check else 'written'}")
    if check and stale:
        raise typer.Exit(1)


def pages_that_differ() -> Iterator[tuple[Path, str]]:
    """Yield each page whose tables are not those of the rows, with its text as it should be."""
    pages = (*(ROOT / "docs").rglob("*.md"), *RESULTS.glob("*.md"))
    for page in (ROOT / "README.md", *sorted(pages)):
        text = page.read_text()
        if (new := filled(text, TABLES)) != text:
            yield page, new


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with its tables.

    Raises:
        ValueError: if the page names a table that there is not.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise ValueError(f"table {match[2]}: expected one of {', '.join(tables)}")
        return f"{match[1]}\n{tables[match[2]]()}\n\n{match[3]}"

    return _TABLE.sub(table, text)


# -- tables ---------------------------------------------------------------------------------------


def _pods() -> str:
    rows = read_rows(RESULTS / "pods.jsonl")
    cells = []
    for step in pods.steps(rows):
        mine = pods.of_step(rows, step)
        bound_s = mine.get(pods.PLAIN, {}).get("bound_s")
        cells += [(step, row["row"], *pods.cells(row, bound_s)) for row in pods.shown(mine)]
    columns = ("step", "row", *pods.COLUMNS)
    numbers = [column for column in pods.COLUMNS if column != "notes"]
    return f"{markdown(columns, cells, numbers)}\n\n{measured_at(rows)}"


def _suite() -> str:
    rows = read_rows(RESULTS / "pods.jsonl")
    cells = []
    for step in pods.steps(rows):
        named = {row["row"]: row for row in pods.shown(pods.of_step(rows, step))}
        plain, preset, overlapped = (
            named.get(kind) for kind in (pods.PLAIN, pods.BEST_PRESET, SCHEDULED)
        )
        assert plain is not None and overlapped is not None, f"{step} was not measured"
        times = f"{plain['step_s'] / overlapped['step_s']:.2f} x"
        exposed = (in_ms(row["exposed_s"]) for row in (plain, overlapped))
        steps = (in_ms(row["step_s"]) if row else "" for row in (plain, preset, overlapped))
        cells.append((step, *steps, times, *exposed))
    columns = ("step", "plain", "best preset", "overlapped", "over plain")
    columns += ("exposed: plain", "overlapped")
    return f"{markdown(columns, cells, columns[1:])}\n\n{measured_at(rows)}"


def _questions() -> str:
    rows = read_rows(RESULTS / "questions.jsonl")
    table = markdown(answers.COLUMNS, answers.table(rows), answers.NUMBERS)
    said = (*answers.summary(rows), answers.without_figure(rows), measured_at(rows))
    return f"{table}\n\n{' '.join(filter(None, said))}"


def _question_parts() -> str:
    rows = read_rows(RESULTS / "questions.jsonl")
    return markdown(answers.PART_COLUMNS, answers.parts(rows), answers.PART_COLUMNS[2:])


def _question_measured() -> str:
    rows = read_rows(RESULTS / "questions.jsonl")
    return markdown(answers.MEASURED_COLUMNS, answers.measured(rows), answers.MEASURED_COLUMNS[1:4])


def _meshes() -> str:
    rows = read_rows(RESULTS / "questions.jsonl")
    table = markdown(answers.MESH_COLUMNS, answers.by_mesh(rows), answers.MESH_NUMBERS)
    return f"{table}\n\n{measured_at(rows)}"


def measured_at(rows: Sequence[pods.Row]) -> str:
    """Say at which commits, and with which jaxlib, rows were measured."""
    commits = ", ".join(sorted({row["commit"] for row in rows if "commit" in row}))
    versions = ", ".join(sorted({row["jax"] for row in rows if "jax" in row}))
    return f"Measured at {commits} with jax {versions}, by simulation."


def _ragged() -> str:
    rows = read_rows(RESULTS / "ragged.jsonl")
    numbers = [column for column in ragged.COLUMNS if column not in ("step", "taken")]
    return f"{markdown(ragged.COLUMNS, ragged.table(rows), numbers)}\n\n{measured_at(rows)}"


def _published_overlap() -> str:
    rows = read_rows(RESULTS / "published_overlap.jsonl")
    columns = published_overlap.COLUMNS
    table = markdown(columns, published_overlap.table(rows), columns[1:7])
    return f"{table}\n\n{measured_at(rows)}"


def _explicit() -> str:
    rows = read_rows(RESULTS / "explicit.jsonl")
    table = markdown(explicit.COLUMNS, explicit.table(rows), explicit.COLUMNS[2:])
    return f"{table}\n\n{measured_at(rows)}"


def _one_gpu() -> str:
    rows = read_rows(RESULTS / "one_gpu.jsonl")
    return f"{markdown(one_gpu.COLUMNS, one_gpu.table(rows), one_gpu.COLUMNS[1:])}\n\n{_on(rows)}"


def _cudnn_numbers() -> str:
    rows = read_rows(RESULTS / "cudnn_numbers.jsonl")
    table = markdown(cudnn_numbers.COLUMNS, cudnn_numbers.table(rows), cudnn_numbers.COLUMNS[1:])
    return f"{table}\n\n{_on(rows)}"


def _on(rows: Sequence[pods.Row]) -> str:
    """Say on which GPU rows were measured, and with which versions."""
    devices, platforms, versions = (
        ", ".join(sorted({row[key] for row in rows})) for key in ("device", "platform", "jax")
    )
    return f"Measured on one {devices}, {platforms}, jax {versions}."


def _drawn() -> str:
    rows = read_rows(RESULTS / "drawn.jsonl")
    table = markdown(drawn.GAINS, list(drawn.gains(compared(rows))), drawn.GAINS[1:])
    return f"{table}\n\n{measured_at(rows)}"


def _third_party() -> str:
    rows = read_rows(RESULTS / "strangers_pods.jsonl")
    cells = [(step.name, *strangers.cells(step)) for step in compared(rows)]
    numbers = [column for column in strangers.COLUMNS if column != "decided"]
    return f"{markdown(('step', *strangers.COLUMNS), cells, numbers)}\n\n{measured_at(rows)}"


def _local_updates() -> str:
    files = ("local_updates_images.jsonl", "local_updates_text.jsonl")
    rows = [row for file in files for row in read_rows(RESULTS / file)]
    return markdown(learning.COLUMNS, learning.page_table(rows), learning.COLUMNS[1:])


def _co2() -> str:
    rows = read_rows(RESULTS / "local_updates_moved.jsonl")
    columns = co2_table.columns(rows)
    return markdown(columns, co2_table.page_table(rows), columns[1:])


def _varlen() -> str:
    rows = read_rows(RESULTS / "varlen_lists.jsonl")
    columns = varlen.COLUMNS
    table = markdown(columns, varlen.page_table(rows), columns[2:])
    return f"{table}\n\n{varlen.summary(rows)}"


def _gpu(name: str, module: Any) -> str:
    """Return the table of a measurement on one GPU, or that there is none."""
    rows = read_rows(RESULTS / f"gpu_{name}.jsonl")
    if not rows:
        return f"Not measured yet: `python -m benchmarks.gpu {name}` on a machine with a GPU."
    columns, numbers, cells = module.shown(rows)
    said = "".join(f"- {line}.\n" for line in getattr(module, "verdicts", lambda _: [])(rows))
    known = [row for row in rows if {"device", "platform", "jax"} <= row.keys()]
    return f"{markdown(columns, cells, numbers)}\n\n{said}\n{_on(known) if known else ''}".strip()


def _written() -> str:
    rows = read_rows(RESULTS / "written.jsonl")
    table = markdown(written.COLUMNS, written.cells(rows), written.COLUMNS[2:])
    return f"{table}\n\n{measured_at(rows)}"


TABLES: Mapping[str, Callable[[], str]] = {
    "pods": _pods,
    "suite": _suite,
    "questions": _questions,
    "question parts": _question_parts,
    "question measured": _question_measured,
    "meshes": _meshes,
    "ragged": _ragged,
    "explicit": _explicit,
    "published overlap": _published_overlap,
    "one gpu": _one_gpu,
    "cudnn numbers": _cudnn_numbers,
    "drawn": _drawn,
    "third party": _third_party,
    "local updates": _local_updates,
    "co2": _co2,
    "varlen": _varlen,
    "written": _written,
    "gpu race": partial(_gpu, "race", race),
    "gpu kernels": partial(_gpu, "kernels", kernels),
    "gpu curve": partial(_gpu, "curve", curve),
    "gpu systems": partial(_gpu, "systems", systems),
    "gpu deadlocks": partial(_gpu, "deadlocks", hang),
}


if __name__ == "__main__":
    app()
