"""Launches the Triton kernels for GPUs that are not there, as the operators do: they are compiled, and not run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from normops.triton import Rotation

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The operators, some with other arguments than they usually have.
OF_ROWS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_backward",
    "rms_norm_backward with residual",
    "grad_input alone",
    "grad_weight alone",
    "gated_rms_norm",
    "gated_rms_norm, gate first",
    "gated_rms_norm_backward",
    "gated_rms_norm_backward, gate first",
    "rms_norm_stats",
    "rms_norm_from_stats",
    "rms_norm_backward_stats",
    "rms_norm_backward_from_stats",
)
ROTATED = ("rms_norm_rope", "rms_norm_rope_backward")

# AMD's architectures, and how many lanes a warp has on each. CDNA 2 to 4, RDNA 3 and 4.
LANES: dict[int | str, int] = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}


class Driver:
    """Of a GPU of an architecture: enough to compile for."""

    def __init__(self, arch: int | str) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        """By which kernels that were compiled are found again."""
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
    """Launches end where the kernel is compiled, with arguments as Triton specialises them; gives what was compiled."""
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
    """An address and a dtype: nothing is read."""
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
    """Rows are those of each group; a stride of None is what rows at equal distances have; dtypes are those of the
    input and of the weight."""
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
        """Of columns in the middle, or of none; tables of the weight's type, which may be float32 beside 16 bits."""
        dtype = dtypes[1] or dtypes[0]
        tables = tensor(dtype, is_aligned), tensor(dtype, is_aligned)
        nesting = min(inner, 7), inner, *strides, 0
        return launchers.Rotation(*tables, *nesting, bool(rest), is_aligned, cols // 8, cols // 4)

    name, _, rest = operator.partition(",")
    weight = None if dtypes[1] is None or operator == "grad_input alone" else tensor(dtypes[1], is_aligned)
    shape = (groups, groups * rows, cols)
    wants_weight = weight is not None
    common = (weight, 1.0, 1e-5, launchers.Casting(casts, casts))
    size = cols if groups == 1 else 2**33
    gating = ("silu" if is_aligned else "sigmoid", not rest)
    match name:
        case "rms_norm":
            launchers.launch_forward(make(), None, make(), None, *common, 1.0, *shape)
        case "add_rms_norm":
            launchers.launch_forward(make(), make(), make(), make(), *common, 0.22 if groups > 1 else 1.0, *shape)
        case "gated_rms_norm":
            launchers.launch_gated_forward(make(), make(), make(), *common, *gating, *shape)
        case "gated_rms_norm_backward":
            launchers.launch_gated_backward(
                make(), make(), make(), make(), make(), wants_weight, *common, *gating, *shape
            )
        case "rms_norm_rope":
            launchers.launch_rope_forward(make_nested(), rotation or make_rotation(), make_nested(), *common, *shape)
        case "rms_norm_rope_backward":
            nested = make_nested(), make_nested(), rotation or make_rotation(), make_nested()
            launchers.launch_rope_backward(*nested, wants_weight, *common, *shape)
        case "rms_norm_stats":
            launchers.launch_stats(make(), make_sums(), groups * rows, cols)
        case "rms_norm_from_stats":
            launchers.launch_from_stats(make(), make_sums(), size, make(), *common, *shape)
        case "rms_norm_backward_stats":
            without_eps = weight, 1.0, common[-1]
            launchers.launch_backward_stats(make(), make(), make_sums(), make_sums(), *without_eps, *shape)
        case "rms_norm_backward_from_stats":
            launchers.launch_backward_from_stats(
                make(), make(), make_sums(), make_sums(), size, make(), make(), wants_weight, *common, *shape
            )
        case _:
            residual = make() if name.endswith("residual") else None
            grad_input = None if name == "grad_weight alone" else make()
            launchers.launch_backward(
                make(), make(), residual, grad_input, wants_weight or grad_input is None, *common, *shape
            )
