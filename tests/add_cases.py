"""The inputs that add_rms_norm is tested on."""

from typing import NamedTuple

import torch
from torch import Tensor

from reference import cases
from reference.cases import CASES, HALVES, Case, on


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
