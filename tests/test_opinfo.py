"""The inputs that PyTorch tests its own rms_norm with."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normops

# It needs expecttest, which torch does not bring.
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

(INFO,) = [info for info in invocations.op_db if info.name == "nn.functional.rms_norm"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def in_float64(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return value.detach().double().requires_grad_(value.requires_grad) if is_tensor else value


def results(fn: Callable[..., Tensor], sample: Any) -> list[Tensor]:
    """The output, and the gradients of the tensors among the arguments."""
    tensors = [value for value in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(value, Tensor)]
    output = fn(sample.input, *sample.args, **sample.kwargs)
    gradient = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device)
    return [output.detach(), *torch.autograd.grad(output, tensors, gradient.view_as(output).to(output.dtype))]


def largest(values: Tensor) -> float:
    return float(values.nan_to_num().abs().max()) if values.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    count = 0
    for sample in INFO.sample_inputs(device, dtype, requires_grad=True):
        exact = sample.transform(in_float64)
        exact.kwargs.setdefault("eps", torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
        shape, *weight = exact.args
        mean = exact.input.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
        # A gradient is a difference of terms as large as this.
        terms = largest((mean + exact.kwargs["eps"]).rsqrt()) * (largest(weight[0]) if weight else 1.0)
        for actual, expected in zip(results(normops.rms_norm, sample), results(F.rms_norm, exact), strict=True):
            assert actual.dtype == dtype
            bound = 8 * torch.finfo(dtype).eps * max(largest(expected), terms)
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound, equal_nan=True)
        count += 1
    assert count >= 6


def test_errors(device: str) -> None:
    for error in INFO.error_inputs(device):
        with pytest.raises(RuntimeError, match="rms_norm: expected "):
            normops.rms_norm(error.sample_input.input, *error.sample_input.args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [3, 64, 1000])
def test_the_sum_under_the_root_decides(cols: int, dtype: torch.dtype, device: str) -> None:
    x = torch.ones(3, cols, dtype=dtype, device=device)
    x[1] = 0.25
    x[2] = 0.5
    x.requires_grad_()
    y = normops.rms_norm(x, cols, None, -0.25)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(y[0], torch.full_like(y[0], 1 / math.sqrt(0.75)))
    assert grad[0].isfinite().all()
    assert y[1].isnan().all()
    assert grad[1].isnan().all()
    assert y[2].isposinf().all()
