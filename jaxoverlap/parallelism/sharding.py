"""Give a configuration as code: its mesh, and PartitionSpecs for parameters and activations.

The axes are those of `configuration.AXES`, major to minor: pipeline, data, fsdp, expert, context,
model. A mesh has all of them, of size one too, so that specs need not know the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.configuration import AXES
from jaxoverlap.parallelism.placement import Placement

BATCH = ("data", "fsdp", "expert")
ACTIVATIONS = {
    "stream": P(BATCH, ("context", "model"), None),  # [batch, sequence, hidden]
    "heads": P(BATCH, "context", "model", None),  # [batch, sequence, heads, head size]
    "scores": P(BATCH, "model", "context", None),  # [batch, heads, query, key]
    "inner": P(BATCH, "context", "model"),  # [batch, sequence, mlp]
    "experts": P("expert", ("data", "fsdp"), None, None),  # [expert, group, slot, hidden]
}
# The first pattern that a parameter's path contains gives its dims. Names are those of MaxText,
# Flax's examples and this project's models.
RULES: tuple[tuple[str, P], ...] = (
    (r"(scale|bias|norm)", P(None)),
    (r"experts?.*(down|wo|w2)", P("expert", "model", "fsdp")),
    (r"experts?.*(up|gate|wi|w1|w3)", P("expert", "fsdp", "model")),
    (r"router", P("fsdp", None)),
    (r"embed|(?<!multi)(?<!multi_)head|vocab", P(("fsdp", "model"), None)),
    (r"(down|out|wo|w2|o_proj|c_proj)", P("model", "fsdp")),
    (r"(up|gate|query|key|value|qkv|wi|w1|w3|[qkv]_proj|c_attn|c_fc)", P("fsdp", "model")),
)


def mesh_of(placement: Placement, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a placement: neighbours along its last axis are neighbours on a host.

    Args:
        placement: of a configuration, as `Configurations` have it.
        devices: host after host, as `jax.devices()` or `hardware.pods.devices` give them.

    Raises:
        ValueError: if there are fewer devices than the placement has.
    """
    count = int(np.prod(placement.sizes))
    if len(devices) < count:
        raise ValueError(f"{placement} needs {count} devices, and there are {len(devices)}")
    array = np.empty(count, dtype=object)
    array[:] = list(devices[:count])
    axes = [placement.order.index(axis) for axis in AXES]
    return Mesh(array.reshape(placement.sizes).transpose(axes), AXES, (AxisType.Auto,) * len(AXES))


def spec_of(path: str, ndim: int, *, stacked: int = 0) -> P:
    """Return the PartitionSpec of a parameter by its path, such as "layers/mlp/up/kernel".

    | kernel | shape | spec |
    | --- | --- | --- |
    | mlp/up | [hidden, mlp] | (fsdp, model) |
    | attention/query, heads apart | [hidden, heads, head size] | (fsdp, model, None) |
    | attention/out, heads apart | [heads, head size, hidden] | (model, None, fsdp) |
    | mlp/up of all layers, stacked=1 | [layers, hidden, mlp] | (pipeline, fsdp, model) |

    Args:
        path: the names of a parameter and of what it is in.
        ndim: its dims.
        stacked: how many of its first dims stack layers, as of parameters that a scan runs over.
            The first is sharded over pipeline, the others are not.

    Raises:
        ValueError: if no rule matches, which says what to add to `RULES`; or if the parameter has
            fewer dims than are stacked.
    """
    if not 0 <= stacked <= ndim:
        raise ValueError(f"stacked={stacked} of {path!r} with {ndim} dims: expected 0 to {ndim}")
    own = ndim - stacked
    for pattern, spec in RULES:
        if re.search(pattern, path, re.IGNORECASE):
            named = tuple(spec)[max(len(spec) - own, 0) :]
            within = named.index("model") + 1 if "model" in named else len(named)
            named = (*named[:within], *(None,) * (own - len(named)), *named[within:])
            return P(*("pipeline",)[:stacked], *(None,) * (stacked - 1), *named)
    raise ValueError(
        f"no rule for the parameter {path!r} of {ndim} dims: rename it, or take your own spec over "
        f"the axes {', '.join(AXES)}"
    )
