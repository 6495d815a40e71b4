"""Tests that norms ignore autocast: inputs keep their dtypes and bits, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import same_bits
from graphs import computed
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from traced_graphs import trace

import normops
from reference import cases
from reference.cases import HALVES, MIXED_DTYPES
from reference.operators import DIFFERENTIABLE, Operator, of_rows

Call = Callable[[Tensor, Tensor, Tensor], Any]


NORMS = [of_rows(operator, 8) for operator in DIFFERENTIABLE]


def module(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return torch.func.functional_call(normops.RMSNorm(8, cases.EPS), {"weight": weight}, (x, residual))


def in_function(call: Call, device: str, dtype: torch.dtype) -> Call:
    def function(*tensors: Tensor) -> Any:
        with torch.autocast(device, dtype):
            return call(*tensors)

    return function


def forward_and_backward(call: Call, dtypes: tuple[torch.dtype, ...], device: str) -> list[Tensor]:
    """Returns the outputs and the existing gradients of input, residual and weight."""
    shapes = (3, 8), (3, 8), (8,)
    leaves = [
        cases.values(shape, dtype, seed).to(device).requires_grad_()
        for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    result = call(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    torch.autograd.backward(outputs, [y.detach().sin() for y in outputs])
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert all(map(same_bits, actual, expected))


@pytest.mark.parametrize("dtypes", MIXED_DTYPES, ids=str)
@pytest.mark.parametrize("autocast_dtype", HALVES, ids=str)
@pytest.mark.parametrize("call", [*NORMS, module])
def test_eager(call: Call, autocast_dtype: torch.dtype, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    expected = forward_and_backward(call, dtypes, device)
    assert expected[0].dtype == dtypes[0]
    assert expected[-1].dtype == dtypes[-1]
    assert_same(forward_and_backward(in_function(call, device, autocast_dtype), dtypes, device), expected)
    with torch.autocast(device, autocast_dtype):  # also around the backward
        assert_same(forward_and_backward(call, dtypes, device), expected)
        with torch.autocast(device, enabled=False):
            assert_same(forward_and_backward(call, dtypes, device), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_compiled_graphs_contain_no_conversion(operator: Operator, dtype: torch.dtype, device: str) -> None:
    tensors = (cases.values(shape, dtype).to(device).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    forward, backward = trace(in_function(of_rows(operator, 8), device, torch.bfloat16), *tensors)
    assert backward is not None
    assert computed(forward) == [f"normops.{operator}.default"]
    assert computed(backward) == [f"normops.{operator.gradient}.default"]


def test_cuda_autocast_on_fake_tensors() -> None:
    """CUDA autocast does not affect norms of fake tensors; a linear layer shows that it is enabled."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            x, weight = torch.empty(8, 8, device="cuda"), torch.empty(8, device="cuda")
            assert nn.functional.linear(x, x).dtype == torch.bfloat16
            for dtype in cases.DTYPES:
                y = x.to(dtype)
                for operator, norm in zip(DIFFERENTIABLE, NORMS, strict=True):
                    assert {t.dtype for t in operator.results(norm(y, y, weight))} == {dtype}
                assert normops.rms_norm(y.cpu(), 8, weight.cpu()).dtype == dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()
