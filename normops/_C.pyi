from collections.abc import Sequence

from torch import Tensor

from normops._info import CompiledInfo

class Problem:
    """The flat problem of arguments that passed the check: [rows, cols] and the epsilon in force."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def eps(self) -> float: ...

class TritonRegistration:
    """As long as it is not closed, the launchers of normops.triton serve a dispatch key."""

    def __init__(self, dispatch_key: str) -> None: ...
    def close(self) -> None: ...

def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    /,
) -> Tensor: ...
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    /,
) -> tuple[Tensor, Tensor]: ...
def build_info() -> CompiledInfo: ...
def rms_norm_problem(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Problem: ...
def add_rms_norm_problem(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Problem: ...
def rms_norm_backward_problem(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    grad_residual: Tensor | None = None,
) -> Problem: ...
