from collections.abc import Sequence

from torch import Tensor

from normops._info import CompiledInfo

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
def check_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> None: ...
def check_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> None: ...
def check_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    grad_residual: Tensor | None = None,
) -> None: ...
