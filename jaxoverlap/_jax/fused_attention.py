"""Let cuDNN's attention be traced for GPUs that this machine does not have.

`jax.nn.dot_product_attention(implementation="cudnn")` checks, while it is traced, which cuDNN is
installed and what the first local GPU can do. For a pod these are the wrong checks. The three
functions that check are replaced, once a pod is described: they answer for the pod's chip while a
step is traced for one, and where this process has no NVIDIA GPU. Elsewhere JAX's own answer.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_fused_attention.py` pins what is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn

Capability = tuple[int, int]
"""A GPU's compute capability, major and minor."""

CUDNN_VERSION = 91000  # as JAX writes 9.10.0: the one that a pod's description names

_traced_for: ContextVar[Capability | None] = ContextVar("_traced_for", default=None)
_last_described: list[Capability] = []


def answers_for(capability: Capability) -> None:
    """Let JAX's questions be answered for this chip, where the process has no GPU of its own."""
    _last_described[:] = [capability]
    _installed()


@contextlib.contextmanager
def tracing_for(capability: Capability | None) -> Iterator[None]:
    """Have JAX check cuDNN's attention for a pod's chip within a context; None changes nothing."""
    if capability is None:
        yield
        return
    _installed()
    token = _traced_for.set(capability)
    try:
        yield
    finally:
        _traced_for.reset(token)


def _chip() -> Capability | None:
    """Return the capability of the chip to answer for; None where JAX is to answer."""
    asked = _traced_for.get()
    if asked is not None or not _last_described or _has_gpu():
        return asked
    return _last_described[0]


def _has_gpu() -> bool:
    return "cuda" in xla_bridge.get_backend().platform_version


@functools.cache
def _installed() -> None:
    """Replace JAX's checks of cuDNN and of the GPU by ours, which fall back on JAX's own."""

    def replace(name: str, answer: Callable[..., Any]) -> None:
        own = getattr(cudnn, name)

        @functools.wraps(own)
        def answered(*args: Any) -> Any:
            chip = _chip()
            return own(*args) if chip is None else answer(chip, *args)

        setattr(cudnn, name, answered)

    replace("check_cudnn_version", lambda chip: CUDNN_VERSION)
    replace("check_compute_capability", lambda chip, least: chip >= _parsed(least))
    replace("is_cuda_compute_capability_equal", lambda chip, other: chip == _parsed(other))


def _parsed(capability: str) -> Capability:
    major, minor = map(int, capability.split("."))
    return major, minor


def packed_causal(
    query: Array, key: Array, value: Array, lengths: Array, starts: Array, *, scale: float
) -> Array:
    """Attend causally within sequences that stand one after the other, by cuDNN's kernel.

    `jax.nn.dot_product_attention` has no argument for them. Hopper or later.

    Args:
        query: f16 or bf16[batch, slots, heads, head].
        key, value: [batch, slots, kv heads, head].
        lengths: i32[batch, most], slots of each sequence; -1 has none.
        starts: i32[batch, most + 1], the first slot of each; -1 past the last.
        scale: the factor of scores.
    """
    return cudnn.dot_product_attention(  # pyright: ignore[reportReturnType]: no residual
        query, key, value, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts,
        kv_offsets=starts, scale=scale, mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip


class PackedRuns(NamedTuple):
    """Which runs of slots attend to which, for cuDNN's kernel of packed sequences.

    Run i of the queries attends to run i of the keys. One without queries or keys has lengths 0.

    Attributes:
        query_lengths, key_lengths: i32[most], slots of each run; most is two or more.
        query_starts, key_starts: i32[most], the first slot of each.
    """

    query_lengths: Array
    key_lengths: Array
    query_starts: Array
    key_starts: Array

    def operands(self, q: Array, k: Array) -> tuple[Array, Array, Array, Array]:
        """Return lengths and offsets as the kernel reads them: offsets count elements."""

        def offsets(starts: Array, x: Array) -> Array:
            return (jnp.append(starts, x.shape[1]) * (x.shape[2] * x.shape[3]))[None]

        lengths = self.query_lengths[None], self.key_lengths[None]
        return *lengths, offsets(self.query_starts, q), offsets(self.key_starts, k)


def packed_forward(
    q: Array, k: Array, v: Array, runs: PackedRuns, *, causal: bool, scale: float
) -> tuple[Array, Array]:
    """Attend from runs of queries to runs of keys by cuDNN's kernel. Hopper or later.

    Call it where no axis is left to XLA's partitioner. `jax.nn.dot_product_attention` has no
    argument for runs, and JAX's own function for them spends scatters on lengths with gaps, so its
    primitive is called.

    Args:
        q: f16 or bf16[1, queries, heads, head].
        k, v: [1, keys, kv heads, head].
        runs: which slots attend to which; other slots of the results have no meaning.
        causal: whether query i of a run sees no keys after key i of it.
        scale: the factor of scores.

    Returns:
        The output, like q, and the natural log of the softmax's sums, f32[most, heads, queries]: of
        query i of run r it is at [r, :, i], as XLA describes it to cuDNN
        (xla/stream_executor/cuda/cuda_dnn.cc: dense, without offsets).
    """
    (bias, *_, page_k, page_v), settings = _packed_settings(q, causal, scale)
    out, log_sums = cudnn._dot_product_attention_fwd_p.bind(
        q, k, v, bias, *runs.operands(q, k), page_k, page_v, **settings, is_training=True
    )
    return out, log_sums


def packed_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    log_sums: Array,
    to_out: Array,
    runs: PackedRuns,
    *,
    causal: bool,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Compute the gradients' parts of runs of queries and keys; arguments as of `packed_forward`.

    `out` and `log_sums` are those of all keys that the queries attend to anywhere.
    """
    (bias, *_, page_k, page_v), settings = _packed_settings(q, causal, scale)
    to_q, to_k, to_v = cudnn._dot_product_attention_bwd_p.bind(
        q, k, v, bias, *runs.operands(q, k), page_k, page_v, log_sums, out, to_out, **settings
    )
    return to_q, to_k, to_v


def _packed_settings(q: Array, causal: bool, scale: float) -> tuple[list[Array], dict[str, Any]]:
    missing, settings = _settings(q, causal, scale)
    mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    if "score_mod" in settings:
        del settings["score_mod"]
        settings |= dict(score_mod_name=None, score_mod_jaxpr=None)
    return missing, settings | dict(mask_type=mask)


def refusal(q: Any, k: Any, v: Any) -> str | None:
    """Return why cuDNN's attention does not take these arrays or shapes; None if it takes them.

    The answer is JAX's own, for the chip that is answered for. Shapes as in `block_forward`.
    """
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    try:
        jax.eval_shape(lambda *x: block_forward(*x, causal=False, scale=1.0), *like)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def block_forward(
    q: Array, k: Array, v: Array, *, causal: bool, scale: float, local: bool = False
) -> tuple[Array, Array]:
    """Attend to one block of keys by cuDNN's kernel, and return the log of the softmax's sums too.

    Args:
        q: f16 or bf16[batch, queries, heads, head].
        k, v: [batch, keys, kv heads, head].
        causal: whether a query sees no keys after its own index in the block.
        scale: the factor of scores.
        local: whether XLA's partitioner asked for this code, and partitions nothing in it.

    Returns:
        The output, like q, and the natural log of the sums, f32[batch, heads, queries].
    """
    if local:
        missing, settings = _settings(q, causal, scale)
        made = cudnn._dot_product_attention_fwd_impl(
            q, k, v, *missing, **settings, **_newer(score_mod_args=()), is_training=True
        )
        return made[0], made[1]
    out, log_sums = cudnn.dot_product_attention(  # pyright: ignore[reportAssignmentType]
        q, k, v, scale=scale, mask_type=_mask(causal), return_residual=True
    )
    return out, log_sums


def block_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    log_sums: Array,
    to_out: Array,
    *,
    causal: bool,
    scale: float,
    local: bool = False,
) -> tuple[Array, Array, Array]:
    """Compute one block's part of the gradients of q, k and v by cuDNN's backward kernel.

    `out` and `log_sums` are those of all blocks together, shaped as `block_forward` returns them:
    the probabilities of a block are the exponentials of its scores less `log_sums`. JAX has no
    function for that, so its primitive is called.
    """
    missing, settings = _settings(q, causal, scale)
    bind: Any = cudnn._dot_product_attention_bwd_p_wrapper.bind
    if local:
        bind = functools.partial(cudnn._dot_product_attention_bwd_impl, **_newer(score_mod_args=()))
    to_q, to_k, to_v = bind(q, k, v, *missing, log_sums, out, to_out, **settings)
    return to_q, to_k, to_v


def _settings(q: Array, causal: bool, scale: float) -> tuple[list[Array], dict[str, Any]]:
    """Return bias, lengths, offsets and pages as JAX writes missing ones, and the parameters."""
    return [jnp.zeros(0, q.dtype)] * 7, dict(
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=_mask(causal), layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None, **_newer(score_mod=None),
    )  # fmt: skip


def _mask(causal: bool) -> Any:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def _newer(**parameters: Any) -> dict[str, Any]:
    """Return parameters that jax 0.11 has not, where this one has them."""
    takes = inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters
    return {name: value for name, value in parameters.items() if name in takes}


class BlockKernel(NamedTuple):
    """A fused kernel for one block of attention: `block_forward` and `block_backward`, or alike."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


CUDNN = BlockKernel(block_forward, block_backward)
CUDNN_LOCAL = BlockKernel(
    functools.partial(block_forward, local=True), functools.partial(block_backward, local=True)
)
