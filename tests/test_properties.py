"""hypothesis draws shapes, strides, dtypes and flags for the same oracle."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import cases, oracle
from reference.cases import Case, on

ops = torch.ops.normops

dtypes = st.sampled_from(cases.DTYPES)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any view whose elements do not overlap, save along dimensions of stride 0: NaN lies in between."""
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
def problems(draw: st.DrawFn) -> tuple[Case, Tensor, Tensor, Tensor | None]:
    leading = draw(st.lists(st.integers(0, 6), max_size=3))
    normalized = draw(st.lists(st.integers(0, 12), min_size=1, max_size=2))
    if draw(st.booleans()):
        normalized[-1] = draw(st.integers(0, 300))
    shape = (*leading, *normalized)
    dtype = draw(dtypes)
    case = Case(
        shape,
        dtype,
        len(normalized),
        draw(st.none() | dtypes),
        draw(st.sampled_from([cases.EPS, None, 1e-6, 1.0])),
        draw(st.sampled_from([0.0, 1.0, -0.5])),
        group_dims=draw(st.integers(0, len(leading))),
    )
    dy, x = draw(strided(shape, dtype, 1)), draw(strided(shape, dtype, 2))
    residual = draw(strided(shape, dtype, 3)) if draw(st.booleans()) else None
    return case, dy, x, residual


@pytest.mark.usefixtures("poisoned_memory")
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems(), threads=st.sampled_from([1, 2]))
def test_within_the_oracle(problem: tuple[Case, Tensor, Tensor, Tensor | None], threads: int, device: str) -> None:
    case, dy, x, residual = problem
    weight, shape = case.weight(), case.normalized_shape
    keywords = {"weight_offset": case.weight_offset}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = ops.rms_norm(on(device, x), shape, on(device, weight), case.eps, **keywords)
        grad_input, grad_weight = ops.rms_norm_backward(
            on(device, dy),
            on(device, x),
            shape,
            on(device, weight),
            case.eps,
            **keywords,
            grad_residual=on(device, residual),
        )
    finally:
        torch.set_num_threads(before)
    oracle.assert_within(output, oracle.rms_norm(x, shape, weight, case.eps, case.weight_offset), "output")
    expected = oracle.rms_norm_backward(dy, x, shape, weight, case.eps, case.weight_offset, residual)
    oracle.assert_within(grad_input, expected.grad_input, "grad_input")
    if expected.grad_weight is not None:
        oracle.assert_within(grad_weight, expected.grad_weight, "grad_weight")


@pytest.mark.usefixtures("poisoned_memory")
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems(), residual_is_wide=st.booleans(), data=st.data())
def test_add_within_the_oracle(
    problem: tuple[Case, Tensor, Tensor, Tensor | None], residual_is_wide: bool, data: st.DataObject, device: str
) -> None:
    case, dy, x, _ = problem
    wide = residual_is_wide and case.dtype in (torch.float16, torch.bfloat16)
    residual = data.draw(strided(case.shape, torch.float32 if wide else case.dtype, 4))
    weight, shape = case.weight(), case.normalized_shape
    keywords = {"weight_offset": case.weight_offset}
    output, residual_out = ops.add_rms_norm(
        on(device, x), on(device, residual), shape, on(device, weight), case.eps, **keywords
    )
    assert torch.equal(residual_out.cpu(), (x + residual).to(residual.dtype))
    h = residual_out.cpu()
    expected = oracle.rms_norm(h, shape, weight, case.eps, case.weight_offset, case.dtype)
    oracle.assert_within(output, expected, "output")
    grad_input, _ = ops.rms_norm_backward(
        on(device, dy), residual_out, shape, on(device, weight), case.eps, **keywords, grad_residual=residual_out
    )
    gradients = oracle.rms_norm_backward(dy, h, shape, weight, case.eps, case.weight_offset, h)
    oracle.assert_within(grad_input, gradients.grad_input, "grad_input")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 200),
    dtype=dtypes,
    exponent=st.integers(-60, 40),
    seed=st.integers(0, 1000),
)
def test_any_magnitude_that_float32_holds_the_squares_of(
    rows: int, cols: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """Large and small rows alike, with eps too small to matter for most and decisive for some."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.tiny) / 2 + 8, math.log2(info.max) / 2 - 8
    x = cases.values((rows, cols), torch.float64, seed) * 2.0 ** min(max(exponent, low), high)
    x = x.to(dtype)
    output = ops.rms_norm(x, [cols], None, 1e-20)
    oracle.assert_within(output, oracle.rms_norm(x, (cols,), None, 1e-20))
