"""Arguments that all launches share: rows, the compute type, options for Triton's compiler."""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from normops.triton.launch_config import RowConfig, lanes_of_warp

# Multiply-adds are not fused, so that every version of Triton rounds each operation as it is written.
COMPILE_OPTIONS = {"enable_fp_fusion": False}

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Rows(NamedTuple):
    """The rows of a tensor: row r starts at element ``r // inner * outer_stride + r % inner * inner_stride``."""

    tensor: Tensor
    inner: int
    outer_stride: int
    inner_stride: int


class NestedRows(NamedTuple):
    """The rows of a tensor, in three dimensions.

    Row r starts at element ``r // (middle * inner) * outer_stride + r // inner % middle * middle_stride +
    r % inner * inner_stride``.
    """

    tensor: Tensor
    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    inner_stride: int


class Channels(NamedTuple):
    """A tensor ``[samples, channels, positions]``, and its strides. The channels of a position are a row."""

    tensor: Tensor
    sample_stride: int
    channel_stride: int
    position_stride: int


class Rotation(NamedTuple):
    """A rotation of the columns [offset, offset + 2 * pairs) of each row by cos and sin.

    Column i of these forms a pair with i + pairs; if interleaved, 2 * i does with 2 * i + 1. The rows of cos and sin
    are strided like NestedRows, and have an angle for each pair (angle_of_pair) or for each column.
    """

    cos: Tensor
    sin: Tensor
    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    inner_stride: int
    interleaved: bool
    angle_of_pair: bool
    offset: int
    pairs: int


class Rounding(NamedTuple):
    """Selects intermediate results to round to the dtype of the output, or of its gradient: see csrc/kernel_args.h."""

    normalized: bool
    multiplied: bool


def rounding_constants(rounding: Rounding, output: Rows | NestedRows, compute: tl.dtype) -> dict[str, tl.dtype]:
    """Returns the types that kernels cast intermediate results to; the compute type means no rounding."""
    dtype = _TYPES[output.tensor.dtype]
    return {
        "normalized": dtype if rounding.normalized else compute,
        "multiplied": dtype if rounding.multiplied else compute,
    }


def rotation_arguments(rotation: Rotation) -> tuple[Tensor | int, ...]:
    """Returns the kernel arguments of a rotation's tables."""
    cos, sin, middle, inner, outer_stride, middle_stride, inner_stride, *_ = rotation
    return cos, sin, middle, inner, outer_stride, middle_stride, inner_stride


def rotation_constants(rotation: Rotation) -> dict[str, Any]:
    """Returns the compile-time constants of a rotation, which are the same in all layers of a model."""
    return {name: getattr(rotation, name) for name in ("interleaved", "angle_of_pair", "offset", "pairs")}


def arguments(rows: Rows | Channels | None) -> tuple[Tensor | None, int, int, int]:
    """Returns the kernel arguments of rows or channels, with placeholders for None."""
    return (None, 1, 0, 0) if rows is None else rows


def nested_arguments(rows: NestedRows | None) -> tuple[Tensor | None, int, int, int, int, int]:
    """Returns the kernel arguments of nested rows, with placeholders for None."""
    return (None, 1, 1, 0, 0, 0) if rows is None else rows


def named_arguments(**given: Rows | None) -> dict[str, Any]:
    """Returns the keyword arguments of rows that only some launches have, and omits those that are None."""
    names = ("", "_inner", "_outer_stride", "_inner_stride")
    return {
        name + of: value
        for name, rows in given.items()
        if rows is not None
        for of, value in zip(names, rows, strict=True)
    }


def is_overwritten(weight: Tensor | None, *outputs: Rows | NestedRows | Channels | None) -> bool:
    """Returns whether an output aliases the weight; that output is then a single row."""
    return weight is not None and any(rows and rows.tensor.data_ptr() == weight.data_ptr() for rows in outputs)


def options(config: RowConfig, device: torch.device) -> dict[str, Any]:
    """Returns the keyword arguments of a launch with this configuration."""
    return {**constants(config), "num_warps": config.warps(lanes_of_warp(device)), **COMPILE_OPTIONS}


def constants(config: RowConfig) -> dict[str, int]:
    """Returns those keyword arguments of a launch that kernels take."""
    return {
        "block_rows": config.block_rows,
        "block_cols": config.block_cols,
        "parts": config.parts,
        "threads": config.threads,
    }


def compute_type(input: Rows | NestedRows | Channels) -> tl.dtype:
    """Returns the type that kernels for this input compute in."""
    return tl.float64 if input.tensor.dtype == torch.float64 else tl.float32


def index_type(rows: int) -> tl.dtype:
    """Returns the integer type in which kernels divide row indices."""
    return tl.int32 if rows < 1 << 31 else tl.int64


def make_partials(programs: int, cols: int, input: Rows | NestedRows | Channels) -> Tensor:
    """Allocates partial sums of parameter gradients: a row for each program of a backward."""
    dtype = torch.float64 if input.tensor.dtype == torch.float64 else torch.float32
    return torch.empty((programs, cols), dtype=dtype, device=input.tensor.device)
