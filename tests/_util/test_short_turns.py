"""Threads have short turns while one computes, and Python's own afterwards."""

from __future__ import annotations

import sys
import time

import pytest

from jaxoverlap._util import short_turns as module
from jaxoverlap._util.short_turns import short_turns


@pytest.fixture(autouse=True)
def alone():
    """Wait for threads of earlier tests that compute, whose turns are short too."""
    until = time.monotonic() + 120
    while module._before and time.monotonic() < until:
        time.sleep(0.1)
    assert not module._before


def test_turns_are_short_until_the_last_thread_is_done():
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(5e-4, abs=5e-6)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(5e-4, abs=5e-6)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_users_shorter_turns_stay_and_an_error_restores():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with pytest.raises(ZeroDivisionError), short_turns():
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=5e-6)
            _ = 1 / 0
        assert sys.getswitchinterval() == pytest.approx(1e-4, abs=5e-6)
    finally:
        sys.setswitchinterval(before)
