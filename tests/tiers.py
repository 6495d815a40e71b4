"""Assigns each test to one tier: core is ``make test``, CI also runs full, only a release runs release.

A test without a mark is core. The last tier among the marks of a test and its parameters counts. ``covering(core=2)``
divides a test's parameter sets: sets that cover all pairs of values of different axes are core, the others full.
``covering(core=1, full=2)`` gives both numbers, and the other sets are release; 0 selects none. Tests marked ``triton``
also run on Triton's kernels, as compiled for GPUs, with numbers of the same meaning.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from reference.operators import Operator

TIERS = ("core", "full", "release")


def divided(values: Iterable[Any], core: Collection[Any], full: Collection[Any] | None = None) -> list[Any]:
    """Returns values for parametrize; the others are release, or full if ``full`` is not given."""
    others = pytest.mark.full if full is None else pytest.mark.release
    marks = dict.fromkeys(full or (), pytest.mark.full) | dict.fromkeys(core, pytest.mark.core)
    return [pytest.param(value, marks=marks.get(value, others)) for value in values]


class ParameterSet(NamedTuple):
    item: pytest.Item
    axes: Mapping[str, Hashable]
    size: int
    """The size of the computation."""


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(number, int) for number in value)


def _axes(name: str, value: Any) -> Iterator[tuple[str, Hashable]]:
    """Yields the named axes in which parameter sets differ; a shape has two, width and length."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _axes(f"{name} {key}", part)
    elif _is_shape(value):
        *rows, cols = value
        yield f"{name} width", (cols.bit_length() // 3, cols % 8 == 0)
        yield f"{name} length", (len(value), math.prod(rows).bit_length() // 3)
    else:
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        yield name, value


def _size(value: Any) -> int:
    if _is_shape(value):
        return math.prod(value)
    if isinstance(value, tuple):
        return sum(map(_size, value))
    return value if isinstance(value, int) else 0


def cover(sets: Sequence[ParameterSet], strength: int) -> set[pytest.Item]:
    """Returns tests, preferably small, that contain every combination of ``strength`` values of different axes."""

    def together(axes: Mapping[str, Hashable]) -> Iterator[tuple[Any, ...]]:
        return combinations(axes.items(), min(strength, len(axes)))

    if strength == 0:
        return set()
    shuffled = random.Random(0).sample(sets, len(sets))
    covered: Counter[tuple[Any, ...]] = Counter()
    chosen = []
    for parameters in sorted(shuffled, key=lambda parameters: parameters.size.bit_length()):
        if any(values not in covered for values in together(parameters.axes)):
            covered.update(together(parameters.axes))
            chosen.append(parameters)
    result = set()
    for parameters in chosen[::-1]:
        if all(covered[values] > 1 for values in together(parameters.axes)):  # other tests cover its combinations
            covered.subtract(together(parameters.axes))
        else:
            result.add(parameters.item)
    return result


def _divide(items: Sequence[pytest.Item], core: int = 0, full: int | None = None) -> Iterator[tuple[pytest.Item, str]]:
    """Divides a test's parameter sets into tiers, separately for each operator."""
    of_operators = defaultdict(list)
    for item in items:
        parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
        axes = dict(_axes("", parameters))
        operator = next((value for value in axes.values() if isinstance(value, Operator)), None)
        of_operators[operator].append(ParameterSet(item, axes, sum(map(_size, parameters.values()))))
    for sets in of_operators.values():
        in_core = cover(sets, core)
        in_full = {item for item, _, _ in sets} if full is None else cover(sets, full)
        for item, _, _ in sets:
            yield item, "core" if item in in_core else "full" if item in in_full else "release"


def assign(items: Sequence[pytest.Item], covering: str) -> None:
    """Marks each test with its tier only; ``covering`` names the mark whose numbers divide a test's parameters."""
    tiers = dict.fromkeys(items, TIERS[0])
    of_tests = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker(covering)) is not None and mark.kwargs:
            of_tests[tuple(mark.kwargs.items()), item.path, item.originalname].append(item)  # type: ignore[attr-defined]
    for (strengths, _, _), parametrized in of_tests.items():
        tiers.update(_divide(parametrized, **dict(strengths)))
    for item, tier in tiers.items():
        marked = (mark.name for mark in item.iter_markers() if mark.name in TIERS)
        tiers[item] = max((tier, *marked), key=TIERS.index)
    for item, tier in tiers.items():
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
        item.add_marker(tier)
