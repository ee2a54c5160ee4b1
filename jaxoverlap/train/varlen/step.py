"""Train on batches of any lengths with one compiled step: the plan goes in as arrays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._util.limits import flag
from jaxoverlap.plan.table import mesh_text
from jaxoverlap.train.optax_update import update
from jaxoverlap.train.programs import key_of
from jaxoverlap.train.varlen.arrays import PlanArrays
from jaxoverlap.train.varlen.attend import attention, nodes_of_mesh
from jaxoverlap.train.varlen.costs import AttentionCosts
from jaxoverlap.train.varlen.device.fused import has_kernel
from jaxoverlap.train.varlen.finite import StepReports, kept_if_finite
from jaxoverlap.train.varlen.plan import BatchPlan
from jaxoverlap.train.varlen.remap import Moves
from jaxoverlap.train.varlen.rings import Bounds
from jaxoverlap.train.varlen.state import check_optimizer, check_state, check_unshared

_UNREAD = 2  # steps whose reports are not read yet, so that the host does not wait for devices
_NO_WEIGHT = 1e-9  # the least sum of weights: a batch without labels has a loss of zero

Batch = dict[str, Array]
Attend = Callable[[Array, Array, Array], Array]
Loss = Callable[[Any, Batch, Attend], Any]
"""loss(params, batch, attend) -> the sum of the losses of all tokens; see `train_step`."""


class VarlenStep:
    """A train step for batches of any lengths.

        step = varlen.train_step(model, optax.adamw(1e-3), mesh, costs=costs)
        state, metrics = step(state, planner(lengths), {"inputs": ..., "targets": ...})

    Args:
        model: `model(params, batch, attend)`, the sum of all tokens' losses. The batch has the
            values of tokens, f[nodes, devices of a node x tokens, ...], "positions" in their
            sequences, and "weights", zero where there is no token: multiply the losses by them.
            `attend(q, k, v)` is causal attention within each sequence; all three have heads and
            head as their last dims.
        optimizer: an optax transformation; of complex parameters it gets the conjugates of JAX's
            gradients, along which the loss falls.
        mesh: two automatic axes, nodes and devices of a node, or a third over which `attend` shards
            heads; the model shards its weights over it. The plans are for the first two.
        costs: prices that say over how many rails hops between nodes go; none: over one.
        transform: what is done with each jitted step before it runs, as `jaxoverlap.overlap`.
        fused: as `attention` has it.
        has_aux: whether the model returns (sum, aux); the metrics then have "aux".
        check: whether a step whose loss, gradients or update are infinite or not a number is left
            out and named. This needs memory for a second copy of parameters and optimizer.

    Attributes:
        compiled: the programs, by bounds and by what else they were compiled for.

    Raises:
        ValueError: for a mesh of other than two or three automatic axes.
        RuntimeError: if cuDNN's kernel on this GPU computes something else than plain matmuls.
    """

    def __init__(
        self,
        model: Loss,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        costs: AttentionCosts | None = None,
        transform: Callable[[Any], Any] = lambda step: step,
        fused: bool | None = None,
        has_aux: bool = False,
        check: bool = True,
    ):
        self.nodes = nodes_of_mesh(mesh)
        self.fused = has_kernel(mesh) if fused is None else fused
        self.model, self.optimizer, self.mesh, self.costs = model, optimizer, mesh, costs
        self.transform, self.has_aux = transform, has_aux
        self._checks_finite, self._reports = flag("check", check), StepReports()
        self.compiled: dict[Hashable, Callable] = {}

    def __repr__(self) -> str:
        """Return the nodes, the kernel of attention and how many programs are compiled."""
        kernel = "cuDNN's kernel" if self.fused else "plain matmuls"
        programs = f"{len(self.compiled)} programs compiled"
        return f"VarlenStep on {mesh_text(self.mesh.shape)}, attention by {kernel}, {programs}"

    def __call__(
        self,
        state: dict[str, Any],
        plan: BatchPlan,
        tokens: dict[str, Any],
        key: Array | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take a step.

        Args:
            state: {"params", "optimizer", "step"}, on the mesh; it is donated. Other entries stay
                as they are.
            plan: the batch's.
            tokens: values of the batch's tokens, [tokens, ...] each, sequence after sequence;
                "weights" among them are the loss's, "positions" the model's.
            key: of random numbers, as for dropout; the model has it as batch["key"], another in
                each step.

        Returns:
            The new state, and {"loss", "grad_norm"}, with "aux" if the model has it: the sum of the
            losses over that of the weights, in nats.

        Raises:
            NonFiniteStepError: if a step before was left out as it was not finite. It is raised two
                steps late at most (`check` raises it at once) and the state given here is good.
            ValueError: for a plan of other nodes, values for another number of tokens, a value
                named "key", or a state that is not on the mesh or has one array twice.
        """
        if plan.nodes != self.nodes:
            raise ValueError(f"a plan for {plan.nodes} and a mesh of {self.nodes}: plan for it")
        check_state(state, self.mesh)
        check_unshared(state)
        self._reports.check(_UNREAD)
        batch = self._with_key(self.batch(plan, tokens), key)
        program = self.program(plan.bounds, state, batch)
        state, metrics, report = program(state, batch, self.arrays(plan))
        if report is not None:
            self._reports.append(report)
        return state, metrics

    def check(self) -> None:
        """Wait for the steps so far, and raise if one was left out.

        Raises:
            NonFiniteStepError: naming the first such step.
        """
        self._reports.check(0)

    def compile(
        self,
        programs: Iterable[Bounds],
        state: dict[str, Any],
        tokens: dict[str, Any],
        key: Array | None = None,
    ) -> None:
        """Compile programs before they are needed; a step then compiles nothing.

        Args:
            programs: a planner's.
            state: as a step takes it, arrays or shapes with shardings.
            tokens: values of tokens, or their shapes; how many tokens there are does not matter.
            key: as a step takes it, if it does.
        """
        for bounds in programs:
            batch, arrays = self.shapes(bounds, tokens)
            batch = self._with_key(batch, key)
            lowered = self.program(bounds, state, batch).lower(state, batch, arrays)
            self.compiled[_key(bounds, state, batch)] = lowered.compile()

    def _with_key(self, batch: Batch, key: Array | None) -> Batch:
        return batch if key is None else batch | {"key": key}

    def shapes(self, bounds: Bounds, tokens: dict[str, Any]) -> tuple[Batch, PlanArrays]:
        """Return the shapes of the batch and of the plan's arrays that a program takes."""
        axes, total = self.mesh.axis_names[:2], self.nodes.total
        rows = NamedSharding(self.mesh, P(*axes))
        whole, each = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(axes))

        def like(shape: tuple[int, ...], dtype: Any, at: NamedSharding) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

        lead = self.nodes.count, self.nodes.devices * bounds.tokens
        kinds = {name: (shape[1:], dtype) for name, (shape, dtype) in _kinds(tokens).items()}
        kinds = {"positions": ((), jnp.int32), "weights": ((), jnp.float32)} | kinds
        batch = {n: like((*lead, *shape), dtype, rows) for n, (shape, dtype) in kinds.items()}
        where = like((total, bounds.slots), jnp.int32, whole)
        sent = like((total, total, bounds.sent), jnp.int32, each)
        there = Moves(sent, like((total, bounds.slots), jnp.int32, each))
        back = Moves(sent, like((total, bounds.tokens), jnp.int32, each))
        return batch, PlanArrays(where, where, there, back)

    def program(self, bounds: Bounds, state: dict[str, Any], batch: Batch) -> Any:
        """Return the program of step(state, batch, arrays) for plans that fit these bounds.

        It gives the state, with the shardings that it has, the metrics, and a report for
        `finite.StepReports`, None without `check`. State and batch are arrays, or shapes with
        shardings.
        """
        key = _key(bounds, state, batch)
        if key not in self.compiled:
            check_optimizer(state, self.optimizer)
            replicated = NamedSharding(self.mesh, P())
            at = jax.tree.map(lambda leaf: leaf.sharding, state), replicated, replicated
            step = functools.partial(self._step, bounds)
            step = jax.jit(step, donate_argnums=0, out_shardings=at)
            self.compiled[key] = self.transform(step)
        return self.compiled[key]

    def batch(self, plan: BatchPlan, tokens: dict[str, Any]) -> Batch:
        """Shard the tokens' values over the devices, and add "positions" and "weights" of tokens.

        Unless these are given, positions are those in the sequences, and weights one. Where there
        is no token both are zero.
        """
        _kinds(tokens)
        values = {"positions": plan.linear_positions}
        values["weights"] = (plan.linear >= 0).astype("float32")
        values |= {name: plan.laid_out(np.asarray(value)) for name, value in tokens.items()}
        at = NamedSharding(self.mesh, P(*self.mesh.axis_names[:2]))
        shape = self.nodes.count, self.nodes.devices * plan.bounds.tokens
        return {n: _placed(v.reshape(*shape, *v.shape[2:]), at) for n, v in values.items()}

    def arrays(self, plan: BatchPlan) -> PlanArrays:
        """Put a plan's arrays on the mesh."""
        made, axes = plan.arrays, self.mesh.axis_names[:2]
        whole, each = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(axes))
        there, back = jax.tree.map(lambda x: _placed(x, each), (made.to_attention, made.to_linear))
        segment, position = (_placed(x, whole) for x in (made.segment, made.position))
        return PlanArrays(segment, position, there, back)

    def _step(
        self, bounds: Bounds, state: dict[str, Any], batch: Batch, arrays: PlanArrays
    ) -> tuple[dict[str, Any], dict[str, Array], Array | None]:
        if "key" in batch:
            batch = batch | {"key": jax.random.fold_in(batch["key"], state["step"])}
        (loss, aux), gradients = self._gradients(bounds, state["params"], batch, arrays)
        params, moments = before = state["params"], state["optimizer"]
        updates, inner = update(
            self.optimizer, gradients, moments, params, value=loss, grad=gradients
        )
        after, report = (optax.apply_updates(params, updates), inner), None
        metrics = dict(loss=loss, grad_norm=optax.tree.norm(gradients))
        metrics |= {"aux": aux} if self.has_aux else {}
        if self._checks_finite:
            after, report = kept_if_finite(loss, gradients, after, before, state["step"])
        new = copy.copy(state)  # of its own type, with entries that are not the step's
        new.update(params=after[0], optimizer=after[1], step=state["step"] + 1)
        return new, metrics, report

    def _gradients(
        self, bounds: Bounds, params: Any, batch: Batch, arrays: PlanArrays
    ) -> tuple[tuple[Array, Any], Any]:
        """Return ((mean loss, aux), gradients)."""
        attends = functools.partial(
            attention, arrays=arrays, mesh=self.mesh, bounds=bounds, costs=self.costs,
            fused=self.fused,
        )  # fmt: skip

        def mean_loss(params: Any) -> tuple[Array, Any]:
            total, aux = _sum_and_aux(self.model(params, batch, attends), self.has_aux)
            return total / jnp.maximum(batch["weights"].sum(), _NO_WEIGHT), aux

        value, gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
        return value, jax.tree.map(jnp.conj, gradients)


train_step = VarlenStep  # the name by which it is made


def _key(bounds: Bounds, state: dict[str, Any], batch: Batch) -> Hashable:
    """Return the key of a program; batches are sharded alike."""
    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return bounds, key_of((state, kinds))


def _kinds(tokens: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of each value of tokens, as a program has them.

    Raises:
        ValueError: for values that are not arrays of numbers, [tokens, ...], or named "key".
    """
    found = dict[str, tuple[tuple[int, ...], Any]]()
    if "key" in tokens:
        raise ValueError('values of tokens named "key": pass a key of random numbers as key=')
    for name, value in tokens.items():
        like = value if hasattr(value, "dtype") else np.asarray(value)
        numbers = like.dtype == bool or jnp.issubdtype(like.dtype, jnp.number)
        if not (isinstance(name, str) and like.shape and numbers):
            raise ValueError(
                f"values of tokens named {name!r}, of dtype {like.dtype} and shape {like.shape}: "
                "expected numbers [tokens, ...] under a name that is a string"
            )
        found[name] = like.shape, jax.dtypes.canonicalize_dtype(like.dtype)
    return found


def _sum_and_aux(found: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the sum of losses that a model returned, and its aux or None."""
    match found if has_aux else (found, None):
        case jax.Array() as total, aux if jnp.issubdtype(total.dtype, jnp.floating):
            if not total.shape:
                return total, aux
    raise ValueError(
        f"the model returned {found!r}: expected {'(sum, aux) with ' if has_aux else ''}the sum of "
        f"the losses of all tokens, one array of floats of shape ()"
    )


def _placed(value: Any, at: NamedSharding) -> Array:
    """Put an array on the mesh, of which every process has all elements."""
    return jax.make_array_from_callback(value.shape, at, lambda index: value[index])
