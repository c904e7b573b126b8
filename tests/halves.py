"""The quick half of the tests, which every change needs, and the slow half behind `make test-all`."""

import re
from collections.abc import Iterable

import pytest


def slow_where(names: Iterable[str], pattern: str) -> list[object]:
    """Cases by name; those in which the pattern is found are slow."""
    cases = [pytest.param(name, marks=pytest.mark.slow) if re.search(pattern, name) else name for name in names]
    assert 0 < sum(isinstance(case, str) for case in cases) < len(cases), f"{pattern} parts nothing"
    return cases


def slow(*values: object) -> object:
    """A case that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
