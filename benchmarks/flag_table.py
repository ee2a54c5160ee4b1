"""Find which versions of jaxlib have a flag, and its default.

python -m benchmarks.flag_table          # writes jaxoverlap/flags/xla.json anew; downloads 1 GB

For the versions that the package runs with, JAX is installed whole, to see which flags are compiler
options too. Of older ones jaxlib alone is asked, for when a flag came and went.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.jax_versions import environment
from jaxoverlap.flags.compiler import FlagsAnswer, ask
from jaxoverlap.flags.xla import DEAD, FLAGS, Flag

OLDER = ("0.4.30", "0.4.38", "0.5.3", "0.6.2", "0.7.2", "0.8.3", "0.9.2", "0.10.2")  # Python 3.12
SUPPORTED = ("0.11.2", "0.12.0.1")
TABLE = Path("jaxoverlap/flags/xla.json")

console = Console()
app = frame.app()


@app.command()
def main(
    older: Annotated[bool, typer.Option(help="Ask older versions of jaxlib too.")] = True,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = TABLE,
) -> None:
    """Run every version, and write what it has."""
    table = {}
    for version in OLDER if older else ():
        with console.status(f"jaxlib {version}"):
            path = jaxlib_alone(version)
            table[version] = asked(sys.executable, {"PYTHONPATH": str(path)})
    for version in SUPPORTED:
        with console.status(f"jax {version}"):
            python = environment(version)
            table[version] = asked(python, None) | {"options": options(python)}
    out.write_text(json.dumps(table, indent=1) + "\n")
    for version, row in table.items():
        console.print(f"{version}: {len(row['defaults'])} flags, {len(row['dead'])} dead ones")


def jaxlib_alone(version: str) -> Path:
    """Install this jaxlib in a folder, with nothing that it needs."""
    folder = Path("out/environments") / f"jaxlib-{version}"
    if not (folder / "jaxlib" / "version.py").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*install, folder, f"jaxlib=={version}"], check=True)
    return folder.resolve()


def asked(python: str, environment: dict[str, str] | None) -> dict[str, Any]:
    """Run a jaxlib to find which of the described and of the dead flags it has."""
    plain, *answers = ask(
        ["", *(f"--{f.name}={some_value(f)}" for f in FLAGS.values()), *(f"--{n}=1" for n in DEAD)],
        python=python,
        environment=environment,
    )
    flags, dead = answers[: len(FLAGS)], answers[len(FLAGS) :]
    has = [name for name, answer in zip(FLAGS, flags, strict=True) if not answer.unknown]
    return {
        "defaults": {name: default(plain, name) for name in has},
        "dead": [name for name, answer in zip(DEAD, dead, strict=True) if not answer.unknown],
    }


def some_value(flag: Flag) -> str:
    """Return any value, to find whether the name is known; it need not parse."""
    return {"bool": "true", "int": "1", "map": "gpus_per_node=8"}.get(flag.kind, "")


def default(plain: FlagsAnswer, name: str) -> str:
    """Return an option's default, as XLA prints it where no flag is given."""
    return ",".join((plain.fields or {}).get(name, ()))


def options(python: str) -> list[str]:
    """The flags that are compiler options too."""
    done = subprocess.run(
        [python, "-c", _OPTIONS, json.dumps({f.name: some_option(f) for f in FLAGS.values()})],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def some_option(flag: Flag) -> str:
    """Return a value of a flag, as options have it."""
    values = {"bool": "True", "int": "1", "map": "gpus_per_node=8"}
    return next(iter(flag.short), values.get(flag.kind, ""))


_OPTIONS = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
lowered, taken = jax.jit(lambda x: x).lower(1.0), []
for name, value in json.loads(sys.argv[1]).items():
    try:
        lowered.compile(compiler_options={name: value})
        taken.append(name)
    except jax.errors.JaxRuntimeError as error:
        refused = "No such compile option", "is not a valid message value"
        if not any(why in str(error) for why in refused):
            raise
print(json.dumps(taken))
"""


if __name__ == "__main__":
    app()
