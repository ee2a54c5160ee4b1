"""Pages hold the tables that the rows give."""

from __future__ import annotations

import pytest

from benchmarks import report


def test_every_page_has_the_tables_of_its_rows():
    """`python -m benchmarks.report` writes them."""
    assert [page.name for page, _ in report.pages_that_differ()] == []


def test_a_table_is_put_between_its_marks():
    text = "before\n<!-- table: a b -->\nold\n<!-- end table -->\nafter\n"
    new = report.filled(text, {"a b": lambda: "| new |"})
    assert new == "before\n<!-- table: a b -->\n\n| new |\n\n<!-- end table -->\nafter\n"
    assert report.filled(new, {"a b": lambda: "| new |"}) == new
    with pytest.raises(ValueError, match="table a b: expected one of c"):
        report.filled(text, {"c": str})
