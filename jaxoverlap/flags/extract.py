"""Extract flags and variables from a line of XLA_FLAGS or from a script that sets them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
# A value ends at a space, or at what quotes and ends strings in shells, YAML and Python.
_FLAG = re.compile(r"""--(xla_\w+)(?:=("[^"\n]*"|'[^'\n]*'|[^\s"'`\\;)]*))?""")
# A word of XLA_FLAGS: a value in quotes may have spaces.
_WORD = re.compile(r"""--\w+=(?:"[^"]*"|'[^']*')|\S+""")
_PLACEHOLDER = re.compile(r"\$|\{\{|<")
_NAMES = r"(NCCL_[A-Z0-9_]+)"
_VARIABLE = re.compile(
    rf"""\bname:\s*["']?{_NAMES}["']?\s*\n\s*value:\s*["']?([^"'\n]*)"""  # Kubernetes
    rf"""|\b{_NAMES}["']?\]?\s*[=:]\s*\(?\s*["']?([^"'\s,)]*)"""  # shells, dicts, os.environ
)


@dataclass(frozen=True)
class Given:
    """A flag or a variable with its value, and its text.

    Attributes:
        name: without dashes.
        value: None where none was given, or where it is a placeholder that a script fills in.
        text: as it is written there.
    """

    name: str
    value: str | None
    text: str


def flags_in(text: str) -> list[Given]:
    """Return XLA's flags in a text, each once, without those in comments."""
    flags = {}
    for match in _FLAG.finditer(_COMMENT.sub("", text)):
        value = match[2]
        if value is not None:
            quoted = value[:1] in ("'", '"')
            value = value[1:-1] if quoted else value.rstrip(",.")
        unknown = value is None or _PLACEHOLDER.search(value)
        flags[match[0]] = Given(match[1], None if unknown else value, match[0].rstrip(",."))
    return list(flags.values())


def variables_in(text: str) -> list[Given]:
    """Return the NCCL variables that a text sets, each once, without those in comments."""
    variables = {}
    for match in _VARIABLE.finditer(_COMMENT.sub("", text)):
        name, value = match[1] or match[3], match[2] if match[1] else match[4]
        variables.setdefault(name, Given(name, value, f"{name}={value}"))
    return list(variables.values())


def strays_in(line: str) -> list[str]:
    """Return the words that XLA does not read: from the first that is no flag to the line's end.

    So on jaxlib 0.11.2 and 0.12.0.1: "--a=1 word --b=2" sets a alone, without a word of it.
    """
    words = _WORD.findall(line)
    for index, word in enumerate(words):
        if not word.startswith("--"):
            return words[index:]
    return []
