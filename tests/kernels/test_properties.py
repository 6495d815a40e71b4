"""The oracle checks problems whose shapes, strides, dtypes and flags hypothesis draws."""

import math
from typing import Any

import pytest
import torch
from assertions import assert_within
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import cases, oracle
from reference.cases import Case, on
from reference.operators import OPERATORS, Operator, OperatorCase, other_dtypes

ops = torch.ops.normops

dtypes = st.sampled_from(cases.DTYPES)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draws a view whose elements overlap only along dimensions of stride 0; its gaps hold NaN."""
    strides = [0] * len(shape)
    reach = 1
    for d in draw(st.permutations(range(len(shape)))):
        if draw(st.integers(0, 9)) == 0:
            continue  # stride 0
        strides[d] = reach + draw(st.sampled_from([0, 0, 0, 1, 2, 7]))
        reach = strides[d] * max(shape[d], 1)
    if draw(st.booleans()):  # rows that are read in place are the common case
        strides = cases._contiguous_strides(shape)
    return cases._strided(shape, tuple(strides), draw(st.integers(0, 3)), dtype, seed)


@st.composite
def problems(draw: st.DrawFn, operator: Operator) -> tuple[OperatorCase, dict[str, Any]]:
    """Draws a case, and its arguments in any layout."""
    leading = draw(st.lists(st.integers(0, 6), max_size=3))
    normalized = draw(st.lists(st.integers(0, 12), min_size=1, max_size=1 if operator.tables else 2))
    if draw(st.booleans()):
        normalized[-1] = draw(st.integers(0, 300))
    shape = (*leading, *normalized)
    dtype = draw(dtypes)
    group_dims = draw(st.integers(0, len(leading)))
    of_rows = Case(
        shape,
        dtype,
        len(normalized),
        draw(st.none() | dtypes),
        draw(st.sampled_from([cases.EPS, None, 1e-6, 1.0])),
        draw(st.sampled_from([0.0, 1.0, -0.5])),
        has_residual=draw(st.booleans()),
        group_dims=group_dims,
        ones=tuple(draw(st.sets(st.integers(0, group_dims - 1)))) if group_dims else (),
    )
    assume(operator.takes(of_rows))
    flags = draw(st.sampled_from(operator.flags))
    case = OperatorCase(operator, of_rows, flags, draw(st.sampled_from([{}, *other_dtypes(operator, dtype)])))
    arguments = case.arguments()
    for seed, name in enumerate(("input", *operator.tensors)):
        if arguments[name] is not None and name not in operator.sums:
            arguments[name] = draw(strided(tuple(arguments[name].shape), arguments[name].dtype, seed))
    return case, arguments


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), threads=st.sampled_from([1, 2]))
@pytest.mark.full
def test_random_cases_are_within_bounds(operator: Operator, data: st.DataObject, threads: int, device: str) -> None:
    case, arguments = data.draw(problems(operator))
    moved = {name: on(device, value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = operator.call(**moved)
    finally:
        torch.set_num_threads(before)
    assert_within(results, case.expected(arguments))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 200),
    dtype=dtypes,
    exponent=st.integers(-60, 40),
    seed=st.integers(0, 1000),
)
def test_any_magnitude_whose_squares_are_finite(
    rows: int, cols: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """Draws large and small rows; eps is negligible for most and decisive for some."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.tiny) / 2 + 8, math.log2(info.max) / 2 - 8
    x = cases.values((rows, cols), torch.float64, seed) * 2.0 ** min(max(exponent, low), high)
    x = x.to(dtype)
    output = ops.rms_norm(x, [cols], None, 1e-20)
    oracle.assert_within(output, oracle.rms_norm(x, (cols,), None, 1e-20))
