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
    casting = launchers.Casting(casts, casts)
    common = {"weight": weight, "weight_offset": 1.0, "eps": 1e-5, "casting": casting}
    common |= {"groups": groups, "rows": groups * rows, "cols": cols}
    wanted: dict[str, Any] = {**common, "wants_weight": weight is not None}
    size = cols if groups == 1 else 2**33
    gating = {"activation": "silu" if is_aligned else "sigmoid", "norm_before_gate": not rest}
    forward: Any = launchers.launch_forward
    backward: Any = launchers.launch_backward
    rope_forward: Any = launchers.launch_rope_forward
    rope_backward: Any = launchers.launch_rope_backward
    match name:
        case "rms_norm":
            forward(input=make(), output=make(), **common)
        case "add_rms_norm":
            alpha = 0.22 if groups > 1 else 1.0
            forward(input=make(), residual=make(), output=make(), residual_out=make(), alpha=alpha, **common)
        case "gated_rms_norm":
            forward(input=make(), gate=make(), output=make(), **gating, **common)
        case "gated_rms_norm_backward":
            written = {"grad_input": make(), "grad_gate": make()}
            backward(grad_output=make(), input=make(), gate=make(), **written, **gating, **wanted)
        case "rms_norm_rope":
            nested = {"input": make_nested(), "output": make_nested()}
            rope_forward(**nested, rotation=rotation or make_rotation(), **common)
        case "rms_norm_rope_backward":
            nested = {of: make_nested() for of in ("grad_output", "input", "grad_input")}
            rope_backward(**nested, rotation=rotation or make_rotation(), **wanted)
        case "rms_norm_stats":
            forward(input=make(), square_sum=make_sums(), **common | {"weight": None, "groups": 1})
        case "rms_norm_from_stats":
            forward(input=make(), square_sum=make_sums(), output=make(), size=size, **common)
        case "rms_norm_backward_stats":
            sums = {"square_sum": make_sums(), "dot": make_sums()}
            backward(grad_output=make(), input=make(), **sums, **wanted | {"wants_weight": False})
        case "rms_norm_backward_from_stats":
            given = {"square_sum": make_sums(), "dot": make_sums(), "size": size, "grad_residual": make()}
            backward(grad_output=make(), input=make(), grad_input=make(), **given, **wanted)
        case _:
            residual = make() if name.endswith("residual") else None
            grad_input = None if name == "grad_weight alone" else make()
            wanted["wants_weight"] |= grad_input is None
            backward(grad_output=make(), input=make(), grad_residual=residual, grad_input=grad_input, **wanted)
