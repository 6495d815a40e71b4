"""Tests specific to add_rms_norm: the rounding of the sum, and one gradient for two inputs."""

from typing import NamedTuple

import pytest
import torch
from assertions import assert_same_bits, same_bits
from sampling import few
from torch import Tensor

import normops
from reference import cases
from reference.cases import EPS
from reference.operators import ADD_RMS_NORM, OperatorCase, cases_of
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


SUMS = [case for case in cases_of(ADD_RMS_NORM) if not case.dtypes]


@pytest.mark.parametrize("case", few(SUMS, chosen=pytest.mark.triton_release), ids=str)
def test_output_is_norm_of_rounded_sum(case: OperatorCase, device: str) -> None:
    """Compares bitwise; residuals of other dtypes are excluded, as the sum then has another dtype."""
    output, residual_out = case.results(device)
    arguments = case.arguments(device) | {"input": residual_out}
    del arguments["residual"], arguments["alpha"]
    assert same_bits(output, ops.rms_norm(**arguments))


@pytest.mark.parametrize(
    "needed", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("used", ["both", "output", "residual_out"])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grads_of_used_outputs(residual_dtype: torch.dtype, used: str, needed: tuple[bool, ...], device: str) -> None:
    """Compares with one rms_norm_backward, for any used outputs and any inputs that require gradients."""
    tensors = problem((3, 7, 40), torch.bfloat16, device, residual_dtype)
    leaves = Problem(*(t.clone().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)))
    output, residual_out = normops.add_rms_norm(
        leaves.input, leaves.residual, 40, leaves.weight, EPS, weight_offset=1.0
    )
    grad_output = cases.values((3, 7, 40), torch.bfloat16, 5).to(device)
    grad_residual_out = cases.values((3, 7, 40), residual_dtype, 6).to(device)
    pairs = {"output": (output, grad_output), "residual_out": (residual_out, grad_residual_out)}
    chosen = [pair for name, pair in pairs.items() if used in (name, "both")]
    torch.autograd.backward([tensor for tensor, _ in chosen], [gradient for _, gradient in chosen])

    expected_sum, expected_weight = grad_residual_out, None
    if used != "residual_out":
        h = exact_sum(tensors.input, tensors.residual).to(device)
        grad_residual = grad_residual_out if used == "both" else None
        expected_sum, expected_weight, _ = ops.rms_norm_backward(
            grad_output, h, (40,), tensors.weight, EPS, weight_offset=1.0, grad_residual=grad_residual
        )
    expected = (expected_sum.to(torch.bfloat16), expected_sum, expected_weight)
    for leaf, reference, is_needed in zip(leaves, expected, needed, strict=True):
        assert_same_bits([leaf.grad], [reference if is_needed else None])


@pytest.mark.parametrize("index", [0, 1])
def test_second_derivatives_of_one_output(index: int, device: str) -> None:
    """Backwards without a gradient of the other output; PyTorch's OpInfo tests pass both."""
    input, residual, weight = (t.double() for t in problem((2, 5), torch.float64, device))

    def norm(*tensors: Tensor) -> Tensor:
        return ops.add_rms_norm(tensors[0], tensors[1], [5], tensors[2], EPS, alpha=0.25)[index]

    leaves = [input.requires_grad_(), residual.requires_grad_(), weight.requires_grad_(index == 0)]
    assert torch.autograd.gradgradcheck(norm, leaves)


def test_graph_is_freed_with_its_outputs(device: str) -> None:
    """The node saves one of its outputs, which must not create a reference cycle."""
    x, residual, _ = problem((4, 8), torch.float32, device)
    released: list[bool] = []
    output, residual_out = normops.add_rms_norm(x.requires_grad_(), residual, 8)
    assert output.grad_fn is not None
    metadata: dict[str, object] = output.grad_fn.metadata  # type: ignore[assignment]
    metadata["mark"] = type("Mark", (), {"__del__": lambda self: released.append(True)})()
    del metadata, output, residual_out
    assert released
