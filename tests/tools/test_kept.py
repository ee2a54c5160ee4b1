"""Programs that tests compile are kept for the next run, and compiled anew where they differ."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler  # noqa: TID251 # the entry point that is replaced
from jax._src.lib import xla_client  # noqa: TID251

from jaxoverlap.passes.scheduling import scheduler
from tests.passes.scheduling.test_scheduler import ONE_AT_A_TIME, overlapped
from tests.support import kept
from tests.support.kept import Files, keeping, prune
from tests.support.pods import needs_plugin


def test_a_value_is_read_by_its_key(tmp_path: Path):
    files = Files(tmp_path)
    long = "x" * 400  # no file has such a name
    for key in ("a", long):
        assert files.get(key) is None
        files.put(key, key.encode())
        assert files.get(key) == key.encode()
    assert len([*tmp_path.iterdir()]) == 2


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path):
    files = Files(tmp_path)
    for age, key in enumerate("abcd"):
        files.put(key, b"123")
        os.utime(tmp_path / key, ns=(0, 10**9 * (10 - age)))  # d is the oldest
    files.get("c")
    prune(tmp_path, 12)
    assert len([*tmp_path.iterdir()]) == 4
    prune(tmp_path, 7)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c"}


def test_another_hash_of_the_source_renames_a_program():
    asked = kept.Asked("step_0a", {"main_0a": ["dot_0a"]})
    program = kept.KeptExecutable(["HloModule step_0a"], {}, [asked])
    renamed = kept.KeptExecutable.from_bytes(program.to_bytes()).renamed("0a", "1b")
    assert renamed.texts == ["HloModule step_1b"]
    assert renamed.asked == [kept.Asked("step_1b", {"main_1b": ["dot_1b"]})]
    assert program.renamed("", "1b") is program
    with pytest.raises(AttributeError):
        _ = program.serialize


def test_only_lines_of_the_user_count():
    """Operation a was made at line 40 of a test, called by the package; b is the package's own."""
    ours, theirs = f"{kept.ROOT}/jaxoverlap/step/program.py", f"{kept.ROOT}/tests/test_x.py"
    text = f"""\
%0 = a loc(#loc7)
%1 = b loc(#loc8)
#loc1 = loc("{theirs}":40:2 to :9)
#loc2 = loc("{ours}":293:11 to :68)
#loc3 = loc("step"(#loc1))
#loc4 = loc("lowered_as"(#loc2))
#loc5 = loc(callsite(#loc3 at #loc4))
#loc6 = loc(callsite(#loc4 at #loc4))
#loc7 = loc("ring.0/dot"(#loc5))
#loc8 = loc("mul"(#loc6))
"""
    wanted = f'%0 = a loc("ring.0/dot" "step" "{theirs}":40:2 to :9)\n%1 = b loc("mul" )\n'
    assert kept.with_users_lines(text) == wanted
    assert kept.with_users_lines(text.replace(":293:", ":294:")) == wanted
    assert kept.with_users_lines(text.replace(":40:", ":41:")) != wanted


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the names of the steps that XLA compiles; none is kept yet."""
    found, original = list[str](), compiler.backend_compile_and_load
    while hasattr(original, "__wrapped__"):  # the tests' own
        original = original.__wrapped__

    def compiled(backend: Any, module: Any, *others: Any) -> Any:
        name = module.operation.attributes["sym_name"].value
        if name.startswith("jit_step"):
            found.append(name)
        return original(backend, module, *others)

    monkeypatch.setattr(compiler, "backend_compile_and_load", keeping(compiled, Files(tmp_path)))
    return found


def facts(compiled: Any) -> tuple[Any, ...]:
    memory = compiled.memory_analysis()
    sizes = {n: getattr(memory, n) for n in dir(memory) if n.endswith("_in_bytes")}
    schedule = compiled.schedule and (compiled.schedule.orders, compiled.schedule.step)
    shardings = compiled.input_shardings, compiled.output_shardings
    return compiled.as_text(), sizes, shardings, str(compiled.simulate()), schedule


@needs_plugin
@pytest.mark.pods
def test_a_kept_program_is_the_compiled_one(compiles: list[str], tmp_path: Path):
    first = facts(overlapped().compile(ONE_AT_A_TIME))
    assert len(compiles) == 1
    jax.clear_caches()
    assert facts(overlapped().compile(ONE_AT_A_TIME)) == first
    assert len(compiles) == 1
    jax.clear_caches()
    assert facts(overlapped().compile()) != first
    assert len(compiles) == 2
    jax.clear_caches()
    overlapped(None).compile(ONE_AT_A_TIME)
    assert len(compiles) == 3
    for _ in range(2):
        jax.clear_caches()
        overlapped(None).compile({**ONE_AT_A_TIME, "xla_dump_to": str(tmp_path / "dumped")})
    assert len(compiles) == 5


@needs_plugin
@pytest.mark.pods
def test_a_scheduler_that_orders_otherwise_compiles_anew(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch
):
    first = overlapped().compile(ONE_AT_A_TIME)
    assert first.schedule and first.schedule.orders
    jax.clear_caches()
    monkeypatch.setattr(scheduler, "schedule", lambda *_, **__: {})
    second = overlapped().compile(ONE_AT_A_TIME)
    assert len(compiles) == 2
    assert second.schedule and not second.schedule.orders
    assert second.as_text() != first.as_text()


def test_steps_for_cpus_and_questions_are_not_kept_here(tmp_path: Path):
    """JAX keeps the former, and XLA does not finish the latter."""
    attributes = {"sym_name": types.SimpleNamespace(value="jit_step")}
    module = types.SimpleNamespace(operation=types.SimpleNamespace(attributes=attributes))
    options = xla_client.CompileOptions()
    compile = keeping(lambda *given: given[1], Files(tmp_path))
    assert compile(jax.devices()[0].client, module, [], options, []) is module
    assert not [*tmp_path.iterdir()]
