"""Triton specializes code for arguments that are 1, multiples of 16, or 64 bits wide: all of it compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import each_value
from triton_launches import BF16, FP32, FP64, OF_CHANNELS, OF_ROWS, ROTATED, compiling_for, launch

triton = pytest.importorskip("triton")


# "rows" counts the rows of each group; a stride of None means equally spaced rows; dtypes are of input and weight.
@each_value
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64), (FP32, None)], ids=str)
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("stride", [None, 0, 1, 2**33])
@pytest.mark.parametrize("inner", [1, 16, 5, 2**31])
@pytest.mark.parametrize("rows", [1, 16, 7, 2**32 + 1])
@pytest.mark.parametrize("groups", [1, 3, 16])
@pytest.mark.parametrize("cols", [1, 16, 100, 8208, 70001])
@pytest.mark.parametrize(
    "operator", [*OF_ROWS, *OF_CHANNELS, *(f"{name}{kind}" for name in ROTATED for kind in ("", ", interleaved"))]
)
def test_arguments_of_every_kind_compile(
    operator: str,
    cols: int,
    groups: int,
    rows: int,
    inner: int,
    stride: int | None,
    is_aligned: bool,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    arch: int,
) -> None:
    with compiling_for(arch):
        launch(operator, cols, groups, rows, inner, stride, is_aligned, dtypes, casts=not is_aligned)


@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
@pytest.mark.parametrize("cols", [100, 8192, 16384, 65536])
@pytest.mark.parametrize("norm", ["rms_norm", "rms_norm_backward"])
def test_both_steps_are_launched_like_the_norm(
    norm: str, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares all options that determine the order in which a row is summed."""
    from triton.runtime.jit import JITFunction

    from normops.triton.launch_config import RowConfig

    launched = []

    def note(kernel: Any, grid: object) -> Callable[..., object]:
        return lambda *arguments, **options: launched.append(
            [kernel, *(options[name] for name in (*RowConfig._fields, "num_warps", "compute"))]
        )

    monkeypatch.setattr(JITFunction, "__getitem__", note)
    for operator in (norm, f"{norm}_stats", f"{norm}_from_stats"):
        launch(operator, cols, rows=7, dtypes=(dtype, dtype))
    assert launched == launched[:1] * 3
