"""Launches the Triton kernels like the operators, for GPUs that are absent: kernels are compiled but not run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from normops.triton import Rotation

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The tensors that the launchers take as rows, by operator; some operators also with unusual arguments.
ROWS = {
    "rms_norm": "input output",
    "add_rms_norm": "input residual output residual_out",
    "rms_norm_backward": "grad_output input grad_input",
    "rms_norm_backward with residual": "grad_output input grad_residual grad_input",
    "grad_input alone": "grad_output input grad_input",
    "grad_weight alone": "grad_output input",
    "gated_rms_norm": "input gate output",
    "gated_rms_norm, gate first": "input gate output",
    "gated_rms_norm_backward": "grad_output input gate grad_input grad_gate",
    "gated_rms_norm_backward, gate first": "grad_output input gate grad_input grad_gate",
    "rms_norm_stats": "input square_sum",
    "rms_norm_from_stats": "input square_sum output",
    "rms_norm_backward_stats": "grad_output input square_sum dot",
    "rms_norm_backward_from_stats": "grad_output input square_sum dot grad_residual grad_input",
}
OF_ROWS = tuple(ROWS)
ROTATED = ("rms_norm_rope", "rms_norm_rope_backward")
OF_CHANNELS = ("channel_rms_norm", "channel_rms_norm_backward")

# AMD's architectures and their lanes per warp: CDNA 2 to 4, RDNA 3 and 4.
LANES: dict[int | str, int] = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}


class Driver:
    """The part of a GPU's driver that compilation needs."""

    def __init__(self, arch: int | str) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        """Returns the device index, under which Triton caches compiled kernels."""
        return self.arch if isinstance(self.arch, int) else [*LANES].index(self.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        if isinstance(self.arch, str):
            return GPUTarget("hip", self.arch, LANES[self.arch])
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling_for(arch: int | str) -> Iterator[list[Any]]:
    """Ends launches after compilation, with arguments as Triton specializes them; yields the compiled kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    import normops.triton.launch

    kernels: list[Any] = []

    def compile_alone(kernel: Any, grid: object) -> Callable[..., object]:
        return lambda *arguments, **options: kernels.append(kernel.warmup(*arguments, grid=grid, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", compile_alone)
        patch.setattr(type(driver), "active", Driver(arch))
        patch.setattr(normops.triton.launch, "lanes_of_warp", lambda device: LANES.get(arch, 32))
        yield kernels


def tensor(dtype: torch.dtype, is_aligned: bool = True) -> Tensor:
    """Returns a tensor for its address and dtype; it is not read."""
    return torch.empty(64, dtype=dtype)[0 if is_aligned else 1 :]


def launch(
    operator: str,
    cols: int,
    groups: int = 1,
    rows: int = 4096,
    inner: int = 1,
    stride: int | None = None,
    is_aligned: bool = True,
    dtypes: tuple[torch.dtype, torch.dtype | None] = (BF16, FP32),
    *,
    casts: bool = False,
    rotation: "Rotation | None" = None,
) -> None:
    """Launches an operator with ``rows`` rows of each group; a stride of None means equally spaced rows; ``dtypes`` are
    those of the input and the weight."""
    import normops.triton as launchers

    strides = (cols, 0) if stride is None else (stride, cols + 1)

    def make() -> launchers.Rows:
        return launchers.Rows(tensor(dtypes[0], is_aligned), inner, *strides)

    def make_sums() -> launchers.Rows:
        dtype = FP64 if dtypes[0] == FP64 else FP32
        return launchers.Rows(tensor(dtype, is_aligned), inner, 1 if stride is None else stride, 3)

    def make_nested() -> launchers.NestedRows:
        nesting = min(inner, 7), inner, *strides, cols + 2 if inner > 1 else 0
        return launchers.NestedRows(tensor(dtypes[0], is_aligned), *nesting)

    def make_rotation() -> launchers.Rotation:
        """Rotates columns in the middle, or none; tables have the weight's dtype, possibly float32 with 16-bit rows."""
        dtype = dtypes[1] or dtypes[0]
        tables = tensor(dtype, is_aligned), tensor(dtype, is_aligned)
        nesting = min(inner, 7), inner, *strides, 0
        return launchers.Rotation(*tables, *nesting, bool(rest), is_aligned, cols // 8, cols // 4)

    if operator in OF_CHANNELS:
        return launch_over_channels(operator, cols, rows, inner, stride, is_aligned, dtypes, is_activated=not casts)

    name, _, rest = operator.partition(",")
    is_backward = "backward" in name or "grad" in name
    weight = None if dtypes[1] is None or operator == "grad_input alone" else tensor(dtypes[1], is_aligned)
    given: dict[str, Any] = {"weight": weight, "weight_offset": 1.0, "eps": 1e-5, "groups": groups}
    given |= {"rounding": launchers.Rounding(casts, casts), "rows": groups * rows, "cols": cols}
    if is_backward:
        is_wanted = weight is not None or name == "grad_weight alone"
        given["wants_weight"] = is_wanted and name != "rms_norm_backward_stats"
    if name == "rms_norm_stats":
        given |= {"weight": None, "groups": 1}
    if name in ROTATED:
        nested = ("grad_output", "input", "grad_input") if is_backward else ("input", "output")
        given |= {of: make_nested() for of in nested} | {"rotation": rotation or make_rotation()}
        launch_rows: Any = launchers.launch_rope_backward if is_backward else launchers.launch_rope_forward
    else:
        tensors = ROWS[operator].split()
        given |= {of: make_sums() if of in ("square_sum", "dot") else make() for of in tensors}
        if "residual" in tensors:
            given["alpha"] = 0.22 if groups > 1 else 1.0
        if "gate" in tensors:
            given |= {"activation": "silu" if is_aligned else "sigmoid", "norm_before_gate": not rest}
        if "from_stats" in name:
            given["size"] = cols if groups == 1 else 2**33
        launch_rows = launchers.launch_backward if is_backward else launchers.launch_forward
    launch_rows(**given)


def launch_over_channels(
    operator: str,
    cols: int,
    rows: int,
    positions: int,
    stride: int | None,
    is_aligned: bool,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    *,
    is_activated: bool,
) -> None:
    """Launches with ``cols`` channels at ``rows`` positions of all samples; a stride of None means contiguous ones."""
    import normops.triton as launchers

    def make() -> launchers.Channels:
        strides = (cols * positions, positions, 1) if stride is None else (cols * stride, stride, stride)
        memory = tensor(dtypes[0], is_aligned)[:1]
        return launchers.Channels(memory.expand(max(1, rows // positions), cols, positions), *strides)

    parameter = None if dtypes[1] is None else tensor(dtypes[1], is_aligned)
    given: dict[str, Any] = {"input": make(), "weight": parameter, "bias": parameter, "weight_offset": 1.0, "eps": 1e-5}
    given["activation"] = "silu" if is_activated else None
    if operator == "channel_rms_norm":
        launchers.launch_channel_forward(**given, output=make())
    else:
        given |= {"wants_weight": parameter is not None, "wants_bias": parameter is not None}
        launchers.launch_channel_backward(**given, grad_output=make(), grad_input=make())
