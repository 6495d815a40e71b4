from collections.abc import Sequence

from torch import Tensor

from normops._info import CompiledInfo

class Registration:
    """As long as it is not closed, its kernels serve in the place of what was registered before."""

    def close(self) -> None: ...

class Recomputation:
    """Holds what a norm keeps for its backward; there is one of each norm at a time."""

    users: set[int]
    served: set[int]
    value: Tensor | None

    @staticmethod
    def enable(enabled: bool) -> bool: ...
    @staticmethod
    def of(tensor: Tensor) -> Recomputation | None: ...
    def output(self) -> Tensor: ...

def register_triton(dispatch_key: str) -> Registration: ...
def override_torch() -> Registration: ...
def traced_shape(normalized_shape: Sequence[int | Tensor]) -> list[int]: ...
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting_mode: str,
    bias: Tensor | None,
    /,
) -> Tensor: ...
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting_mode: str,
    alpha: float,
    /,
) -> tuple[Tensor, Tensor]: ...
def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    /,
) -> Tensor: ...
def rms_norm_rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting_mode: str,
    interleaved: bool,
    rotary_dim: int | None,
    rotary_offset: int,
    /,
) -> Tensor: ...
def build_info() -> CompiledInfo: ...
def operators() -> dict[str, str | None]: ...

# The checks of the operators, with the arguments of their schemas.
def check_rms_norm(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_backward(*args: object, **kwargs: object) -> None: ...
def check_add_rms_norm(*args: object, **kwargs: object) -> None: ...
def check_gated_rms_norm(*args: object, **kwargs: object) -> None: ...
def check_gated_rms_norm_backward(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_rope(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_rope_backward(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_stats(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_from_stats(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_backward_stats(*args: object, **kwargs: object) -> None: ...
def check_rms_norm_backward_from_stats(*args: object, **kwargs: object) -> None: ...
