"""Parse XLA_FLAGS with the installed XLA, in a child process, and read the options it sets.

No document says which flags a version has, what they are by default, and what an old name now
sets; XLA ends the process that has a flag it does not know.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "_jax" / "xla_flags_probe.py"
_FIELD = re.compile(r"^(\w+)(?:: (.*)| \{)$", re.MULTILINE)
_IN_MAP = re.compile(r'^(\w+) \{\n  key: "(.*)"\n  value: "(.*)"\n\}', re.MULTILINE)
_REASON = re.compile(r"^[EF]\d{4} [^\]]*\] (.*)", re.MULTILINE)
_WARNING = re.compile(r"^W\d{4} [^\]]*\] (.*)", re.MULTILINE)


@dataclass(frozen=True)
class FlagsAnswer:
    """The options that XLA sets for one line of flags, or its error.

    Attributes:
        fields: XLA's options and their values, several where an option is a list; None if XLA ended
            the process. An option that is not set may be left out.
        reason: why XLA ended the process, or what it warns of; else empty.
        unknown: whether the reason is a flag that it does not have.
    """

    fields: Mapping[str, tuple[str, ...]] | None
    reason: str
    unknown: bool = False

    def differs_from(self, other: FlagsAnswer) -> tuple[str, ...]:
        """Return the options whose values differ."""
        mine, others = self.fields or {}, other.fields or {}
        names = dict.fromkeys((*mine, *others))
        return tuple(n for n in names if sorted(mine.get(n, ())) != sorted(others.get(n, ())))


def ask(
    lines: Sequence[str],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> list[FlagsAnswer]:
    """Return the options that XLA sets for each line of XLA_FLAGS, one process per line.

    Args:
        lines: as XLA_FLAGS holds them.
        python: an interpreter with the jaxlib to ask.
        environment: that interpreter's; default: this process's.

    Raises:
        RuntimeError: if jaxlib does not load there.
    """
    # -P: the script's folder is this package's, whose modules are not to be taken for others.
    done = subprocess.run(
        [python, "-P", _SCRIPT],
        input=json.dumps(list(lines)),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"{python} could not ask its jaxlib: {done.stderr.strip()}")
    return [_answer(text, log) for text, log in json.loads(done.stdout)]


def _answer(text: str, log: str) -> FlagsAnswer:
    if text:
        warned = _WARNING.search(log)
        return FlagsAnswer(_fields(text), warned[1] if warned else "")
    reasons = _REASON.findall(log) or [log.strip()]
    unknown = "Unknown flag" in reasons[0]
    return FlagsAnswer(None, reasons[0].partition(" Flag parsing failed")[0], unknown)


def _fields(text: str) -> dict[str, tuple[str, ...]]:
    """Return a printed proto's fields; an entry of a map becomes a value "key=value"."""
    fields: dict[str, tuple[str, ...]] = {}
    for name, key, value in _IN_MAP.findall(text):
        fields[name] = (*fields.get(name, ()), f"{key}={value}")
    for name, value in _FIELD.findall(text):
        if name not in ("key", "value") and value:
            fields[name] = (*fields.get(name, ()), value.strip('"'))
    return fields
