"""Rank the configurations of a model on a cluster: `jaxoverlap.configure`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

from jaxoverlap._util.expect import expect, expect_flag
from jaxoverlap._util.limits import whole
from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.cost.find import cost_or_data_sheet, is_cost_model
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster, cluster_from
from jaxoverlap.parallelism.configuration import plain
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import Memory
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.published.bands import band
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.recompute import canonical, is_published
from jaxoverlap.parallelism.search import (
    Found,
    Scored,
    Space,
    fits_at_all,
    memory_budget,
    search,
)
from jaxoverlap.parallelism.stack import JAX, Stack
from jaxoverlap.parallelism.terms import StepTerms
from jaxoverlap.parallelism.tools import tools

_MOST_HOSTS = 65536
_ONE_BY_ONE = 60  # hosts
_TIED = 0.02  # of a step: below that the form does not tell two configurations of a model apart
_LOOKED_AT = 24  # configurations among which the usual one is looked for


class NothingFitsError(ValueError):
    """No configuration of the model fits in the cluster's memory; the message says what would."""


@dataclass(frozen=True)
class Configurations(Sequence[Scored]):
    """Ranked configurations, fastest first. Prints as a table.

    Attributes:
        model, cluster, global_batch, stack: the arguments of `configure`.
        found: the outcome of the search, counts and all.
        tools: what of this library the first of them uses, and the estimated seconds each saves.
        without: the fastest that a user has without `jaxoverlap.overlap`: of all meshes, by XLA's
            best published options; None where the ranking itself is without, or of other software.

    Of those that are within two hundredths of the fastest the most usual comes first: tensor
    parallelism within a host, a published choice of recompute, few axes, few stages.
    """

    model: Transformer
    cluster: Cluster
    global_batch: int
    stack: Stack
    found: Found
    tools: tuple[str, ...] = ()
    without: Scored | None = None

    @overload
    def __getitem__(self, index: int) -> Scored: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scored]: ...
    def __getitem__(self, index: int | slice) -> Scored | Sequence[Scored]:
        return self.found.best[index]

    def __len__(self) -> int:
        return len(self.found.best)

    def __iter__(self) -> Iterator[Scored]:
        return iter(self.found.best)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the choice, on the full cluster."""
        return self.global_batch * self.model.sequence / self[0].step_s

    @property
    def fastest(self) -> Scored:
        """The fastest, which may come after a more usual one."""
        return min(self, key=lambda scored: scored.step_s)

    def why(self) -> str:
        """Say in words why the first comes before the second, by the terms that differ most."""
        if len(self) < 2:
            return "it is the only configuration that is legal and fits"
        best, second = (scored.terms.by_term for scored in self.found.best[:2])
        more = {name: second[name] - best[name] for name in best}
        ahead_s = self[1].step_s - self[0].step_s
        gains = [n for n in sorted(more, key=lambda n: -more[n]) if more[n] > 0.1 * abs(ahead_s)]
        costs = [n for n in sorted(more, key=lambda n: more[n]) if more[n] < -0.1 * abs(ahead_s)]
        parts = [f"{more[n] * 1e3:.0f} ms less of {n}" for n in gains[:2]]
        parts += [f"{-more[n] * 1e3:.0f} ms more of {n}" for n in costs[:2]]
        share = abs(ahead_s) / self[1].step_s
        beats = f"1 beats 2 by {ahead_s * 1e3:.0f} ms ({share:.1%})"
        if ahead_s < 0:
            beats = f"1 takes {-ahead_s * 1e3:.0f} ms ({share:.1%}) more than 2, and is more usual"
        return (
            f"{beats}: {', '.join(parts) or 'a tie'}.\n"
            f"Of what is within {_TIED:.0%} of the fastest the most usual comes first: differences "
            "below\nthe form's error (docs/accuracy.md) are no reason to choose."
        )

    def __str__(self) -> str:
        found = self.found
        head = (
            f"{self.model.name}, {self.model.params / 1e9:.1f}B parameters, sequence "
            f"{self.model.sequence}, batch {self.global_batch}, on {self.cluster}; "
            f"{self.stack.name}"
        )
        searched = (
            f"{found.splits} legal splits, {found.priced} priced in all placements, in "
            f"{found.search_s * 1e3:.0f} ms; {self.tokens_per_s:,.0f} tokens/s by the choice"
        )
        uses = "".join(f"\n  {line}" for line in self.tools)
        tools = f"\nUse for 1:{uses}" if uses else ""
        lines = (head, "", self._table(), self.why(), self.pool, self.error_band + tools, searched)
        return "\n".join(lines)

    @property
    def error_band(self) -> str:
        """How far the form was from published steps of this software on this chip, in words."""
        dtype, experts = self.stack.matmul_dtype, bool(self.model.experts)
        text = band(self.stack.name, self.cluster.chip.name, dtype, experts=experts)
        if self[0].configuration.overlap:
            text += " No step with jaxoverlap.overlap was measured."
        return text

    @property
    def pool(self) -> str:
        """How much of a GPU's memory the allocator of the first has to take, in words."""
        chip, needs = self.cluster.chip, self[0].memory.total
        share = needed_fraction(needs, self.cluster, self.stack)
        text = f"1 needs {needs / 1e9:.1f} GB of {chip.memory_bytes / 1e9:.1f}, by the count."
        if self.stack.pool == 1.0:
            return text
        if share <= self.stack.pool:
            return f"{text} JAX's default pool of {self.stack.pool:.0%} is enough."
        return (
            f"{text} Start it with XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}; JAX takes "
            f"{self.stack.pool:.0%} unless it is told."
        )

    def _table(self) -> str:
        columns = (
            "",
            "configuration, slowest axis first",
            "step s",
            "compute",
            "collectives",
            "bubble",
            "memory GB",
        )
        rows = [
            (
                str(number),
                scored.shown,
                f"{scored.step_s:.3g}",
                f"{scored.terms.compute + scored.terms.recompute:.3g}",
                f"{exposed_s(scored.terms):.3g}",
                f"{scored.terms.bubble:.3g}",
                f"{scored.memory.total / 1e9:.1f}",
            )
            for number, scored in enumerate(self, 1)
        ]
        return table(
            "Fastest first (estimated); of ties the most usual first",
            columns,
            rows,
            right=columns[2:],
        )

    def to_builtins(self) -> dict[str, Any]:
        """Return all of it as plain dicts and lists."""
        without = None if self.without is None else _as_builtins(self.without)
        return {
            "model": asdict(self.model),
            "cluster": str(self.cluster),
            "global_batch": self.global_batch,
            "dtype": self.stack.matmul_dtype,
            "memory_fraction": needed_fraction(self[0].memory.total, self.cluster, self.stack),
            "error_band": self.error_band,
            "search_s": self.found.search_s,
            "tools": list(self.tools),
            "splits": self.found.splits,
            "without": without,
            "configurations": [_as_builtins(scored) for scored in self],
        }


def _as_builtins(scored: Scored) -> dict[str, Any]:
    return {
        **plain(scored.configuration, scored.placement.order),
        "step_s": scored.step_s,
        "terms": scored.terms.by_term,
        "memory": scored.memory.by_term,
    }


def exposed_s(terms: StepTerms) -> float:
    """Seconds of collectives that nothing hides."""
    names = ("offload", "model", "context", "expert", "fsdp", "pipeline", "data")
    return sum(getattr(terms, name) for name in names)


def configure(
    model: Transformer | str,
    cluster: Cluster | str,
    *,
    global_batch: int,
    sequence: int | None = None,
    stack: Stack = JAX,
    dtype: str | None = None,
    recompute: str | None = None,
    memory_fraction: float | None = None,
    axes: Mapping[str, Collection[int]] | None = None,
    overlap: bool = True,
    keep: int = 10,
    cost: CostModel | None = None,
) -> Configurations:
    """Rank the configurations of a model on a cluster, fastest first.

    ConfigTuner's analytical form (arXiv 2512.24750, completed: `iteration_time`) for every legal
    configuration that fits in memory, each in its best placement.

    Args:
        model: a `Transformer`, or the name of one ("gpt-175b").
        cluster: what `parse_cluster` takes or gives.
        global_batch: sequences of a step.
        sequence: tokens of a sequence; None: the model's.
        stack: the training software.
        dtype: of a layer's matmuls: "bf16", "fp8", "mxfp8" or "nvfp4", as the chip has them; None:
            the stack's, bf16 of those that have a name.
        recompute: the one choice of recompute to take, such as "minimal_flash" or "saves qkv+out"
            (`Configuration.recompute`); None: the fastest that fits.
        memory_fraction: share of a GPU's memory that the allocator gets, as
            XLA_PYTHON_CLIENT_MEM_FRACTION; None: up to the largest that leaves room beside it.
        axes: sizes allowed of some axes, as in {"pipeline": [1], "model": [1, 2, 4, 8]}.
        overlap: count collectives as `jaxoverlap.overlap` hides them; False: as XLA's best
            published options do, which hide FSDP's.
        keep: how many to rank.
        cost: seconds of kernels and collectives; None: by the cluster's tables, or its facts.

    Raises:
        ValueError: for an unknown model, axis, dtype or policy, or a cluster that does not parse.
        NothingFitsError: if no configuration is legal and fits; it says which term is too large,
            and which cluster would do.
    """
    cluster = cluster_from(cluster)
    named = isinstance(model, str | Transformer)
    expect(named, "model", model, "a jaxoverlap.Transformer, or the name of a known model")
    global_batch, keep = whole("global_batch", global_batch, 1), whole("keep", keep, 1)
    expect(isinstance(stack, Stack), "stack", stack, "a jaxoverlap.parallelism.stack.Stack")
    by_axis = isinstance(axes, Mapping | None)
    expect(by_axis, "axes", axes, "the sizes allowed by axis, as in {'model': [1, 2]}")
    expect_flag("overlap", overlap)
    priced = cost is None or is_cost_model(cost)
    expect(priced, "cost", cost, "what jaxoverlap.cost.find.cost_model gives")
    if isinstance(model, str):
        model = named_model(model, sequence=sequence)
    elif sequence is not None:
        model = replace(model, sequence=sequence)
    part = memory_fraction is None or 0.0 < memory_fraction <= 1.0
    expect(part, "memory_fraction", memory_fraction, "a share above 0, at most 1")
    cost = cost or cost_or_data_sheet(cluster)
    dtype = stack.matmul_dtype if dtype is None else dtype
    if dtype not in (known := sorted({*cost.dtypes} & {"bf16", "fp8", "mxfp8", "nvfp4"})):
        raise ValueError(
            f"dtype={dtype!r} on {cluster.chip.name}: its matmuls are known in {', '.join(known)}"
        )
    if recompute is not None:
        canonical(recompute)
    used = replace(stack, matmul_dtype=dtype)
    space = Space(axes=axes or {}, overlap=overlap, recompute=recompute, pool=memory_fraction)
    times = IterationTime(model, cost, used, global_batch=global_batch)
    found = search(model, cluster, times, space=space, keep=max(keep, _LOOKED_AT))
    if not found.best:
        raise NothingFitsError(_nothing_fits(model, cluster, times, space, found))
    best = usual_first(found.best)
    shown, without, uses = replace(found, best=best[:keep]), None, ()
    if stack is JAX:
        if overlap:
            every = Space(axes={}, overlap=False, recompute=None, pool=memory_fraction)
            others = search(model, cluster, times, space=every, keep=_LOOKED_AT).best
            without = usual_first(others)[0]
        uses = tuple(tools(times, best[0], without, space))
    return Configurations(model, cluster, global_batch, used, shown, uses, without)


def needed_fraction(needs_bytes: float, cluster: Cluster, stack: Stack) -> float:
    """Return the share of a GPU's memory that an allocator needs for a step, in hundredths."""
    share = needs_bytes / memory_budget(cluster, stack, 1.0)
    return min(math.ceil(share * 100) / 100, 1.0)


def usual_first(found: Sequence[Scored]) -> tuple[Scored, ...]:
    """Sort those that tie with the fastest by how usual they are; the others stay behind them."""
    limit_s = (1 + _TIED) * found[0].step_s
    tied = [scored for scored in found if scored.step_s <= limit_s]
    return (*sorted(tied, key=_unusual), *found[len(tied) :])


def _unusual(scored: Scored) -> tuple[float, ...]:
    """Rank a configuration by what people avoid; the least is the most usual."""
    config = scored.configuration
    axes = [size for size in config.axes.values() if size > 1]
    return (
        scored.placement.group("model").domains > 1,
        not is_published(config.recompute),
        len(axes),
        config.pipeline,
        config.context,
        scored.step_s,
    )


def _nothing_fits(
    model: Transformer, cluster: Cluster, times: IterationTime, space: Space, found: Found
) -> str:
    if found.smallest is None:
        sizes = "; ".join(f"{a} in {sorted(of)}" for a, of in space.axes.items())
        fixed = f" with {sizes}" if sizes else ""
        return (
            f"no legal way to split {model.name} and a batch of {times.global_batch} over "
            f"{cluster}{fixed}: sizes have to divide heads ({model.heads}), layers "
            f"({model.layers}) and the batch, and to multiply to {cluster.num_devices}; change "
            f"{'the sizes, ' if space.axes else ''}the batch or the number of GPUs"
        )
    of, needs = found.smallest
    budget = memory_budget(cluster, times.stack, space.pool)
    larger = _smallest_cluster(model, cluster, times, space)
    would = f"{larger} would do" if larger else f"no cluster of up to {_MOST_HOSTS} hosts would do"
    return (
        f"{model.name} does not fit on {cluster}: even {of} needs {human_bytes(int(needs.total))} "
        f"of the {human_bytes(int(budget))} of a GPU that a step can use; most of it is "
        f"{_largest(needs)}. {would}."
    )


def _largest(needs: Memory) -> str:
    name, size = max(needs.by_term.items(), key=lambda item: item[1])
    return f"{name}, {human_bytes(int(size))}"


def _smallest_cluster(
    model: Transformer, cluster: Cluster, times: IterationTime, space: Space
) -> Cluster | None:
    """Return the smallest cluster in which it fits, of as many GPUs a host.

    Hosts are tried one by one from what the state alone needs, then doubled.
    """
    stack = times.stack
    budget = memory_budget(cluster, stack, space.pool) * cluster.gpus_per_host
    each = stack.weight_bytes + stack.gradient_bytes + stack.optimizer_bytes
    least = max(cluster.num_hosts + 1, math.ceil(model.params * each / budget))
    doubled = (least << n for n in range(6, 20))
    for hosts in (*range(least, least + _ONE_BY_ONE), *doubled):
        if hosts > _MOST_HOSTS:
            return None
        larger = replace(cluster, num_hosts=hosts)
        if fits_at_all(model, larger, times, space=space):
            return larger
    return None
