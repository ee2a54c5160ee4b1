"""Configure training runs: the fields that all runs share, and the GPT's own."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from typer import Option

from jaxoverlap._util import limits

DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTION = ("auto", "xla", "cudnn")  # auto: cuDNN where it runs (`models/attention.py`)


class Mistake(ValueError):
    """An error in the user's input; the message says how to correct it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The configuration that every run has; each field is a flag of the trainer's command line."""

    AXES: ClassVar[tuple[str, str]]  # of the mesh, each a field of the same name
    # Numbers that may be 0; the others are above it.
    FROM_0: ClassVar[frozenset[str]] = frozenset(
        ("profile", "seed", "warmup", "process", "weight_decay", "outer_momentum")
    )

    steps: Annotated[int, Option(help="Train to this many steps.")] = 100
    plain: Annotated[bool, Option("--plain", help="Run the step as it is written.")] = False
    ops: Annotated[bool, Option("--ops", help="Matmuls partition themselves.")] = False
    halves: Annotated[int | None, Option(help="Parts in which rows run; else by price.")] = None
    memory: Annotated[str | None, Option(help="A share, as 0.9, or 70GB; keeps more.")] = None
    plan: Annotated[Path | None, Option(help="Follow process 0's plan in this file.")] = None
    checkpoint: Annotated[Path | None, Option(help="Save here, and resume.")] = None
    save_every: Annotated[int, Option(help="Steps.")] = 50
    metrics: Annotated[Path | None, Option(help="Write JSON lines here.")] = None
    log_every: Annotated[int, Option(help="Steps between lines, if not on a terminal.")] = 10
    profile: Annotated[int, Option(help="Trace so many steps, to out/profile.")] = 0
    seed: Annotated[int, Option(help="Of weights and batches.")] = 0
    local_updates: Annotated[str | None, Option(help="Train in rounds, as by co2.")] = None
    every: Annotated[int, Option(help="Steps of such a round.")] = 12
    outer_rate: Annotated[float | None, Option(help="Of the outer optimizer.")] = None
    outer_momentum: Annotated[float | None, Option(help="Of the outer optimizer.")] = None
    staleness: Annotated[float | None, Option(help="CO2's penalty, 1 for none.")] = None
    fragments: Annotated[int | None, Option(help="Of streaming_diloco.")] = None
    compress: Annotated[str | None, Option(help="Gradients, as by lgreco:powersgd:4.")] = None
    compress_every: Annotated[int, Option(help="Steps, or rounds, between settings.")] = 500
    workers: Annotated[int, Option(help="Of these two, each with the mesh below.")] = 2

    distributed: Annotated[
        bool, Option("--distributed", help="Join the processes of SLURM, Kubernetes or MPI.")
    ] = False
    coordinator: Annotated[str | None, Option(help="HOST:PORT of process 0, to join.")] = None
    processes: Annotated[int | None, Option(help="In all, with --coordinator.")] = None
    process: Annotated[int | None, Option(help="This one, with --coordinator.")] = None
    timeout_s: Annotated[int, Option(help="Seconds to wait for a process.")] = 120

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    mlp: int = 512
    batch: Annotated[int, Option(help="Over all devices.")] = 8
    dtype: Annotated[str, Option(help="Of activations and matmuls.")] = "float32"
    param_dtype: Annotated[str, Option(help="Of weights and Adam's moments.")] = "float32"
    attention: Annotated[str, Option(help="xla, cudnn, or auto: cudnn where it runs.")] = "auto"
    learning_rate: float = 3e-3
    warmup: Annotated[int, Option(help="Steps.")] = 10
    weight_decay: float = 0.1

    def __post_init__(self):
        """Raise `Mistake` with everything that is wrong with the options.

        Raises:
            Mistake: that names every option that cannot be; first those that are out of range.
        """
        if found := list(self.out_of_range()) or list(self.mistakes()):
            raise Mistake("; and ".join(found))

    def out_of_range(self) -> Iterator[str]:
        """Yield the errors of single options."""
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            kinds = {types[field.name], *typing.get_args(types[field.name])}
            value = getattr(self, field.name)
            if value is None and type(None) in kinds:
                continue
            zero = field.name in self.FROM_0
            try:
                if int in kinds:
                    limits.whole(field.name, value, 0 if zero else 1)
                elif float in kinds:
                    bound: dict[str, Any] = dict(least=0) if zero else dict(above=0)
                    limits.number(field.name, value, **bound)
            except ValueError as error:
                yield str(error)
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                yield f"{name}={getattr(self, name)!r}: expected one of {', '.join(DTYPES)}"
        if self.attention not in ATTENTION:
            yield f"attention={self.attention!r}: expected one of {', '.join(ATTENTION)}"

    def mistakes(self) -> Iterator[str]:
        """Yield the errors of combinations of options, each of which is in range."""
        if self.ops and (self.plain or self.halves):
            yield "ops with plain or halves: matmuls partition themselves, or they do not"
        if (self.coordinator is None) != (self.processes is None) or (self.processes is None) != (
            self.process is None
        ):
            yield (
                f"coordinator={self.coordinator}, processes={self.processes}, "
                f"process={self.process}: give all three, or none; --distributed finds them where "
                "SLURM, Kubernetes or MPI started the processes"
            )
        if self.process is not None and self.process >= (self.processes or 0):
            yield f"process={self.process}: expected less than processes={self.processes}"
        if self.has_workers and (self.plan or self.halves or self.profile):
            yield (
                "--plan, --halves and --profile are of the step alone: leave them out with "
                "--compress and --local-updates"
            )
        names = ("outer_rate", "outer_momentum", "staleness", "fragments")
        stated = [name for name in names if getattr(self, name) is not None]
        if stated and not self.local_updates:
            yield f"{', '.join(stated)} without local_updates: these are of its outer optimizer"
        if self.plan and (self.plain or self.halves or self.memory):
            yield "--plan says what is overlapped: leave out --plain, --halves and --memory"
        if self.memory and (self.plain or self.ops or self.has_workers):
            yield "--memory is of the overlapped step: leave out --plain, --ops and --compress"
        for name, by, divisor in self.divisors():
            if getattr(self, name) % divisor:
                yield (
                    f"{name}={getattr(self, name)} with {by}={divisor}: {name} must be a multiple "
                    f"of {by}; change one of them"
                )
        yield from self.unreadable()

    def unreadable(self) -> Iterator[str]:
        """Yield the errors of files that options name, in the process that reads them."""
        if self.plan and not self.process and not self.plan.is_file():
            yield f"--plan {self.plan}: no such file; expected a plan that Plan.write wrote"
        if self.checkpoint and self.checkpoint.exists() and not self.checkpoint.is_dir():
            yield f"--checkpoint {self.checkpoint} is a file; give a directory"
        if self.metrics and self.metrics.is_dir():
            yield f"--metrics {self.metrics} is a directory; give a file"

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        """Yield (field, its required divisor, the divisor's value), for equal device shards."""
        first, second = self.AXES
        yield "hidden", "heads", self.heads
        if self.has_workers:
            yield "batch", f"workers x {first}", self.workers * self.mesh[first]
        for name in ("hidden", "batch"):
            yield name, first, self.mesh[first]
        for name in ("heads", "mlp"):
            yield name, second, self.mesh[second]

    @property
    def has_workers(self) -> bool:
        """Return whether the run has several workers, each with its own mesh."""
        return bool(self.local_updates or self.compress)

    @property
    def devices(self) -> int:
        """Return the number of devices of all workers."""
        return (self.workers if self.has_workers else 1) * math.prod(self.mesh.values())

    @property
    def head_size(self) -> int:
        """Return the size of an attention head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step, over all devices."""
        raise NotImplementedError

    def used(self, path: str) -> float:
        """Return the share of a weight that each token is multiplied by."""
        return 1.0

    @property
    def mesh(self) -> dict[str, int]:
        """Return the size of each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in self.AXES}

    @classmethod
    def sized(cls, sizes: dict[str, Any], changes: dict[str, Any]) -> Self:
        """Return a configuration with sizes for a pod, in bfloat16, with plain attention."""
        return cls(**{"layers": 4, "dtype": "bfloat16", "attention": "xla", **sizes, **changes})


@dataclasses.dataclass(frozen=True)
class TextRun(Run):
    """A run that learns the next byte of a text."""

    text: Annotated[Path | None, Option(help="A file; default: the Python manual.")] = None
    vocab: Annotated[int, Option(help="256 for bytes; more are padding.")] = 256
    sequence: Annotated[int, Option(help="Bytes.")] = 128

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.vocab < 256:
            yield f"vocab={self.vocab}: expected 256 or more, one row for each byte"
        if (getattr(self, "head_dim", None) or self.hidden // self.heads) % 2:
            yield (
                f"hidden={self.hidden} with heads={self.heads}: a head must have an even size for "
                "rotary positions; change one of them"
            )

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        yield from super().divisors()
        first, second = self.mesh.values()
        yield "vocab", " x ".join(self.AXES), first * second


@dataclasses.dataclass(frozen=True)
class Config(TextRun):
    """The GPT of models/gpt.py. The defaults train in seconds on a CPU."""

    AXES = ("data", "model")

    data: Annotated[int, Option(help="Mesh axis: batch and FSDP.")] = 2
    model: Annotated[int, Option(help="Mesh axis: tensor and sequence.")] = 4
    configuration: Annotated[
        Path | None, Option(help="A file of `jaxoverlap configure --json`: its first mesh.")
    ] = None
    pipeline_order: Annotated[str, Option(help="Of its pipeline: 1F1B or ZB-H1.")] = "1F1B"

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        yield from super().divisors()
        yield "sequence", "model", self.model

    @classmethod
    def pod(cls, *, data: int = 1, model: int = 8, **changes: Any) -> "Config":
        """Four layers of a 7B GPT, one sequence of 4096 a data rank: a pod's shapes and traffic.

        On a mesh without data parallelism the batch is two: XLA drops a batch dim of size one, and
        then gathers the same activations again for each matmul that reads them.
        """
        sizes = dict(hidden=4096, heads=32, mlp=16384, sequence=4096, batch=max(2, data))
        return cls.sized(sizes | dict(data=data, model=model), changes)
