"""The command that prints presets of flags, and finds dead flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from jaxoverlap._util.progress import working
from jaxoverlap.cli.forms import ENVIRONMENT_HELP, written
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json, show_table

if TYPE_CHECKING:
    from jaxoverlap.flags import Conflict, Finding, Preset

_JAXLIB = metadata.version("jaxlib")


class PresetForm(StrEnum):
    """The form in which a preset is printed."""

    OPTIONS = "options"
    XLA_FLAGS = "xla-flags"
    ENV = "env"
    SLURM = "slurm"
    K8S = "k8s"
    DOCKERFILE = "dockerfile"


def _presets(incomplete: str) -> list[str]:
    from jaxoverlap.flags import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


@command
def flags(
    pod: Annotated[
        str | None,
        typer.Argument(
            help="A preset (gcp-a3-mega) or a cluster (h100-sxm:8x8).", autocompletion=_presets
        ),
    ] = None,
    *,
    form: Annotated[
        PresetForm | None,
        typer.Option(
            "--as",
            help="options: JSON, which is a Python dict too, for jax.jit(compiler_options=). "
            f"xla-flags: a line for XLA_FLAGS. {ENVIRONMENT_HELP}",
        ),
    ] = None,
    check_: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="FLAGS|FILE",
            help="Say which of these flags the installed jaxlib rejects, ignores or has renamed: "
            "what XLA_FLAGS holds, or a launch script (shell, YAML, Python).",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Print XLA options and NCCL variables for a pod, with reasons; or check yours.

    With --check, exit code 1 if a flag is dead: rejected, of a bad value, or ignored.
    """
    if (pod is None) == (check_ is None):
        raise ValueError(
            "flags needs a pod, as in `jaxoverlap flags h100-sxm:8x8`, or else --check and what "
            "XLA_FLAGS holds"
        )
    if check_ is not None:
        return _check(check_, json)
    from jaxoverlap.flags import preset

    _print(preset(pod or ""), pod or "", form, json)
    return OK


def _print(chosen_preset: Preset, pod: str, form: PresetForm | None, json: bool) -> None:
    if form is PresetForm.XLA_FLAGS:
        say(chosen_preset.xla_flags)
    elif form is PresetForm.OPTIONS:
        show_json(chosen_preset.options)
    elif form is not None:
        cluster = pod if ":" in pod else None
        say(written(chosen_preset.environment, form, cluster).rstrip("\n"))
    elif json:
        show_json({**msgspec.to_builtins(chosen_preset), "xla_flags": chosen_preset.xla_flags})
    else:
        _tables(chosen_preset)


def _tables(chosen_preset: Preset) -> None:
    """Print a preset as tables; its sources are numbered and listed at the end."""
    sources: dict[str, int] = {}

    def cite(source: str) -> str:
        return ", ".join(str(sources.setdefault(s, len(sources) + 1)) for s in source.split("; "))

    for title, variables in ((f"{chosen_preset.name}: XLA options", False), ("environment", True)):
        rows = [
            (s.name, s.value, s.reason, cite(s.source))
            for s in chosen_preset.settings
            if s.is_variable == variables
        ]
        show_table(title, ("name", "value", "why", "source"), rows)
    _conflicts(chosen_preset.conflicts, cite)
    from jaxoverlap.flags.presets import dated

    for source, number in sources.items():
        say(f" {number:2}  {dated(source)}")


def _conflicts(conflicts: tuple[Conflict, ...], cite: Callable[[str], str]) -> None:
    rows = []
    for c in conflicts:
        for i, (value, source) in enumerate(c.said):
            head = (c.name, c.ours or "not set") if i == 0 else ("", "")
            rows.append((*head, value, cite(source), c.why if i == 0 else ""))
    columns = ("name", "taken", "published", "source", "why")
    show_table("where sources disagree, with each other or with rings", columns, rows)


def _check(text: str, json: bool) -> int:
    from jaxoverlap.flags import check

    with working(f"checking the flags with jaxlib {_JAXLIB}"):
        findings = check(text)
    if json:
        show_json({"jaxlib": _JAXLIB, "findings": findings})
    else:
        _findings(findings)
    return NO if any(f.dead for f in findings) else OK


def _findings(findings: list[Finding]) -> None:
    """Print a table of the flags with a remark, dead flags first, and the count of each status."""
    odd = sorted((f for f in findings if f.status != "set"), key=lambda f: not f.dead)
    if odd:
        show_table(
            "flags with a remark", ("", "flag", ""), [(f.status, f.text, f.note) for f in odd]
        )
    counts = Counter(f.status for f in findings)
    say(f"jaxlib {_JAXLIB}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
