"""The command that prints layouts as lines to paste into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import Axes, Json, Pod, Processes, Step, checked
from jaxoverlap.cli.shell.output import command, say, show_json
from jaxoverlap.hardware.cluster import parse_cluster

if TYPE_CHECKING:
    from jaxoverlap.search.layouts import Layouts


@command
def advise(
    step: Step, *, pod: Pod, axes: Axes, processes: Processes = None, json: Json = False
) -> int:
    """Print sharding constraints that lower the estimated step time; compiles nothing.

    `overlap()` sets them itself; this is for those who keep their step as it is. Exit code 1 if no
    layout is faster than XLA's.
    """
    pod = checked(step, pod, axes, processes)
    with working("importing JAX"):
        from jaxoverlap.api import Overlapped
        from jaxoverlap.cli.shell.target import target
        from jaxoverlap.step.options import Options
    with working(f"looking for layouts of {step} on {pod}"):
        built = target(step, pod, axes)
        options = Options(cluster=parse_cluster(pod), layouts="advise")
        layouts = Overlapped(built.step, options).advise(*built.args)
    if layouts is None:
        say("No layout was looked for: the shardings of this step are part of its types.")
        return NO
    if json:
        show_json(msgspec.to_builtins(layouts))
    else:
        say("\n".join(advice(layouts)))
    return OK if layouts.changes else NO


def advice(layouts: Layouts) -> list[str]:
    """Write layouts as code to paste, each constraint under the line of its matmul.

    A constraint holds for a value's cotangent too, and under `jax.checkpoint` for what is computed
    again. So a matmul of the backward pass is reached through the operand whose cotangent it makes.
    """
    from jaxoverlap.search.layouts import spec_text

    lines = [*layouts.repairs, layouts.gain, *map(str, layouts.kept), *layouts.remarks]
    printed = set[tuple[object, ...]]()
    for pin in layouts.pins:
        if (key := (pin.source, pin.type, pin.spec)) in printed:
            continue
        printed.add(key)
        spec = spec_text(pin.spec, quote='"')
        lines += [
            "",
            f"# {pin.source}: the {pin.part} of type {pin.type}{pin.gain}",
            f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P({spec})))",
        ]
    if layouts.pins:
        lines += ["", "# As rules of logical axes: give each mesh axis the names of these dims."]
        lines += [f"#   {axis}: {'; then '.join(dims)}" for axis, dims in layouts.axes.items()]
    return lines
