"""The timeline of a 7B step, plain above overlapped: python -m benchmarks.gpt7b_page.

Compiles the step of models/gpt.py both ways, prints both simulations, and writes the page and
the picture that the README shows. Compiles it both ways again for hosts with a process for each
GPU, where NCCL sends the hops. Needs no GPU.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import jaxoverlap
from benchmarks.pod_step import compile_on, in_child
from models import gpt
from models.config import Config

POD, GPUS_PER_HOST, MESH = "h100-sxm:8x8", 8, {"data": 8, "model": 8}
SIZES = {"layers": 32, "batch": 64}

app = typer.Typer(add_completion=False)
console = Console(width=160)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for gpt7b.html and gpt7b.svg.")] = Path("out"),
) -> None:
    """Compile, simulate, print and draw."""
    simulations = {}
    for pod in (POD, f"{POD}/{GPUS_PER_HOST}"):
        for step in ("plain", "overlapped"):
            with console.status(f"{step}, {pod}"), tempfile.NamedTemporaryFile() as file:
                row = in_child("benchmarks.gpt7b_page", step, pod, file.name)
                if "error" in row:
                    console.print(f"{step}: {row['error']}")
                    raise typer.Exit(1)
                simulations[pod, step] = jaxoverlap.simulate(Path(file.name).read_text(), pod)
            print(f"\n{step}\n{simulations[pod, step]}")
    overlapped, plain = simulations[POD, "overlapped"], simulations[POD, "plain"]
    overlapped.to_html(out / "gpt7b.html", plain=plain)
    overlapped.to_svg(out / "gpt7b.svg", plain=plain)


def child(step: str, pod: str, path: str) -> dict[str, float]:
    """Compile one of the two for a pod in a child process, and write its module's text."""
    mesh = jaxoverlap.pod_mesh(pod, MESH)
    config = Config.pod(**MESH, **SIZES)
    args = gpt.abstract_args(config, mesh)
    compiled = compile_on(gpt.make_step(config, mesh), args, mesh, pod, step)
    Path(path).write_text(compiled.text)
    return {"compile_s": compiled.row["compile_s"]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        app()
