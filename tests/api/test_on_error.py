"""Our own faults, the user's mistakes and the step's own errors are each told as what they are."""

from __future__ import annotations

import importlib
import warnings

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import RewriteError, overlap
from jaxoverlap.passes.rewriting import rewrite
from jaxoverlap.step import context

pytestmark = pytest.mark.anew  # XLA is made to refuse what it compiles

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS = (NamedSharding(MESH, P(*spec)) for spec in (("model",), (None, "model")))
X = jax.device_put(np.ones((16, 32), np.float32), ROWS)
W = jax.device_put(np.ones((32, 64), np.float32), COLUMNS)


def product(x, w):
    return lax.with_sharding_constraint(x @ w, COLUMNS)


# -- faults of our own ----------------------------------------------------------------------------

STAGES = (
    *("step.context.flatten", "step.context.made_for", "search.found.options_for"),
    *("search.found.search", "search.evaluate.apply"),
    *("passes.rewriting.propose.bodies", "passes.rewriting.propose.decide"),
    *("passes.rewriting.rewrite.rewrite", "passes.planning.decide.share"),
)


@pytest.fixture(params=STAGES)
def fault(request, monkeypatch) -> None:
    """Make one stage of the pipeline fail as nobody foresaw."""

    def fail(*_, **__):
        raise KeyError("Var(id=1)")

    context._known.cache_clear()  # what was found out about the step before
    monkeypatch.setattr(f"jaxoverlap.{request.param}", fail)


WHERE = r"KeyError: 'Var\(id=1\)' \(\w+/\w+\.py:\d+, in \w+\)"


@pytest.mark.usefixtures("fault")
def test_plain_warns_of_a_fault_of_ours_once_and_runs_the_step_as_it_is():
    step = overlap(jax.jit(product), on_error="plain")
    said = rf"(?s)product runs without overlap: could not rewrite product, .*{WHERE}$"
    with pytest.warns(UserWarning, match=said) as caught:
        got = step(X, W)
    assert len(caught) == 1 and caught[0].filename == __file__
    np.testing.assert_array_equal(got, product(X, W))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X, W)
        assert step.lower(X, W).compile().plan is None


@pytest.mark.usefixtures("fault")
def test_a_fault_of_ours_is_a_rewrite_error_with_its_cause():
    for on_error, entry in (("raise", "__call__"), ("raise", "lower"), ("plain", "explain")):
        step = overlap(product, on_error=on_error)
        with warnings.catch_warnings(), pytest.raises(RewriteError, match=f"(?s){WHERE}") as error:
            warnings.simplefilter("ignore")
            getattr(step, entry)(X, W)
        assert "pass on_error='plain' to overlap()" in str(error.value)
        assert isinstance(error.value.__cause__, KeyError)


def test_plain_is_not_advised_to_those_who_have_it(monkeypatch):
    monkeypatch.setattr(rewrite, "ringed", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="without overlap: could not rewrite matmul 0") as caught:
        overlap(product, on_error="plain")(X, W)
    (warning,) = caught
    assert "plain" not in str(warning.message)
    assert "To leave it alone, pass skip=('api/test_on_error.py:" in str(warning.message)


def test_another_fault_in_another_signature_is_told_too(monkeypatch):
    step, wide = overlap(product, on_error="plain"), jax.device_put(np.ones((32, 32)), ROWS)
    for fault, args in (("first", (X, W)), ("second", (wide, W))):

        def fail(*_, fault=fault, **__):
            raise KeyError(fault)

        monkeypatch.setattr("jaxoverlap.passes.rewriting.propose.decide", fail)
        with pytest.warns(UserWarning, match=f"KeyError: '{fault}'"):
            step(*args)


def test_a_warning_of_ours_that_filters_raise_is_no_fault():
    whole = jax.device_put(X, NamedSharding(MESH, P()))
    step = overlap(lambda x: x @ x.T, on_error="plain")
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="rewrites nothing"):
        warnings.simplefilter("error")
        step(whole)


# -- mistakes of the user's -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "mistake",
    [
        {"skip": ["gpt.py:88"]},
        {"granularity": {"gpt.py:88": "two_way"}},
        {"cluster": "h100-sxm:8x8"},
    ],
    ids=str,
)
def test_mistakes_in_what_overlap_was_given_are_raised(mistake):
    with pytest.raises(ValueError, match=r"gpt.py:88|has 64"):
        overlap(product, on_error="plain", **mistake)(X, W)


# -- errors of the step's own ---------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "plain"])
@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, RuntimeError])
def test_what_the_step_raises_while_it_is_traced_stays_as_it_is(on_error: str, kind):
    mine, traces = kind("the user's own"), []

    def step(x, w):
        traces.append(x.shape)
        raise mine

    for entry in ("__call__", "lower", "explain"):
        traces.clear()
        with warnings.catch_warnings(), pytest.raises(kind) as error:
            warnings.simplefilter("error")
            getattr(overlap(step, on_error=on_error), entry)(X, W)
        assert error.value is mine and error.value.__cause__ is None
        assert traces == [X.shape], "once"


@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_what_the_step_raises_when_it_is_lowered_is_its_own_too(on_error: str):
    unlowered = jax.extend.core.Primitive("unlowered")
    unlowered.def_abstract_eval(lambda x: x)

    def step(x, w):
        return product(unlowered.bind(x), w)

    with pytest.raises(NotImplementedError, match="unlowered"):
        jax.jit(step)(X, W)
    for entry in ("__call__", "lower"):
        with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="unlowered"):
            warnings.simplefilter("error")
            getattr(overlap(step, on_error=on_error), entry)(X, W)


# -- what XLA refuses -----------------------------------------------------------------------------

REFUSED = "INTERNAL: no layout for the rewritten program"


@pytest.fixture
def refuses(monkeypatch) -> list[str]:
    """Let XLA compile no step that has a permute in it, but partition it; return refused names."""
    compiler, refused = importlib.import_module("jax._src.compiler"), []
    original = compiler.backend_compile_and_load

    def compiled(backend, module, *args, **kwargs):
        name = module.operation.attributes["sym_name"].value
        if "collective_permute" in str(module) and "asks" not in name:
            refused.append(name)
            raise jax.errors.JaxRuntimeError(f"{REFUSED}\nand a second line")
        return original(backend, module, *args, **kwargs)

    monkeypatch.setattr(compiler, "backend_compile_and_load", compiled)
    return refused


@pytest.mark.parametrize("options", [{}, {"on_error": "plain"}], ids=str)
def test_a_step_whose_overlapped_program_xla_refuses_runs_as_it_is(refuses, options):
    step = overlap(jax.jit(product), **options)
    said = rf"product runs as it is: XLA does not compile the overlapped program \({REFUSED}\)"
    with pytest.warns(UserWarning, match=said) as caught:
        np.testing.assert_array_equal(step(X, W), product(X, W))
    assert [w.filename for w in caught] == [__file__] and refuses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(step(X, W), product(X, W))
    lowered = overlap(jax.jit(product), **options).lower(X, W)
    with pytest.warns(UserWarning, match=said):
        compiled = lowered.compile()
    assert compiled.plan is None
    np.testing.assert_array_equal(compiled(X, W), product(X, W))


def test_who_asks_for_the_overlapped_program_gets_xlas_error(refuses):
    plan = overlap(jax.jit(product)).explain(X, W)
    for options in ({"never_slower": False}, {"plan": plan}):
        step = overlap(jax.jit(product), **options)
        for run in (step, lambda *args, step=step: step.lower(*args).compile()):
            with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
                run(X, W)


def test_an_error_of_a_run_is_no_refusal_of_xlas(monkeypatch):
    """The program compiles, so what fails is the run; it is not run again as it is."""
    ran = []

    def fails(*_):
        ran.append(1)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("jaxoverlap.api.overlapped._bound", fails)
    step = overlap(jax.jit(product))
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        step(X, W)
    assert len(ran) == 1


def test_the_environment_can_turn_it_off(monkeypatch):
    monkeypatch.setenv("JAXOVERLAP", "off")
    step = overlap(product)
    with pytest.warns(UserWarning, match="product runs as it is: JAXOVERLAP=off asks") as caught:
        np.testing.assert_array_equal(step(X, W), jax.jit(product)(X, W))
    assert len(caught) == 1
    lowered = step.lower(X, W)
    assert lowered.plan is None and "ppermute" not in str(step.trace(X, W).jaxpr)
    with pytest.raises(ValueError, match="JAXOVERLAP=off asks for it"):
        step.explain(X, W)
    monkeypatch.setenv("JAXOVERLAP", "0")
    with pytest.raises(ValueError, match="JAXOVERLAP=0: expected 'on' or 'off'"):
        overlap(product)(X, W)
