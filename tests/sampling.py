"""Chooses parameter sets for tests whose product of all values takes too long."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from allpairspy import AllPairs

from reference.operators import OperatorCase

Test = TypeVar("Test", bound=Callable[..., None])


def marked(mark: pytest.MarkDecorator, values: Iterable[Any]) -> list[Any]:
    """Returns values for parametrize that have this mark; a tuple is one set of several parameters."""
    return [pytest.param(*(each if type(each) is tuple else (each,)), marks=mark) for each in values]


def few(cases: Iterable[OperatorCase], chosen: Any = (), others: Any = ()) -> list[Any]:
    """Returns cases for parametrize. Chosen are those with a value that no smaller case of their operator has."""
    seen: set[Any] = set()
    sets = []
    for each in sorted(cases, key=lambda each: math.prod(each.case.shape)):
        case, (*rows, cols) = each.case, each.case.shape
        values = {**case._asdict(), **each.flags, **each.dtypes, "shape": (len(rows), cols.bit_length() // 3)}
        new = {(each.operator, *item) for item in values.items()} - seen
        seen |= new
        sets.append(pytest.param(each, marks=chosen if new else others))
    return sets


def _sets_of(axis: pytest.Mark) -> list[tuple[tuple[Any, ...], str]]:
    """Returns the values and the name of each set of a parametrize mark."""
    names, sets = axis.args
    ids = axis.kwargs.get("ids", lambda value: getattr(value, "__name__", str(value)))
    found = []
    for number, each in enumerate(sets):
        values = (each,) if isinstance(names, str) else tuple(each)
        found.append((values, "-".join(map(ids, values)) if callable(ids) else list(ids)[number]))
    return found


def pairwise(test: Test, others: Any = ()) -> Test:
    """Replaces the product of a test's parameters by sets that contain each pair of values of different parameters.

    Sets have the mark ``others``, except those with a value that no set before them has.
    """
    marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
    axes = [mark for mark in marks if mark.name == "parametrize"]
    names = ",".join(axis.args[0] if isinstance(axis.args[0], str) else ",".join(axis.args[0]) for axis in axes)
    sets_of_axes = [_sets_of(axis) for axis in axes]
    sets: list[Any] = []
    seen: set[tuple[int, int]] = set()
    for indices in AllPairs([range(len(each)) for each in sets_of_axes]):  # numbers: the result depends on hashes
        chosen = [each[index] for each, index in zip(sets_of_axes, indices, strict=True)]
        parts = [value for values, _ in chosen for value in values]
        new = {*enumerate(indices)} - seen
        seen |= new
        sets.append(pytest.param(*parts, id="-".join(name for _, name in chosen), marks=() if new else others))
    test.pytestmark = [mark for mark in marks if mark.name != "parametrize"]  # type: ignore[attr-defined]
    return pytest.mark.parametrize(names, sets)(test)


def each_value(test: Test) -> Test:
    """Replaces the product of a test's parameters by sets that contain each value; releases have each pair of them."""
    return pairwise(test, others=pytest.mark.release)
