"""Find the flags that the installed jaxlib rejects, ignores or has renamed."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxoverlap.flags.compiler import FlagsAnswer, ask
from jaxoverlap.flags.extract import Given, flags_in, strays_in, variables_in
from jaxoverlap.flags.variables import NCCL_VERSION, PLUGINS, nccl_names
from jaxoverlap.flags.xla import DEAD, FLAGS, versions

Status = Literal["rejected", "bad value", "ignored", "unread", "renamed", "default", "set"]
_DEAD: tuple[Status, ...] = ("rejected", "bad value", "ignored")
# A flag that changed nothing is tried with these values: one of them differs from any default,
# whatever the flag takes, and so shows whether the flag can change anything.
_TRIALS = ("true", "false", "0", "1", "7", "on", "off", "ALL_REDUCE", "x")


@dataclass(frozen=True)
class Finding:
    """The effect of one flag or variable.

    Attributes:
        text: the flag or variable, as it was given.
        status: "rejected": XLA ends the process, as it does for a "bad value". "ignored": XLA takes
            it and nothing changes, whatever its value. "renamed": it sets an option of another
            name. "default": it sets what holds anyway. "set": it does what it says. "unread": a
            variable that NCCL's source does not read; the NCCL in use may differ.
        note: XLA's message, the version that last had it, what to use instead.
    """

    text: str
    status: Status
    note: str = ""

    @property
    def dead(self) -> bool:
        """Return whether XLA rejects or ignores the flag, or rejects its value."""
        return self.status in _DEAD


def check(text: str) -> list[Finding]:
    """Check flags with the installed XLA, in a child process that XLA may abort.

    Args:
        text: a line for XLA_FLAGS, or the path of a script that sets them: a shell's, YAML or
            Python. NCCL's variables in it are held against NCCL's source.

    Raises:
        ValueError: if it is no file, and there are no flags in it.
    """
    is_file = os.path.isfile(text)  # pathlib's raises where a long line is no name of a file
    content = Path(text).read_text() if is_file else text
    flags, variables = flags_in(content), variables_in(content)
    if not flags and not variables:
        what = f"the file {text}" if is_file else repr(text)
        raise ValueError(
            f"no flags in {what}: give what XLA_FLAGS holds, as in '--xla_gpu_...=true', or the "
            "path of a script that sets it"
        )
    findings = [*_flags(flags), *map(_variable, variables)]
    strays = strays_in(content) if content.lstrip().startswith("--xla") else []
    return _without_what_follows(findings, strays)


def _without_what_follows(findings: list[Finding], strays: Sequence[str]) -> list[Finding]:
    if not strays:
        return findings
    unread = f"XLA stops reading at {strays[0]!r}, which is no flag"
    checked = [Finding(f.text, "ignored", unread) if f.text in strays else f for f in findings]
    return [*checked, Finding(strays[0], "ignored", f"{unread}: write --name=value")]


def _flags(flags: Sequence[Given]) -> list[Finding]:
    if not flags:
        return []
    lines = [f"--{g.name}" if g.value is None else f"--{g.name}={g.value}" for g in flags]
    plain, *answers = ask(["", *lines])
    # A flag without a value, or with one that a script fills in: only its name can be asked about.
    quiet = [
        g
        for g, a in zip(flags, answers, strict=True)
        if g.value is None or (a.fields is not None and not a.differs_from(plain))
    ]
    trials = ask([f"--{g.name}={value}" for g in quiet for value in _TRIALS])
    tried = {g.text: trials[i * len(_TRIALS) : (i + 1) * len(_TRIALS)] for i, g in enumerate(quiet)}
    return [
        _finding(g, a, plain, tried.get(g.text, ())) for g, a in zip(flags, answers, strict=True)
    ]


def _finding(
    setting: Given, answer: FlagsAnswer, plain: FlagsAnswer, trials: Sequence[FlagsAnswer]
) -> Finding:
    if setting.value is None:  # a bool needs none; of others, what any value does tells
        known = [a for a in trials if not a.unknown]
        answer = next((a for a in (answer, *known) if a.fields is not None), (*known, answer)[0])
    if answer.unknown:
        return Finding(setting.text, "rejected", _instead(setting.name, plain))
    if answer.fields is None:
        return Finding(setting.text, "bad value", _wanted(setting.name) or answer.reason)
    changed = dict.fromkeys(n for a in (answer, *trials) for n in _changed(a, plain))
    if not changed:
        return Finding(setting.text, "ignored", answer.reason or _advice(setting.name))
    if setting.name not in changed:
        return Finding(setting.text, "renamed", f"sets {', '.join(changed)}")
    if _changed(answer, plain):
        return Finding(setting.text, "set")
    return Finding(setting.text, "default")


def _changed(answer: FlagsAnswer, plain: FlagsAnswer) -> tuple[str, ...]:
    return answer.differs_from(plain) if answer.fields is not None else ()


def _instead(name: str, plain: FlagsAnswer) -> str:
    """Return the last jaxlib that had an unknown flag, and its replacement."""
    if dead := DEAD.get(name):
        first, when = next(iter(versions())), dead.until
        gone = f"last seen in jaxlib {when}" if when else f"gone before jaxlib {first}"
        return f"{gone}; {dead.instead}"
    known = {*(plain.fields or ()), *FLAGS} - {*DEAD}  # XLA prints none that is not set
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.8)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _advice(name: str) -> str:
    return DEAD[name].instead if name in DEAD else ""


def _wanted(name: str) -> str:
    """Return the values that XLA_FLAGS accepts for an enum flag, if they are known."""
    short = FLAGS[name].short.values() if name in FLAGS else ()
    return f"XLA_FLAGS take {', '.join(short)}" if short else ""


def _variable(setting: Given) -> Finding:
    name = setting.name
    if name in nccl_names():
        return Finding(name, "set")
    if name.startswith(PLUGINS):
        return Finding(name, "set", "a plugin's")
    near = difflib.get_close_matches(name, nccl_names(), n=1, cutoff=0.85)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Finding(name, "unread", f"NCCL {NCCL_VERSION} reads no such variable{hint}")
