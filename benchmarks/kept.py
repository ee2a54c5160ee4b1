"""Is `memory=` as fast as the best policy of `jax.checkpoint`? A question's GPT on one mesh.

python -m benchmarks.kept                                # 7B on 64 H100s, 4 of its 32 layers
python -m benchmarks.kept --question "70B, 64" --second 8 --layers 80

The rows are the step with each of five policies, by XLA's defaults and with published options, and
the step without a policy, overlapped, as it is and with `memory=0.9`. XLA compiles them for GPUs
that are not there, and `jaxoverlap.simulate` gives their seconds. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame
from benchmarks.plain_gpt import EVERYWHERE, abstract_args, make_step
from benchmarks.pods.questions import QUESTIONS, Question
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.hardware.pods import compiler_options, pod_mesh

Policy = Callable[..., Any]
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep what cuDNN's attention gives: its output, and the logarithms of its sums."""
    return primitive.name.startswith("dot_product_attention_fwd")


def dots_and_attention(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keep that, and matmuls with weights."""
    return bool(attention(primitive) or _DOTS(primitive, *avals, **params))


POLICIES: Mapping[str, Policy | None] = {
    "full": None,
    "attention": attention,
    "dots": _DOTS,
    "dots + attention": dots_and_attention,
    "all dots": jax.checkpoint_policies.dots_saveable,
}
console = Console(width=120)
app = frame.app()


def rows(question: Question, second: int, layers: int) -> Iterator[tuple[str, str, float, float]]:
    """Yield each row's name, its setting, milliseconds and peak memory in GB."""
    assert question.gpt is not None
    sizes = replace(question.gpt, batch=question.batch, layers=layers)
    axes = next(axes for axes in question.meshes if axes[question.axes[1]] == second)
    mesh = pod_mesh(question.pod, axes)
    args = abstract_args(sizes, mesh)

    def measured(compiled: Any) -> tuple[float, float]:
        simulated = jaxoverlap.simulate(compiled, question.pod)
        return simulated.step_s * 1e3, peak_bytes(compiled.memory_analysis()) / 1e9

    for name, policy in POLICIES.items():
        step: Any = make_step(sizes, mesh, EVERYWHERE, policy=policy)
        for flags in ("XLA's defaults", *COMPARED):
            options = accepted(flags, mesh.devices.flat[0])[0] if flags in COMPARED else {}
            compiled = step.lower(*args).compile({**compiler_options(), **options})
            yield name, flags, *measured(compiled)
    step: Any = make_step(sizes, mesh, EVERYWHERE)
    for memory in (None, 0.9):
        overlapped: Any = jaxoverlap.overlap(step, cluster=question.pod, memory=memory)
        compiled = overlapped.lower(*args).compile()
        yield "overlap()", f"memory={memory}", *measured(compiled)


@app.command()
def main(
    question: Annotated[str, typer.Option(help="A part of its name.")] = "7B, 64 H100",
    second: Annotated[int, typer.Option(help="GPUs along the mesh's second axis.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
) -> None:
    """Compile and simulate; exit 1 if a policy is faster than `memory=0.9`."""
    known = {name: one for name, one in QUESTIONS.items() if one.gpt is not None}
    named = [name for name in known if question in name]
    if not named:
        raise typer.BadParameter(f"no GPT's question has {question!r}: {', '.join(known)}")
    asked = known[named[0]]
    if second not in [axes[asked.axes[1]] for axes in asked.meshes]:
        raise typer.BadParameter(f"no mesh has {second} GPUs along its second axis")
    table = Table(title=f"{named[0]}, {layers} layers, {second} along {asked.axes[1]}")
    for column in ("what is kept", "options", "ms", "peak, GB"):
        table.add_column(column)
    found = list(rows(asked, second, layers))
    for name, flags, ms, peak in found:
        table.add_row(name, flags, f"{ms:.1f}", f"{peak:.1f}")
    console.print(table)
    *others, (_, _, own_ms, _) = found
    raise typer.Exit(int(min(ms for _, _, ms, _ in others) < own_ms))


if __name__ == "__main__":
    app()
