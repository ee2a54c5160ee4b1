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
from jaxoverlap.parallelism.iteration_time import IterationTime, StepTerms
from jaxoverlap.parallelism.memory import Memory
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.published.bands import band
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.search import Found, Scored, Space, search
from jaxoverlap.parallelism.stack import JAX, Stack

_MOST_HOSTS = 65536
_ONE_BY_ONE = 60  # hosts
_SLOW_SUMS = 0.1  # of a step: exposed sums over data from which on less traffic is worth its price


class NothingFitsError(ValueError):
    """No configuration of the model fits in the cluster's memory; the message says what would."""


@dataclass(frozen=True)
class Configurations(Sequence[Scored]):
    """Ranked configurations, fastest first. Prints as a table.

    Attributes:
        model, cluster, global_batch, stack: the arguments of `configure`.
        found: the outcome of the search, counts and all.
        tools: what of this library the first of them uses, and the estimated seconds each saves.
    """

    model: Transformer
    cluster: Cluster
    global_batch: int
    stack: Stack
    found: Found
    tools: tuple[str, ...] = ()

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

    def why(self) -> str:
        """Say in words why the best beats the second, by the terms that differ most."""
        if len(self) < 2:
            return "it is the only configuration that is legal and fits"
        best, second = (scored.terms.by_term for scored in self.found.best[:2])
        more = {name: second[name] - best[name] for name in best}
        ahead_s = self[1].step_s - self[0].step_s
        gains = [n for n in sorted(more, key=lambda n: -more[n]) if more[n] > 0.1 * ahead_s][:2]
        costs = [n for n in sorted(more, key=lambda n: more[n]) if more[n] < -0.1 * ahead_s][:2]
        parts = [f"{more[n] * 1e3:.0f} ms less of {n}" for n in gains]
        parts += [f"{-more[n] * 1e3:.0f} ms more of {n}" for n in costs]
        share = ahead_s / self[1].step_s
        return (
            f"1 beats 2 by {ahead_s * 1e3:.0f} ms ({share:.1%}): {', '.join(parts) or 'a tie'}.\n"
            "Differences below the form's error (docs/accuracy.md) are no reason to choose."
        )

    def __str__(self) -> str:
        found = self.found
        head = (
            f"{self.model.name}, {self.model.params / 1e9:.1f}B parameters, sequence "
            f"{self.model.sequence}, batch {self.global_batch}, on {self.cluster}; "
            f"{self.stack.name}"
        )
        searched = (
            f"{found.splits} legal splits, {found.fitting} fit in memory, {found.priced} priced, "
            f"in {found.search_s * 1e3:.0f} ms; {self.tokens_per_s:,.0f} tokens/s by the choice"
        )
        uses = "".join(f"\n  {line}" for line in self.tools)
        tools = f"\nUse for 1:{uses}" if uses else ""
        return f"{head}\n\n{self._table()}\n{self.why()}\n{self.error_band}{tools}\n{searched}"

    @property
    def error_band(self) -> str:
        """How far the form was from published steps on this chip, of this kind, in words."""
        dtype, experts = self.stack.matmul_dtype, bool(self.model.experts)
        return band(self.cluster.chip.name, dtype, experts=experts)

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
        return table("Fastest first (estimated)", columns, rows, right=columns[2:])

    def to_builtins(self) -> dict[str, Any]:
        """Return all of it as plain dicts and lists."""
        return {
            "model": asdict(self.model),
            "cluster": str(self.cluster),
            "global_batch": self.global_batch,
            "error_band": self.error_band,
            "search_s": self.found.search_s,
            "tools": list(self.tools),
            "splits": self.found.splits,
            "configurations": [
                {
                    **plain(s.configuration, s.placement.order),
                    "step_s": s.step_s,
                    "terms": s.terms.by_term,
                    "memory": s.memory.by_term,
                }
                for s in self
            ],
        }


def exposed_s(terms: StepTerms) -> float:
    """Seconds of collectives that nothing hides."""
    names = ("model", "context", "expert", "fsdp", "pipeline", "data")
    return sum(getattr(terms, name) for name in names)


def configure(
    model: Transformer | str,
    cluster: Cluster | str,
    *,
    global_batch: int,
    sequence: int | None = None,
    stack: Stack = JAX,
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
        axes: sizes allowed of some axes, as in {"pipeline": [1], "model": [1, 2, 4, 8]}.
        overlap: count tensor and FSDP collectives as `jaxoverlap.overlap` hides them.
        keep: how many to rank.
        cost: seconds of kernels and collectives; None: by the cluster's tables, or its facts.

    Raises:
        ValueError: for an unknown model or axis, or a cluster that does not parse.
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
    space = Space(axes=axes or {}, overlap=overlap)
    times = IterationTime(
        model, cost or cost_or_data_sheet(cluster), stack, global_batch=global_batch
    )
    found = search(model, cluster, times, space=space, keep=keep)
    if not found.best:
        raise NothingFitsError(_nothing_fits(model, cluster, times, space, found))
    tools = tuple(_tools(times, found.best[0])) if stack is JAX else ()
    return Configurations(model, cluster, global_batch, stack, found, tools)


def _tools(times: IterationTime, best: Scored) -> Iterator[str]:
    """Yield which of this library's tools a configuration uses, and the seconds that it saves."""
    config, step_s = best.configuration, best.step_s
    plain_s = times.terms(replace(config, overlap=False), best.placement).step_s
    if config.overlap and plain_s > step_s:
        yield (
            f"jaxoverlap.overlap(step): {plain_s:.3g} s without, {plain_s / step_s - 1:.0%} more "
            "(docs/options.md)"
        )
    if config.pipeline > 1:
        yield "jaxoverlap.pipeline.value_and_grad: its stages (docs/configure.md)"
    if config.context > 1:
        yield "jaxoverlap.train.varlen, if the lengths of sequences vary (docs/varlen.md)"
    over_network = best.placement.group("data", "context", "expert").domains > 1
    if over_network and best.terms.data > _SLOW_SUMS * step_s:
        yield (
            f"sums over data, on the network, take {best.terms.data:.3g} s of {step_s:.3g}: local "
            f"updates every 12 steps would take {best.terms.data / 12:.2g} a step "
            "(docs/local_updates.md), or compressed gradients (docs/compression.md); both change "
            "what is learnt, as these say"
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
    budget = cluster.chip.memory_bytes / times.stack.reserve
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
    budget = cluster.chip.memory_bytes / stack.reserve * cluster.gpus_per_host
    each = stack.weight_bytes + stack.gradient_bytes + stack.optimizer_bytes
    least = max(cluster.num_hosts + 1, math.ceil(model.params * each / budget))
    doubled = (least << n for n in range(6, 20))
    for hosts in (*range(least, least + _ONE_BY_ONE), *doubled):
        if hosts > _MOST_HOSTS:
            return None
        larger = replace(cluster, num_hosts=hosts)
        if search(model, larger, times, space=space, keep=0).fitting:
            return larger
    return None
