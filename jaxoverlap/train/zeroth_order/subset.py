"""Fine-tune a part of the parameters, or a few that are added to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap._util.limits import whole
from jaxoverlap.train import arguments
from jaxoverlap.train.zeroth_order.state import check_trained

Where = Callable[[str], bool]  # of a parameter's path, as "['layers']['q']['weight']"


def split(params: Any, where: Where) -> tuple[Any, Any]:
    """Return (what is trained, what is frozen): two trees, None where a leaf is in the other.

    Source: prefix tuning as in MeZO (arXiv 2305.17333) is `where=lambda path: "prefix" in path` on
    a model that has such parameters.

    Raises:
        ValueError: if nothing is trained.
    """

    def kept(wanted: bool) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if where(jax.tree_util.keystr(path)) == wanted else None, params
        )

    trained = kept(True)
    if not jax.tree.leaves(trained):
        raise ValueError(f"where= takes none of the parameters: {_paths(params)}")
    return trained, kept(False)


def joined(trained: Any, frozen: Any) -> Any:
    """Return the tree of which `split` made two."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None
    )


def of_part(loss_fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the loss of (trained, batch, frozen): a step of it takes `frozen` as an argument."""
    return lambda trained, batch, frozen: loss_fn(joined(trained, frozen), batch)


def lora(
    params: Any, *, rank: int, where: Where, seed: int = 0, inputs: int = 1
) -> dict[str, dict[str, jax.Array]]:
    """Return low-rank adapters of some matrices, {path: {"a", "b"}}; b is 0, so nothing changes.

    A weight [*stacked, in, out ...] gets a [*stacked, in, rank] and b [*stacked, rank, out ...].
    Source: Hu et al., LoRA (arXiv 2106.09685), section 4.1.

    Args:
        params: a tree of arrays.
        rank: of the adapters.
        where: (a parameter's path) -> whether it gets one.
        seed: of a's values, normal of variance 1 / in.
        inputs: the number of output dims of a weight, those after its input dim; dims before that
            are stacked.

    Raises:
        ValueError: if no parameter is taken, one has too few dims or is of no floats of 16 bits or
            more, or the rank is below 1.
    """
    rank, inputs = whole("rank", rank, 1), whole("inputs", inputs, 1)
    seed = arguments.seed("seed", seed)
    taken = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
        if where(jax.tree_util.keystr(path))
    }
    if not taken:
        raise ValueError(f"where= takes none of the parameters: {_paths(params)}")
    adapters = {}
    for number, (path, leaf) in enumerate(taken.items()):
        check_trained(path, leaf)  # adapters have its dtype
        if jnp.ndim(leaf) < inputs + 1:
            raise ValueError(
                f"{path} has the shape {jnp.shape(leaf)}: an adapter needs an input dim and "
                f"{inputs} behind it; leave it out in where="
            )
        key = jax.random.fold_in(jax.random.key(seed), number)
        cut = leaf.ndim - inputs
        shape = (*leaf.shape[:cut], rank)
        a = jax.random.normal(key, shape, leaf.dtype) * leaf.shape[cut - 1] ** -0.5
        b = jnp.zeros((*leaf.shape[: cut - 1], rank, *leaf.shape[cut:]), leaf.dtype)
        adapters[path] = dict(a=a, b=b)
    return adapters


def adapted(params: Any, adapters: dict[str, dict[str, jax.Array]], *, scale: float = 1.0) -> Any:
    """Return parameters with scale · a @ b added to those that have an adapter.

    Raises:
        ValueError: if an adapter is of no parameter.
    """
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}
    if missing := [path for path in adapters if path not in paths]:
        raise ValueError(
            f"adapters of {', '.join(missing)}, which are no parameters: they would change "
            f"nothing. Expected some of {_paths(params)}"
        )

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        adapter = adapters.get(jax.tree_util.keystr(path))
        if adapter is None:
            return leaf
        a, b = adapter["a"], adapter["b"]
        stacked = "".join(chr(ord("k") + n) for n in range(a.ndim - 2))
        out = "".join(chr(ord("t") + n) for n in range(b.ndim - a.ndim + 1))
        return leaf + scale * jnp.einsum(f"{stacked}ir,{stacked}r{out}->{stacked}i{out}", a, b)

    return jax.tree.map_with_path(one, params)


def of_adapters(
    loss_fn: Callable[..., jax.Array], *, scale: float = 1.0
) -> Callable[..., jax.Array]:
    """Return the loss of (adapters, batch, params): a step of it takes `params` as an argument."""
    return lambda adapters, batch, params: loss_fn(adapted(params, adapters, scale=scale), batch)


def _paths(params: Any) -> str:
    return ", ".join(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params))
