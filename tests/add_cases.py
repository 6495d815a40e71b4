"""The inputs that add_rms_norm is tested on."""

from collections.abc import Callable
from typing import NamedTuple

import cases
import pytest
import torch
from cases import CASES, Case, on
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


class AddCase(NamedTuple):
    case: Case
    residual_dtype: torch.dtype

    def residual(self) -> Tensor:
        return self.case.grad_layout(self.case.shape, self.residual_dtype, 4)

    def __str__(self) -> str:
        return f"{self.case}-r:{str(self.residual_dtype).removeprefix('torch.')}"


ADD_CASES = (
    *(AddCase(case, case.dtype) for case in CASES),
    *(AddCase(case, torch.float32) for case in CASES[::2] if case.dtype in HALVES),
)


def exact_sum(input: Tensor, residual: Tensor) -> Tensor:
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    return (input.to(compute) + residual.to(compute)).to(residual.dtype)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected))
    return torch.equal(*flat)


class Problem(NamedTuple):
    input: Tensor
    residual: Tensor
    weight: Tensor


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, residual_dtype: torch.dtype | None = None
) -> Problem:
    input, residual = (cases.values(shape, d, seed) for seed, d in enumerate((dtype, residual_dtype or dtype)))
    return Problem(input.to(device), residual.to(device), cases.values(shape[-1:], torch.float32, 3).to(device))


def targets_of(case: Case, dtype: torch.dtype, residual_dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    layout = cases.contiguous if case.layout in (cases.expanded, cases.expanded_scalar) else case.layout
    made = {"out": layout(case.shape, dtype, 7), "residual_out": layout(case.shape, residual_dtype, 8)}
    return {name: moved for name, tensor in made.items() if (moved := on(device, tensor)) is not None}


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value).splitlines()[0]
