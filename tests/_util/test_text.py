"""Tables keep numbers and source lines in one piece, however narrow they are."""

from __future__ import annotations

import pytest

from jaxoverlap._util.text import table

COLUMNS = ("matmuls", "source", "einsum", "runs", "bytes", "why")


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_source_line_and_numbers_are_not_broken(width):
    source = "models/llama.py:51 Llama.blocks.attention.query.kernel"
    why = "not ringed: " + "its hops take 486 µs, more than matmul and all_gather, " * 4
    rows = [("0, 1, 4, 5, 8, 9, ... (42)", source, "abcd,cde->abe", "1024", "117.4 MB", why)]
    text = table("", COLUMNS, rows, right=("runs", "bytes"), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for whole in ("models/llama.py:51", "1024", "117.4 MB"):
        assert any(whole in line for line in text.splitlines()), text


def test_a_table_without_rows_has_its_columns():
    assert all(column in table("", COLUMNS, []) for column in COLUMNS)
