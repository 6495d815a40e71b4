"""The inputs that gated_rms_norm is tested on."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import cases
from reference.cases import CASES, HALVES, Case, on

GATINGS = tuple(product(("silu", "sigmoid"), (True, False)))  # activation, norm_before_gate


class GatedCase(NamedTuple):
    case: Case
    gate_dtype: torch.dtype
    activation: str
    norm_before_gate: bool

    def gate(self) -> Tensor:
        return self.case.grad_layout(self.case.shape, self.gate_dtype, 6)

    @property
    def gating(self) -> dict[str, Any]:
        return {"activation": self.activation, "norm_before_gate": self.norm_before_gate}

    @property
    def keywords(self) -> dict[str, Any]:
        return {"weight_offset": self.case.weight_offset, **self.gating}

    def arguments(self, device: str) -> tuple[object, ...]:
        case = self.case
        return (
            on(device, case.input()),
            on(device, self.gate()),
            case.normalized_shape,
            on(device, case.weight()),
            case.eps,
        )

    def targets(self, device: str) -> dict[str, Tensor]:
        """Of the backward, in the layouts of the inputs where these can be written to."""
        case = self.case
        layouts = [
            cases.contiguous if layout in (cases.expanded, cases.expanded_scalar) else layout
            for layout in (case.layout, case.grad_layout)
        ]
        weight = case.weight()
        made = {
            "grad_input": layouts[0](case.shape, case.dtype, 7),
            "grad_gate": layouts[1](case.shape, self.gate_dtype, 8),
            "grad_weight": torch.empty(0) if weight is None else torch.full_like(weight, torch.nan),
        }
        return {name: moved for name, tensor in made.items() if (moved := on(device, tensor)) is not None}

    def __str__(self) -> str:
        order = "norm" if self.norm_before_gate else "gate"
        return f"{self.case}-g:{str(self.gate_dtype).removeprefix('torch.')}-{self.activation}-{order}_first"


def _cases() -> Iterator[GatedCase]:
    choose = random.Random(0)
    for case in CASES:
        yield GatedCase(case, case.dtype, *choose.choice(GATINGS))
    for index, case in enumerate(case for case in CASES if case.dtype != torch.float64):
        if case.dtype in HALVES and index % 3 == 0:
            yield GatedCase(case, torch.float32, *choose.choice(GATINGS))
        elif case.dtype == torch.float32 and index % 2 == 0:
            yield GatedCase(case, choose.choice(HALVES), *choose.choice(GATINGS))
    for gating in GATINGS:
        for cols in (1, 17, 1000):
            yield GatedCase(Case((3, cols), torch.float32, 1, torch.float32), torch.float32, *gating)
        for dtype in HALVES:
            case = Case(
                (4, 3, 36), dtype, 1, dtype, layout=cases.qkv_slice, grad_layout=cases.padded_rows, group_dims=1
            )
            yield GatedCase(case, torch.float32, *gating)


GATED_CASES = tuple(_cases())
