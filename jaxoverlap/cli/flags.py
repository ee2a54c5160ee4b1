"""Run the command about flags: show presets, and find dead flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from importlib import metadata
from typing import Annotated

import msgspec
import typer

from jaxoverlap.cli.output import NO, OK, Json, command, say, show_json, show_table
from jaxoverlap.flags import PRESETS, Conflict, Finding, Preset, check, preset

_JAXLIB = metadata.version("jaxlib")


class Form(StrEnum):
    """The form in which a preset is printed."""

    OPTIONS = "options"
    XLA_FLAGS = "xla-flags"
    ENV = "env"


def _presets(incomplete: str) -> list[str]:
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
        Form | None,
        typer.Option(
            "--as",
            help="options: JSON, which is a Python dict too, for jax.jit(compiler_options=). "
            "xla-flags: a line for XLA_FLAGS. env: a file for a shell to source.",
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
    """XLA's options and NCCL's variables for a pod, each with its reason; or a check of yours.

    With --check, exit code 1 if one is dead: rejected, of a bad value, or ignored.
    """
    if (pod is None) == (check_ is None):
        raise ValueError(
            "flags needs a pod, as in `jaxoverlap flags h100-sxm:8x8`, or else --check and what "
            "XLA_FLAGS holds"
        )
    if check_ is not None:
        return _check(check_, json)
    _print(preset(pod or ""), form, json)
    return OK


def _print(chosen_preset: Preset, form: Form | None, json: bool) -> None:
    if form is Form.XLA_FLAGS:
        say(chosen_preset.xla_flags)
    elif form is Form.ENV:
        say(chosen_preset.env_file.rstrip("\n"))
    elif form is Form.OPTIONS:
        show_json(chosen_preset.options)
    elif json:
        show_json({**msgspec.to_builtins(chosen_preset), "xla_flags": chosen_preset.xla_flags})
    else:
        _tables(chosen_preset)


def _tables(chosen_preset: Preset) -> None:
    """Show the preset, with the numbers of its sources, which are listed at the end."""
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
    for source, number in sources.items():
        say(f" {number:2}  {source}")


def _conflicts(conflicts: tuple[Conflict, ...], cite: Callable[[str], str]) -> None:
    rows = []
    for c in conflicts:
        for i, (value, source) in enumerate(c.said):
            head = (c.name, c.ours or "not set") if i == 0 else ("", "")
            rows.append((*head, value, cite(source), c.why if i == 0 else ""))
    columns = ("name", "taken", "published", "source", "why")
    show_table("where sources disagree, with each other or with rings", columns, rows)


def _check(text: str, json: bool) -> int:
    findings = check(text)
    if json:
        show_json({"jaxlib": _JAXLIB, "findings": findings})
    else:
        _findings(findings)
    return NO if any(f.dead for f in findings) else OK


def _findings(findings: list[Finding]) -> None:
    """Show a row for each flag that does not simply do what it says, dead ones first."""
    odd = sorted((f for f in findings if f.status != "set"), key=lambda f: not f.dead)
    if odd:
        show_table(
            "what XLA makes of them", ("", "flag", ""), [(f.status, f.text, f.note) for f in odd]
        )
    counts = Counter(f.status for f in findings)
    say(f"jaxlib {_JAXLIB}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
