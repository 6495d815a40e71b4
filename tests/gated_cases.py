"""The inputs that gated_rms_norm is tested on, for kernels that are called past torch."""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.cases import Case
from reference.operators import GATED_RMS_NORM, cases_of

GATINGS = tuple(product(("silu", "sigmoid"), (True, False)))  # activation, norm_before_gate


class GatedCase(NamedTuple):
    case: Case
    gate_dtype: torch.dtype
    activation: str
    norm_before_gate: bool
    casting_mode: str = "gemma"

    def gate(self) -> Tensor:
        return self.case.grad_layout(self.case.shape, self.gate_dtype, 6)

    @property
    def keywords(self) -> dict[str, Any]:
        gating = {"activation": self.activation, "norm_before_gate": self.norm_before_gate}
        return {"weight_offset": self.case.weight_offset, "casting_mode": self.casting_mode, **gating}

    def __str__(self) -> str:
        order = "norm" if self.norm_before_gate else "gate"
        gate_dtype = str(self.gate_dtype).removeprefix("torch.")
        return f"{self.case}-g:{gate_dtype}-{self.activation}-{order}_first-{self.casting_mode}"


GATED_CASES = tuple(
    GatedCase(case.case, case.dtypes.get("gate", case.case.dtype), **case.flags)  # type: ignore[arg-type]
    for case in cases_of(GATED_RMS_NORM)
)
