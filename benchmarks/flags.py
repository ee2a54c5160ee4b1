"""Does every version of jaxlib take our presets, and does the check find the dead flags of others?

python -m benchmarks.flags                                  # the installed jax
python -m benchmarks.flags --jax 0.11.2 --jax 0.12.0.1      # each in an environment of its own

For each preset, a small module is compiled for its chip with all its options, and its line for
XLA_FLAGS is given to the compiler, which has to set what the options say. Then published lines are
checked, and a list of dead flags among live ones. Needs no GPU.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.children import in_child
from benchmarks.frame import Row, Written, conclude, sheet, write_rows
from benchmarks.jax_versions import environment

console = Console(width=160)
app = frame.app()


@app.command()
def main(
    versions: Annotated[
        list[str] | None, typer.Option("--jax", help="A jax version; default: the installed one.")
    ] = None,
    out: Written = Path("out/flags.jsonl"),
) -> None:
    """Compile and check; exit 1 if an option is refused or a dead flag is not found."""
    rows = []
    for version in versions or [jax.__version__]:
        with console.status(f"jax {version}"):
            rows.append(
                {"jax": version, **in_child("benchmarks.flags", python=environment(version))}
            )
    write_rows(out, rows)
    failed = [f"jax {r['jax']}: {r['error']}" for r in rows if "error" in r]
    rows = [r for r in rows if "error" not in r]
    print_presets(rows)
    print_published(rows)
    for row in rows:
        detected, planted = len(row["found"]), len(row["planted"])
        console.print(f"jax {row['jax']}: {detected} of {planted} planted dead flags found, "
                      f"{len(row['accused'])} live ones taken for dead")  # fmt: skip
    conclude([], [*failed, *shortfalls(rows)], console)


def child() -> Row:
    """Check the presets and flags with the version here: the row of a child process."""
    from benchmarks.frame import provenance
    from benchmarks.published_flags import PUBLISHED
    from jaxoverlap.flags import DEAD, PRESETS, check

    live = PUBLISHED["AxLearn a3-mega"].split()  # nothing dead in it
    planted = [f"--{name}={'0' if name.endswith('level') else 'true'}" for name in DEAD]
    dead = {f.text for f in check(" ".join((*live, *planted))) if f.dead}
    return {
        **provenance(),
        "presets": {name: preset_row(p) for name, p in PRESETS.items()},
        "published": {
            name: [(f.status, f.text, f.note) for f in check(line)]
            for name, line in PUBLISHED.items()
        },
        "planted": planted,
        "found": sorted(dead & set(planted)),
        "accused": sorted(dead - set(planted)),
    }


def preset_row(preset: Any) -> Row:
    """Check whether a preset's options compile, and whether XLA_FLAGS set the same."""
    from jaxoverlap.flags.compiler import ask

    (answer,) = ask([preset.xla_flags])
    fields = answer.fields or {}
    wanted = {n: v.lower() if v in ("True", "False") else v for n, v in preset.options.items()}
    return {
        "chip": preset.chip,
        "options": len(preset.options),
        "variables": len(preset.variables),
        "refused": compile_error(preset),
        "otherwise": [n for n, v in wanted.items() if set(fields.get(n, ())) != set(v.split(","))],
    }


def compile_error(preset: Any) -> str:
    """Say why a gather, a matmul and a hop on four GPUs do not compile with it; "" if they do."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxoverlap

    mesh = jaxoverlap.pod_mesh(f"{preset.chip}:1x4", {"x": 4})
    rows = jax.ShapeDtypeStruct((512, 512), "bfloat16", sharding=NamedSharding(mesh, P("x")))

    def body(x: jax.Array) -> jax.Array:
        next_one = [(i, (i + 1) % 4) for i in range(4)]
        return jax.lax.ppermute(x @ jax.lax.all_gather(x, "x", tiled=True), "x", next_one)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    try:
        jax.jit(mapped).lower(rows).compile(compiler_options=preset.options)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def print_presets(rows: list[Row]) -> None:
    jaxes = [f"jax {row['jax']}" for row in rows]
    columns = ("preset", "chip", "options", "variables", *jaxes)
    title = "our presets: options compiled for the chip, and given as XLA_FLAGS"
    table = sheet(title, columns, words=("preset", "chip", *jaxes))
    for name in rows[0]["presets"] if rows else ():
        presets = [row["presets"][name] for row in rows]
        head = (name, presets[0]["chip"], str(presets[0]["options"]), str(presets[0]["variables"]))
        table.add_row(
            *head, *(r["refused"] or ", ".join(r["otherwise"]) or "all taken" for r in presets)
        )
    console.print(table)


def print_published(rows: list[Row]) -> None:
    """Print a row a published line: its flags, and those that XLA rejects, ignores or renames."""
    jaxes = [f"jax {row['jax']}" for row in rows]
    columns = ("published", "flags", *jaxes)
    table = sheet("what others publish, as XLA takes it", columns, words=("published", *jaxes))
    for name in rows[0]["published"] if rows else ():
        table.add_row(
            name,
            str(len(rows[0]["published"][name])),
            *(told(row["published"][name]) for row in rows),
        )
    console.print(table)


def told(findings: list[list[str]]) -> str:
    by_status: dict[str, list[str]] = {}
    for status, text, _ in findings:
        if status in ("rejected", "bad value", "ignored", "renamed"):
            name = text.removeprefix("--xla_gpu_").partition("=")[0]
            by_status.setdefault(status, []).append(name)
    order = ("rejected", "bad value", "ignored", "renamed")
    parts = [f"{s}: {', '.join(by_status[s])}" for s in order if s in by_status]
    return "\n".join(parts) or "all taken"


def shortfalls(rows: list[Row]) -> list[str]:
    """List what is missing, a line each."""
    problems = []
    for row in rows:
        for name, presets in row["presets"].items():
            if presets["refused"] or presets["otherwise"]:
                problems.append(
                    f"jax {row['jax']}, {name}: {presets['refused'] or presets['otherwise']}"
                )
        missed = set(row["planted"]) - set(row["found"])
        problems += [f"jax {row['jax']}: not found: {', '.join(sorted(missed))}"] if missed else []
        problems += [f"jax {row['jax']}: {flag} is live" for flag in row["accused"]]
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child()))
    else:
        app()
