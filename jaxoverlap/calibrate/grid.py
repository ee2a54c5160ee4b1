"""Name the sizes at which `--here` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The sizes that are measured.

    Attributes:
        dtypes: of matmuls, as HLO writes them.
        m, nk: dims of matmuls; one of 256 rows in eight devices is one of 32 rows.
        elements: of float32 on each device, of other kernels and collectives.
        whole_groups: whether collectives are measured among all devices alone, and not in groups.
        rounds: how often each is timed.
    """

    dtypes: tuple[str, ...] = ("f32", "bf16")
    m: tuple[int, ...] = (8, 32, 128, 512)
    nk: tuple[int, ...] = (32, 128, 512)
    elements: tuple[int, ...] = tuple(1 << p for p in range(8, 21, 3))
    whole_groups: bool = False
    rounds: int = 21

    @property
    def transposed(self) -> tuple[int, ...]:
        """Sizes of transposes: between the smallest and the largest."""
        return self.elements[2:4]

    def groups(self, devices: int) -> list[int]:
        """Return the sizes of groups whose collectives are measured."""
        least = devices if self.whole_groups else 2
        return [n for n in range(least, devices + 1) if devices % n == 0]


USUAL = Grid()
