"""rms_norm in two steps, around the sum of squares: rms_norm_stats, rms_norm_from_stats and their backwards."""

import math
from typing import Any

import pytest
import torch
from assertions import assert_same_bits

import normops
from normops import sharding
from reference import cases
from reference.cases import CASES, Case
from reference.operators import ROUNDINGS

ops = torch.ops.normops

SOME = [case for case in CASES[::5] if math.prod(case.shape)] + [
    Case((3, 5000), torch.bfloat16, weight_dtype=torch.float32),
    Case((2, 40000), torch.float32, weight_dtype=torch.float32),
    Case((6, 4, 100), torch.float16, weight_dtype=torch.float16, group_dims=1),
]


def of_norm(case: Case, **flags: object) -> dict[str, Any]:
    return {
        "normalized_shape": case.normalized_shape,
        "weight": case.weight(),
        "eps": case.eps,
        "weight_offset": case.weight_offset,
        **flags,
    }


@pytest.mark.parametrize("flags", ROUNDINGS, ids=lambda flags: flags["rounding"])
@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.triton_release
def test_two_steps_have_the_bits_of_rms_norm(
    case: Case, flags: dict[str, str], device: str, runs_cpu_kernels: bool
) -> None:
    x, dy = case.input().to(device), case.grad_output().to(device)
    norm = of_norm(case, **flags)
    norm["weight"] = None if norm["weight"] is None else norm["weight"].to(device)
    square_sum = ops.rms_norm_stats(x, case.normalized_shape)
    assert ops.rms_norm_stats(x.to("meta"), case.normalized_shape).dtype == square_sum.dtype
    row_size = math.prod(case.normalized_shape)
    assert_same_bits([ops.rms_norm_from_stats(x, square_sum, **norm, row_size=row_size)], [ops.rms_norm(x, **norm)])
    sums = ops.rms_norm_backward_stats(dy, x, **norm)
    if runs_cpu_kernels:
        assert_same_bits([sums[0]], [square_sum])
    else:  # a backward that does not keep whole rows, as the norm does, sums in another order
        torch.testing.assert_close(sums[0], square_sum)
    expected = ops.rms_norm_backward(dy, x, **norm)[:2]
    for mask in ((True, True), (True, False), (False, True)):
        gradients = ops.rms_norm_backward_from_stats(dy, x, *sums, **norm, output_mask=mask, row_size=row_size)
        for gradient, theirs, wanted in zip(gradients, expected, mask, strict=True):
            assert_same_bits([gradient], [theirs if wanted else gradient.new_empty(0)])
    residual = torch.randn_like(x)
    assert_same_bits(
        ops.rms_norm_backward_from_stats(dy, x, *sums, **norm, grad_residual=residual, row_size=row_size)[:1],
        ops.rms_norm_backward(dy, x, **norm, grad_residual=residual)[:1],
    )


@pytest.mark.triton
def test_parts_of_rows(device: str) -> None:
    """Imitates two ranks in one process: outputs and gradients equal those of the norm."""
    x, w, dy = (cases.values(shape, torch.float64, i).to(device) for i, shape in enumerate(((6, 40), (40,), (6, 40))))
    x, w = x.requires_grad_(), w.requires_grad_()
    parts = list(zip(x.tensor_split(2, -1), w.tensor_split(2), strict=True))
    square_sum = torch.stack([sharding.rms_norm_stats(part, 20) for part, _ in parts]).sum(0)
    y = torch.cat([sharding.rms_norm_from_stats(part, square_sum, 20, v, row_size=40) for part, v in parts], -1)
    torch.testing.assert_close(y, normops.rms_norm(x, 40, w))
    gradients = torch.autograd.grad(y, (x, w), dy)
    torch.testing.assert_close(gradients, torch.autograd.grad(normops.rms_norm(x, 40, w), (x, w), dy))
