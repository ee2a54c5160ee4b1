"""Name what a layer saves for its backward pass, value by value; the rest is computed again.

    x -> norms -> qkv -> attention -> out -> + x -> norms -> gate, up -> activation -> down

A layer's input is always kept. `down` is never read by the backward pass, so that keeping it, as
some published policies do, costs and saves nothing.
"""

from __future__ import annotations

import difflib
import functools
import re

import msgspec

from jaxoverlap._util.files import packaged

# The results of a layer that its backward pass reads, in the order in which they are made: `norms`
# are both norms and the sum before the second, `dispatch` the tokens as their experts get them.
VALUES: tuple[str, ...] = (
    "norms", "qkv", "attention", "out", "dispatch", "gate", "up", "activation",
)  # fmt: skip
_NAMES = (*VALUES, "down")
_SAVES = re.compile(r"saves?[ :]+", re.IGNORECASE)


def _read() -> dict[str, frozenset[str]]:
    """Read policies.toml: what each published policy saves."""
    text = packaged("jaxoverlap.parallelism.published", "policies.toml")
    tables = msgspec.toml.decode(text, type=dict[str, dict[str, list[str]]])
    return {
        name: frozenset(VALUES) if saved == ["all"] else frozenset(saved) & set(VALUES)
        for table in tables.values()
        for name, saved in table.items()
    }


POLICIES = _read()  # by name, of all software


def canonical(recompute: str) -> str:
    """Return "none", "full", "selective", or "saves" and the names of the values that are saved.

    Args:
        recompute: one of these, the name of a published policy such as "minimal_flash" (of several,
            as in "core_attn+moe_act", what all of them save), or the names of what is saved, as in
            "saves qkv+out" or "saves qkv,out,down".

    Raises:
        ValueError: for a policy or a value that is not known; it lists those that are.
    """
    kept = saved_by(recompute)
    for name in ("none", "full", "selective"):
        if kept == POLICIES[name]:
            return name
    return "saves " + "+".join(name for name in VALUES if name in kept)


@functools.cache
def saved_by(recompute: str) -> frozenset[str]:
    """Return the values that the backward pass finds saved; `recompute` as in `canonical`."""
    text = recompute.strip()
    named = _SAVES.match(text)
    if not named:
        policies = re.split(r" *[+,] *", text.lower().replace("-", "_"))
        if unknown := [name for name in policies if name not in POLICIES]:
            near = [
                m for name in unknown for m in difflib.get_close_matches(name, POLICIES, 2, 0.5)
            ]
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"recompute={recompute!r}: {hint}Expected policies ({', '.join(POLICIES)}), or "
                f"what is saved, as in 'saves qkv+out', of {', '.join(_NAMES)}"
            )
        return frozenset.intersection(*(POLICIES[name] for name in policies))
    names = [name.strip() for name in re.split(r"[+,]", text[named.end() :])]
    if unknown := [name for name in names if name not in _NAMES]:
        raise ValueError(
            f"recompute={recompute!r}: no values {', '.join(map(repr, unknown))}; expected some of "
            f"{', '.join(_NAMES)}"
        )
    return frozenset(names) & set(VALUES)


def is_published(recompute: str) -> bool:
    """Return whether a published policy saves the same; dispatch is of models with experts."""
    return _policy(recompute) is not None


def _policy(recompute: str) -> str | None:
    kept = saved_by(recompute) - {"dispatch"}
    return next((name for name, saved in POLICIES.items() if saved - {"dispatch"} == kept), None)


def in_words(recompute: str) -> str:
    """Name what is computed again: by a published policy if there is one; "" for nothing."""
    if recompute in ("none", "full", "selective"):
        return "" if recompute == "none" else f"{recompute} recompute"
    return _policy(recompute) or recompute
