"""Share the files of tests out between shards that take equally long.

`tests/seconds.json` has the seconds of each file that takes long, as one run measured them;
`pytest --record-seconds` writes it anew. A wrong number costs balance, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

TABLE = Path(__file__).parents[1] / "seconds.json"
LEAST_S = 2.0  # what takes less is not in the table


def known_seconds() -> dict[str, float]:
    return json.loads(TABLE.read_text())


def record_seconds(seconds: Mapping[str, float]) -> None:
    """Write the table, of the files that took long."""
    rows = {file: round(s, 1) for file, s in sorted(seconds.items()) if s >= LEAST_S}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


def parsed(shard: str) -> tuple[int, int]:
    """Parse "1/2".

    Raises:
        ValueError: if it is not the number of a shard and how many there are.
    """
    number, _, count = shard.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--shard {shard}: expected NUMBER/COUNT, as in 1/2")
    return int(number), int(count)


def shares(files: Collection[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Share files out: each, the longest first, to the shard that has the fewest seconds."""
    shares, sums = [list[str]() for _ in range(count)], [0.0] * count
    for file in sorted(files, key=lambda file: (-seconds.get(file, LEAST_S / 2), file)):
        least = sums.index(min(sums))
        shares[least].append(file)
        sums[least] += seconds.get(file, LEAST_S / 2)
    return shares
