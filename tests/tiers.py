"""Parameters of tests of which most are for a release alone: make test leaves those out, make test-all does not."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_for_release(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """The values, those that are not usual marked as a release's."""
    return [value if value in usual else pytest.param(value, marks=pytest.mark.release) for value in values]
