"""Define `step`, which makes the train step of a loss function out of forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import flag, whole
from jaxoverlap.api import overlap as overlapped
from jaxoverlap.train.arguments import check_arrays, check_is, function, overlap_options
from jaxoverlap.train.programs import Programs, key_of, like_at
from jaxoverlap.train.zeroth_order.blocks import Blocks, depth
from jaxoverlap.train.zeroth_order.estimator import Mezo
from jaxoverlap.train.zeroth_order.layout import BatchLayout
from jaxoverlap.train.zeroth_order.narrow import Narrowed, copy_dtype
from jaxoverlap.train.zeroth_order.resident import Resident
from jaxoverlap.train.zeroth_order.state import ZOState, as_arrays, check_trained, new_state
from jaxoverlap.train.zeroth_order.streamed import Streamed


class NonFiniteLossError(ValueError):
    """A loss of a step or its learning rate is infinite or not a number, or the rate below 0.

    Attributes:
        state: the state after the step, whose update was left out.
        metrics: the step's; a log that goes on has to have them too, as it counts steps.
    """

    def __init__(self, message: str, state: ZOState, metrics: dict[str, Any]):
        super().__init__(message)
        self.state, self.metrics = state, metrics


class ZOStep:
    """A zeroth-order train step: two forward passes a direction, and nothing but scalars sent.

    Calling it takes a step: (state, batch, *rest) -> (state, metrics), the state donated unless its
    blocks are in host memory. Metrics are "losses" [directions, 2], their mean "loss", the
    projected gradients "scalars" [directions] and the learning "rate", float32 each (losses in
    float64 stay so), and whether an update was "made".

    On a mesh of ("pair", "data", "model"), perturb="pair" and data="data" are DistZO2's 2D
    parallelism; either alone is its PertP or DDP. Other axes are the loss function's own.

    Args:
        loss_fn: (parameters, batch, *rest) -> loss, the mean over the batch; or `Blocks`. Where
            examples have different weights (masked labels) and `data` spreads them, return
            `Weighted`: a mean of the shards' means would be another loss. An object with a state
            among `rest`, as nnx.Rngs, is made anew for each loss: both signs see the same masks,
            and what it counts does not come back; give another one, or a key, with each step.
        transform: the estimator, as `mezo(eps=1e-3, lr=1e-6)`.
        mesh: the devices, with automatic axes; None for one device.
        perturb: the axis of a pair of devices, one for each sign.
        data: the axis over which the batch's first dim is spread.
        deferred: whether a step's update is made at the start of the next; see `flush`.
        has_aux: whether loss_fn returns (loss, aux); the step's metrics then have "aux", averaged
            over the batch's shards, the signs and the directions.
        host: keeps a model of `Blocks` in pinned host memory, one or two blocks at a time on the
            device; updates are then deferred.
        offload_dtype: with `host`, of a copy of the blocks that is uploaded in their place, a float
            of 8 or 16 bits (`jnp.float8_e4m3fn`); None uploads the blocks. The host's blocks stay
            exact and move once in `refresh_every` steps; losses see the copy's rounding.
        refresh_every: steps between two refreshes of that copy, each of which makes all updates
            since the last one.
        sliced: with `host`, whether each device of `perturb` and `data` keeps and uploads a slice
            of each block, and gathers the others'; for devices that share a host.
        overlap: True, or options of `jaxoverlap.overlap`, to hide the collectives of the forward
            pass.
        check: whether to wait for each step's losses and look at them.

    Raises:
        ValueError: if the mesh lacks an axis, a pair has other than two devices, axes are not
            automatic, or `host` is set without blocks.
    """

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array] | Blocks,
        transform: Mezo,
        mesh: Mesh | None = None,
        *,
        perturb: str | None = None,
        data: str | None = None,
        deferred: bool = False,
        has_aux: bool = False,
        host: bool = False,
        sliced: bool = True,
        offload_dtype: Any = None,
        refresh_every: int = 8,
        overlap: bool | Mapping[str, Any] = False,
        check: bool = True,
    ):
        what = "an estimator, as mezo(eps=1e-3, lr=1e-6)"
        expect(isinstance(transform, Mezo), "transform", transform, what)
        function("loss_fn", loss_fn, "(parameters, batch, *rest) -> loss")
        given = dict(deferred=deferred, has_aux=has_aux, host=host, sliced=sliced, check=check)
        for name, value in given.items():
            flag(name, value)
        self._layout, self._check = BatchLayout(mesh, perturb, data), check
        self._overlap, self._programs = overlap_options(overlap), Programs()
        self._made: Resident | Streamed
        every = whole("refresh_every", refresh_every, 1)
        if not host:
            if offload_dtype is not None:
                raise ValueError(
                    f"offload_dtype={offload_dtype!r} without host=True: nothing is uploaded"
                )
            self._made = Resident(loss_fn, transform, self._layout, deferred, has_aux)
            return
        if has_aux:
            raise ValueError(
                "has_aux=True with host=True: what blocks give beside the loss is not kept; leave "
                "out either"
            )
        if not isinstance(loss_fn, Blocks) or mesh is None:
            raise ValueError(
                "host=True: expected a model as Blocks(begin, block, end), and a mesh (of one "
                "device, if need be): only blocks can be brought to the device one at a time"
            )
        self._made = Streamed(loss_fn, transform, self._layout, sliced)
        if offload_dtype is not None:
            dtype = copy_dtype(offload_dtype)
            self._made = Narrowed(
                loss_fn, transform, self._layout, sliced, dtype=dtype, every=every
            )

    def __repr__(self) -> str:
        """Return the estimator's settings, and where the parameters are."""
        kept = "blocks in host memory" if isinstance(self._made, Streamed) else "device memory"
        mezo = self.transform
        return f"ZOStep: eps {mezo.eps}, directions {mezo.directions}, parameters in {kept}"

    @property
    def transform(self) -> Mezo:
        """Return the estimator."""
        return self._made.transform

    def init(self, params: Any, *, seed: int = 0) -> ZOState:
        """Return the state of a run that begins at some parameters, placed on the mesh.

        Parameters on the mesh keep their sharding (tensor parallelism); others are replicated on
        every device, and blocks that are streamed into host memory, in slices.

        Raises:
            ValueError: if one array is twice in the tree, a parameter is of other than floats of 16
                bits or more, or the seed of more than 32 bits.
        """
        _check_params(params)
        params = as_arrays(params)
        placed = jax.tree.map(jax.device_put, params, self.shardings(params))
        if isinstance(self._made, Resident):  # steps donate what they are given
            placed = jax.tree.map(lambda x: jnp.array(x, x.dtype), placed)
        state = new_state(placed, self.transform, seed)
        if not isinstance(self._made, Narrowed):
            return state
        return self.flush(state._replace(pending=self._made.nothing()))

    def shardings(self, params: Any) -> Any:
        """Return the sharding of each parameter; None for each without a mesh."""
        if not isinstance(self._made, Streamed):
            return jax.tree.map(self._resident_at, params)
        made, at = self._made, self._layout.at
        depth(params["blocks"])

        def in_host(leaf: Any) -> Any:
            found = at(*made.spec_of(leaf))
            return found if found is None else found.with_memory_kind("pinned_host")

        blocks = jax.tree.map(in_host, params["blocks"])
        return dict(outer=jax.tree.map(lambda _: at(), params["outer"]), blocks=blocks)

    def abstract(self, params: Any, *, seed: int = 0) -> ZOState:
        """Return what `init` would, as shapes with shardings; to lower for a pod, say."""
        state = jax.eval_shape(lambda: new_state(None, self.transform, seed))
        rest = jax.tree.map(lambda leaf: like_at(leaf, self._layout.at()), state)
        params = as_arrays(params)
        shapes = jax.eval_shape(lambda given: given, params)
        found = rest._replace(params=jax.tree.map(like_at, shapes, self.shardings(params)))
        if not isinstance(self._made, Narrowed):
            return found
        pending = jax.eval_shape(self._made.nothing)
        pending = jax.tree.map(lambda leaf: like_at(leaf, self._layout.at()), pending)
        return self._with_copy(found._replace(pending=pending))

    def _with_copy(self, state: ZOState) -> ZOState:
        """Return a state as shapes, with those of the narrow copy of its blocks."""
        assert isinstance(self._made, Narrowed)
        blocks, dtype, at = state.params["blocks"], self._made.dtype, self._layout.at()
        values = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), blocks
        )
        scales = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:1], jnp.float32, sharding=at), blocks
        )
        return state._replace(narrow=dict(values=values, scales=scales))

    def __call__(self, state: ZOState, batch: Any, *rest: Any) -> tuple[ZOState, dict[str, Any]]:
        """Take a step.

        Raises:
            NonFiniteLossError: if a loss is not finite.
            ValueError: for a state of an estimator with another number of directions, or one whose
                update is pending given to a step that is not deferred (where losses are checked).
        """
        check_is(state, ZOState, "init(), a step, or a checkpoint restored to abstract()")
        if self._check:
            check_arrays(state)
        if rest and isinstance(self._made, Streamed):
            raise ValueError(
                "other arguments with host=True: blocks take parameters and the batch alone; put "
                "what begin and end need into the batch, and keep frozen parts on the device "
                "(host=False)"
            )
        made = self._made
        wanted = (self.transform.directions,)
        wanted = (made.every, *wanted) if isinstance(made, Narrowed) else wanted
        if (has := state.pending.scalars.shape) != wanted:
            raise ValueError(
                f"the state has a pending update of shape {has}: expected {wanted}, one scalar for "
                "each of the estimator's directions; flush it by the step that made it"
            )
        immediate = isinstance(made, Resident) and not made.deferred
        if self._check and immediate and (rate := float(state.pending.rate)):
            raise ValueError(
                f"the state has a pending update of rate {rate:g}, which this step, not deferred, "
                "would never make: flush it by the step that made it"
            )
        narrowed = isinstance(made, Narrowed)
        number = int(state.step) if self._check or narrowed else 0  # of the state, which is donated
        if isinstance(made, Narrowed):
            if number and number % made.every == 0:
                state = self.flush(state)
            new, metrics = self._program(state)(made.light(state), batch)
            state = made.joined(state, new)
        else:
            state, metrics = self._program(state)(state, batch, *rest)
        if self._check and not metrics["made"]:
            losses, rate = np.asarray(metrics["losses"]), self.transform.rate(jnp.int32(number))
            raise NonFiniteLossError(
                f"step {number}: the losses at +eps and -eps are {losses.tolist()} and the "
                f"learning rate is {float(rate):g}; expected finite numbers whose step is finite "
                "too, and a rate of 0 or more. Its update was left out (go on from the error's "
                "`state`, and give a log its `metrics`): look at that batch, or take a smaller eps "
                "or lr",
                state,
                metrics,
            )
        return state, metrics

    def lower(self, state: ZOState, batch: Any, *rest: Any) -> Any:
        """Lower a step, of arrays or shapes with shardings; compile it to audit and simulate."""
        made = self._made
        given = made.light(state) if isinstance(made, Narrowed) else state
        return self._program(state).lower(given, batch, *rest)

    def flush(self, state: ZOState) -> ZOState:
        """Apply the pending update, for an evaluation or a checkpoint; the state is not donated."""
        at = jax.tree.map(_sharding, state)
        if isinstance(self._made, Narrowed):
            shapes = self._with_copy(state._replace(narrow=None))
            at = jax.tree.map(_sharding, shapes)
        key = "flush", key_of(state)
        return self._programs.get(key, lambda: jax.jit(self._made.flush, out_shardings=at))(state)

    def params(self, state: ZOState) -> Any:
        """Return the parameters, with the pending update made."""
        return self.flush(state).params

    def _program(self, state: ZOState) -> Any:
        made = self._made
        if isinstance(made, Narrowed):
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, state.params["blocks"])
            made = replace(made, dtypes=dtypes)
            at = jax.tree.map(_sharding, made.light(state)._replace(narrow=None))
        else:
            at = jax.tree.map(_sharding, state)
        whole_at = self._layout.at()

        def make() -> Any:
            def zeroth_order_step(state: ZOState, batch: Any, *rest: Any) -> Any:
                return made.step(state, batch, *rest)

            donated = () if isinstance(self._made, Streamed) else 0
            jitted = jax.jit(
                zeroth_order_step, donate_argnums=donated, out_shardings=(at, whole_at)
            )
            return jitted if self._overlap is None else overlapped(jitted, **self._overlap)

        return self._programs.get(("step", key_of(state)), make)

    def _resident_at(self, leaf: Any) -> Any:
        mesh, at = self._layout.mesh, getattr(leaf, "sharding", None)
        if mesh is None or not isinstance(at, NamedSharding) or at.mesh.shape != mesh.shape:
            return self._layout.at()
        named = jax.tree.leaves(tuple(at.spec))
        if taken := set(named) & set(self._layout.own_axes):
            raise ValueError(
                f"a parameter is sharded over {sorted(taken)} ({at.spec}), which the step spreads "
                "forward passes over: keep parameters whole along these axes"
            )
        return at


step = ZOStep  # the name by which it is made


def _sharding(leaf: Any) -> Any:
    at = getattr(leaf, "sharding", None)
    return at if isinstance(at, NamedSharding) else None


def _check_params(params: Any) -> None:
    seen: dict[int, str] = {}
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("no parameters: expected a tree with at least one array")
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        check_trained(name, leaf)
        if not np.isscalar(leaf) and id(leaf) in seen:
            raise ValueError(
                f"one array is parameter {seen[id(leaf)]} and {name}: tied parameters are one "
                "leaf, which the loss function reads twice; otherwise each would move on its own"
            )
        seen[id(leaf)] = name
