"""What is peculiar to add_rms_norm: the rounding of the sum, and one gradient for two inputs."""

from typing import NamedTuple

import pytest
import torch
from assertions import assert_same_bits, same_bits
from torch import Tensor

import normops
from reference import cases
from reference.cases import EPS, HALVES
from reference.operators import ADD_RMS_NORM, RMS_NORM_BACKWARD, OperatorCase, cases_of
from reference.oracle import exact_sum

ops = torch.ops.normops


class Problem(NamedTuple):
    input: Tensor
    residual: Tensor
    weight: Tensor


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, residual_dtype: torch.dtype | None = None
) -> Problem:
    input, residual = (cases.values(shape, d, seed) for seed, d in enumerate((dtype, residual_dtype or dtype)))
    return Problem(input.to(device), residual.to(device), cases.values(shape[-1:], torch.float32, 3).to(device))


@pytest.mark.parametrize("case", [c for c in cases_of(ADD_RMS_NORM) if not c.dtypes], ids=str)
def test_the_output_is_the_norm_of_the_rounded_sum(case: OperatorCase, device: str) -> None:
    """Bit for bit, where it has the dtype of the sum."""
    output, residual_out = case.results(device)
    arguments = case.arguments(device) | {"input": residual_out}
    del arguments["residual"], arguments["alpha"]
    assert same_bits(output, ops.rms_norm(**arguments))


WIDER_SUMS = [c for c in cases_of(RMS_NORM_BACKWARD) if c.dtypes and c.flags == {"casting_mode": "gemma"}]


@pytest.mark.parametrize("case", WIDER_SUMS, ids=str)
def test_backward_of_a_wider_sum(case: OperatorCase, device: str) -> None:
    """rms_norm_backward with a float32 input takes the gradient of an output of 16 bits as it is."""
    widened = case.arguments(device)["grad_output"].float()
    assert_same_bits(case.results(device), case.results(device, grad_output=widened))


@pytest.mark.parametrize(
    "needed", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("used", ["both", "output", "residual_out"])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autograd(residual_dtype: torch.dtype, used: str, needed: tuple[bool, ...], device: str) -> None:
    """Any of the outputs used, any of the inputs differentiated: one rms_norm_backward, if any."""
    tensors = problem((3, 7, 40), torch.bfloat16, device, residual_dtype)
    leaves = Problem(*(t.clone().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)))
    output, residual_out = normops.add_rms_norm(
        leaves.input, leaves.residual, 40, leaves.weight, EPS, weight_offset=1.0
    )
    grad_output = cases.values((3, 7, 40), torch.bfloat16, 5).to(device)
    grad_residual_out = cases.values((3, 7, 40), residual_dtype, 6).to(device)
    chosen = {
        "both": [(output, grad_output), (residual_out, grad_residual_out)],
        "output": [(output, grad_output)],
        "residual_out": [(residual_out, grad_residual_out)],
    }[used]
    torch.autograd.backward([tensor for tensor, _ in chosen], [gradient for _, gradient in chosen])

    expected_sum, expected_weight = grad_residual_out, None
    if used != "residual_out":
        h = exact_sum(tensors.input, tensors.residual)
        grad_residual = grad_residual_out if used == "both" else None
        expected_sum, expected_weight = ops.rms_norm_backward(
            grad_output, h, (40,), tensors.weight, EPS, weight_offset=1.0, grad_residual=grad_residual
        )
    expected = (expected_sum.to(torch.bfloat16), expected_sum, expected_weight)
    for leaf, reference, is_needed in zip(leaves, expected, needed, strict=True):
        if not is_needed or reference is None:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert same_bits(leaf.grad, reference)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_nan_of_any_payload_stays_one(dtype: torch.dtype, device: str) -> None:
    """A float32 residual brings payloads that 16 bits do not have."""
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for index in range(4):
        residual = torch.where(torch.arange(20) == index, payloads[index], torch.ones(20)).to(device)
        output, residual_out = ops.add_rms_norm(torch.ones(20, dtype=dtype, device=device), residual, (20,), None, 0.0)
        assert output.isnan().all()
        assert residual_out.isnan().nonzero().flatten().tolist() == [index]
        dy = torch.ones(20, dtype=dtype, device=device)
        assert ops.rms_norm_backward(dy, residual, (20,), None, 0.0)[0].isnan().all()


def test_a_sum_changed_after_the_forward_is_noticed(device: str) -> None:
    x, residual, _ = problem((4, 8), torch.float32, device)
    output, residual_out = normops.add_rms_norm(x.requires_grad_(), residual, 8)
    with torch.no_grad():
        residual_out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_graph_is_freed_with_its_outputs(device: str) -> None:
    """The node saves one of its outputs, which must not keep itself alive."""
    x, residual, _ = problem((4, 8), torch.float32, device)
    released: list[bool] = []
    output, residual_out = normops.add_rms_norm(x.requires_grad_(), residual, 8)
    assert output.grad_fn is not None
    metadata: dict[str, object] = output.grad_fn.metadata  # type: ignore[assignment]
    metadata["mark"] = type("Mark", (), {"__del__": lambda self: released.append(True)})()
    del metadata, output, residual_out
    assert released


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_module(dtype: torch.dtype, device: str) -> None:
    x, residual, w = problem((3, 8), dtype, device)
    norm = normops.RMSNorm(8, 1e-3, weight_offset=1.0, device=device)
    with torch.no_grad():
        norm.weight.copy_(w)
    expected = normops.add_rms_norm(x, residual, 8, w, 1e-3, weight_offset=1.0)
    for actual, reference in zip(norm(x, residual), expected, strict=True):
        assert same_bits(actual, reference)


def test_ggml_report(device: str) -> None:
    """ggml's rms_norm_back was wrong where its output shared memory with an input (ggml#1491)."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=device)
    zero = torch.zeros_like(x)
    leaf = x.clone().requires_grad_()
    normops.add_rms_norm(leaf, zero, 4, eps=1e-4)[0].backward(x)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), torch.tensor([[0.000799, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)
    expected = ops.add_rms_norm(x, zero, (4,), None, 1e-4)
    for out, residual_out in ((x, zero), (zero, x)):
        a, b = x.clone(), zero.clone()
        targets = {"out": a if out is x else b, "residual_out": a if residual_out is x else b}
        for actual, reference in zip(ops.add_rms_norm.out(a, b, (4,), None, 1e-4, **targets), expected, strict=True):
            assert same_bits(actual, reference)
