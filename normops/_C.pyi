from collections.abc import Sequence

from torch import Tensor

from normops._info import CompiledInfo

class Registration:
    """As long as it is not closed, its kernels serve in the place of what was registered before."""

    def close(self) -> None: ...

def enter_recompute_block() -> tuple[int, int]:
    """Returns the number of the block that is entered, and of the block around it (0: none)."""

def leave_recompute_block(outer: int) -> None: ...

class RecomputedOutput:
    """Saved in the place of an output of a norm, or of a view of it."""

    @staticmethod
    def is_recomputed(tensor: Tensor, block: int) -> bool: ...
    @staticmethod
    def of(tensor: Tensor) -> RecomputedOutput | None: ...
    def tensor(self) -> Tensor: ...

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
def elements_of_parts(rows: int, cols: int, groups: int, sums_rows: bool, threads: int) -> list[int]: ...
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
