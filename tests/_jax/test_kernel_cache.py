"""Children hand on kernels by files; no compiler runs here."""

from __future__ import annotations

from jaxoverlap._jax.kernel_cache import KnownKernels


def child(kernels: KnownKernels, adds: str, *, beside: str = "", ended_well: bool = True) -> str:
    """Return what a child finds before it writes what it adds; another runs beside it, if any."""
    with kernels.lent() as loan:
        content = loan.file.read_text() if loan.file.exists() else ""
        if beside:
            child(kernels, beside)
        if adds:
            loan.file.write_text(content + adds)
        loan.ended_well = ended_well
    assert not loan.file.exists()
    return content


def test_each_child_has_the_kernels_of_those_before_it():
    kernels = KnownKernels()
    assert [child(kernels, adds) for adds in ("a", "b", "")] == ["", "a", "ab"]
    assert child(kernels, "") == "ab", "a child that makes none takes none away"


def test_of_children_side_by_side_the_one_that_wrote_more_counts():
    kernels = KnownKernels()
    assert child(kernels, "a", beside="long") == ""
    assert child(kernels, "") == "long"


def test_what_a_child_wrote_that_did_not_end_well_is_not_read_again():
    kernels = KnownKernels()
    child(kernels, "a")
    assert child(kernels, "b", ended_well=False) == "a"
    assert child(kernels, "") == "a"
