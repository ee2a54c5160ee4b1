"""Call an optax optimizer with what it needs beyond gradients, state and parameters."""

from __future__ import annotations

import inspect
import re
from typing import Any

import optax

_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.*)")


def update(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, **known: Any
) -> tuple[Any, Any]:
    """Return an optimizer's updates and its new state.

    Args:
        optimizer: any of optax's; each gets those extra arguments that its `update` takes.
        gradients, state, params: as its `update` takes them.
        known: the extra arguments that there are, as `value`, the loss, for
            `optax.contrib.reduce_on_plateau`. Of a tuple, as `has_aux=True` gives, `value` is the
            first.

    Raises:
        ValueError: if it needs another one, as a line search needs `value_fn`.
    """
    if isinstance(known.get("value"), tuple):
        known["value"] = known["value"][0]
    taken = inspect.signature(optimizer.update).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken):
        known = {one.name: known[one.name] for one in taken if one.name in known}
    try:
        return optimizer.update(gradients, state, params, **known)
    except TypeError as error:
        if (missing := _MISSING.search(str(error))) is None:
            raise
        given = ", ".join(f"{name}=" for name in known) or "none"
        raise ValueError(
            f"the optimizer's update() needs {missing[1]}, and gets gradients, state, parameters "
            f"and, of extra arguments, {given}: take an optimizer without (a line search calls the "
            "loss again, which a step over several workers cannot)"
        ) from error
