"""The names of the rows that a step of the suite has."""

from jaxoverlap.flags.published import PUBLISHED

PLAIN, HAND, IN_SHARDINGS = "plain", "hand ring", "in_shardings only"
RULES = "by rules"  # matmuls partition themselves, and there is no overlap()
OVERLAPPED, SCHEDULED = "overlapped", "overlapped + pass"
PRESET_ROWS = tuple(f"plain, {name}" for name in PUBLISHED)
HALVES, HALVES_RINGS = "halves", "halves + rings"  # whether or not that is estimated to be faster
ROWS = (PLAIN, *PRESET_ROWS, RULES, OVERLAPPED, SCHEDULED, HALVES, HALVES_RINGS)  # of every step
