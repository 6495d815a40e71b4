"""Defines the inputs of the tests: shapes, dtypes, memory layouts, flags."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
# Dtypes of input, residual and weight: equal, a wider weight, or a wider residual and weight.
MIXED_DTYPES = (
    *((dtype, dtype, dtype) for dtype in DTYPES),
    *((dtype, dtype, torch.float32) for dtype in HALVES),
    *((dtype, torch.float32, torch.float32) for dtype in HALVES),
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that kernels compute in for an input of this dtype."""
    return torch.promote_types(dtype, torch.float32)


EPS = 0.01  # large enough that a kernel which dropped it would be far out of bounds


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 0.2) -> Tensor:
    """Returns random rows, scaled by different powers of two, so that one row's statistics do not fit another.

    Their mean square is around EPS, so that omitting either of the two is detected.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    if len(shape) > 1:
        numbers *= torch.exp2(torch.randint(-2, 3, (*shape[:-1], 1), generator=generator))
    return numbers.to(dtype)


def _strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a view with these strides into memory that is NaN outside of the view."""
    size = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else offset
    memory = torch.full((size + 8,), math.nan, dtype=dtype)
    view = memory.as_strided(shape, strides, offset)
    stored_once = memory.as_strided(
        [n if s else min(n, 1) for n, s in zip(shape, strides, strict=True)], strides, offset
    )
    stored_once.copy_(values(tuple(stored_once.shape), dtype, seed))
    return view


def _contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape))]


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return values(shape, dtype, seed)


def misaligned(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a contiguous tensor that is one element off any alignment."""
    return _strided(shape, tuple(_contiguous_strides(shape)), 1, dtype, seed)


def qkv_slice(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns the keys of a fused projection [batch, sequence, 3, heads, head_dim]."""
    strides = _contiguous_strides(shape)
    strides[:-2] = [3 * s for s in strides[:-2]]
    return _strided(shape, tuple(strides), math.prod(shape[-2:]), dtype, seed)


def padded_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns rows with three unused elements after each."""
    return _strided(shape, (*_contiguous_strides((*shape[:-1], shape[-1] + 3))[:-1], 1), 0, dtype, seed)


def transposed(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor whose first two dimensions are swapped in memory."""
    if len(shape) < 3:
        return contiguous(shape, dtype, seed)
    return contiguous((shape[1], shape[0], *shape[2:]), dtype, seed).transpose(0, 1)


def reversed_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor whose row dimensions are in reverse order in memory, so that no two of them merge."""
    rows = len(shape) - 1
    return contiguous((*shape[:-1][::-1], shape[-1]), dtype, seed).permute(*range(rows)[::-1], rows)


def expanded(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor whose first dimension has stride 0."""
    return contiguous((1, *shape[1:]), dtype, seed).expand(shape)


def expanded_scalar(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor whose strides are all 0, like the gradient of .sum().backward()."""
    return values((1,), dtype, seed).expand(shape)


def strided_columns(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns every other column of a tensor: the normalized dimension is not contiguous."""
    return _strided(shape, tuple(2 * s for s in _contiguous_strides(shape)), 0, dtype, seed)


def transposed_columns(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor whose columns are the slowest dimension in memory."""
    return contiguous((shape[-1], *shape[:-1]), dtype, seed).movedim(0, -1)


Layout = Callable[[tuple[int, ...], torch.dtype, int], Tensor]

LAYOUTS: tuple[Layout, ...] = (
    contiguous,
    misaligned,
    qkv_slice,
    padded_rows,
    transposed,
    expanded,
    expanded_scalar,
    strided_columns,
    transposed_columns,
)


def on(device: str, tensor: Tensor | None) -> Tensor | None:
    """Returns the tensor on the device, with its strides."""
    return tensor if tensor is None or device == "cpu" else copy_of(tensor, device)


def moved(device: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator, with their tensors on the device."""
    return {name: on(device, value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def nans(dtype: torch.dtype) -> Tensor:
    """Returns NaNs of both signs whose payloads have one bit or all bits, each quiet and signalling."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    infinities = torch.tensor([math.inf, -math.inf], dtype=dtype).view(integer)
    fraction = round(1 / torch.finfo(dtype).eps)  # the bits below this one are the payload
    payloads = torch.tensor([1, fraction // 2 - 1, fraction // 2, fraction - 1], dtype=integer)
    return (infinities[:, None] | payloads).flatten().view(dtype)


def copy_of(tensor: Tensor, device: str | torch.device | None = None) -> Tensor:
    """Returns a copy of the tensor with its strides, in separate memory."""
    if not tensor.numel():  # its offset may be behind the end of its memory
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((tensor.storage_offset() + reach,), (1,), 0).to(device or tensor.device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    normalized_dims: int = 1
    weight_dtype: torch.dtype | None = None  # None: no weight
    eps: float | None = EPS
    weight_offset: float = 0.0
    layout: Layout = contiguous
    grad_layout: Layout = contiguous
    has_residual: bool = False
    group_dims: int = 0
    ones: tuple[int, ...] = ()
    """The dimensions of the weight that are 1, over which it broadcasts."""

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.normalized_dims :]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        of_input = self.shape[len(self.shape) - self.normalized_dims - self.group_dims :]
        return tuple(1 if dim in self.ones else size for dim, size in enumerate(of_input))

    def input(self) -> Tensor:
        return self.layout(self.shape, self.dtype, 1)

    def grad_output(self) -> Tensor:
        return self.grad_layout(self.shape, self.dtype, 2)

    def weight(self) -> Tensor | None:
        if self.weight_dtype is None:
            return None
        return (values(self.weight_shape, torch.float64, 3, scale=0.5) + 1 - self.weight_offset).to(self.weight_dtype)

    def grad_residual(self) -> Tensor | None:
        return self.grad_layout(self.shape, self.dtype, 4) if self.has_residual else None

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), short(self.dtype), f"w:{short(self.weight_dtype)}"]
        parts += [f"{self.normalized_dims}d"] if self.normalized_dims != 1 else []
        parts += [f"{self.group_dims}g"] if self.group_dims else []
        parts += [f"1@{dim}" for dim in self.ones]
        parts += [f"eps:{self.eps}"] if self.eps != EPS else []
        parts += [f"offset:{self.weight_offset}"] if self.weight_offset else []
        parts += [self.layout.__name__, f"dy:{self.grad_layout.__name__}"]
        parts += ["residual"] if self.has_residual else []
        return "-".join(parts)


def short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes() -> Iterator[Case]:
    dtypes = cycle(DTYPES)
    for cols in (0, 1, 5, 63, 64, 769, 1025, 4096):
        for rows in (0, 1, 3, 4, 7, 37):
            yield Case((rows, cols), dtype := next(dtypes), weight_dtype=dtype)
        next(dtypes)  # so that a number of rows has another dtype with the next width
    for dtype in DTYPES:
        yield Case((2, 65537), dtype, weight_dtype=dtype)
        yield Case((7, 9001), dtype, weight_dtype=dtype)
        for cols in (8192, 16384):
            yield Case((4, cols), dtype, weight_dtype=dtype)
        yield Case((1500, 8), dtype, weight_dtype=dtype)


def _dtypes() -> Iterator[Case]:
    for dtype in DTYPES:
        for weight_dtype in (None, *DTYPES):
            for weight_offset in (0.0, 1.0):
                for cols in (77, 80):  # 80: a multiple of the weight elements that a kernel loads at once
                    yield Case((5, cols), dtype, 1, weight_dtype, weight_offset=weight_offset, has_residual=True)


def _layouts() -> Iterator[Case]:
    """Yields every pair of layouts, and every layout in every dtype."""
    for row, layout in enumerate(LAYOUTS):
        for column, grad_layout in enumerate(LAYOUTS):
            # Not in step with the index of the case, by which tests choose other parameters.
            dtype = DTYPES[(row + column // 2) % len(DTYPES)]
            yield Case((2, 3, 4, 36), dtype, 1, torch.float32, EPS, 0.0, layout, grad_layout, True)


def _shapes() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for layout in (contiguous, transposed, strided_columns, expanded):
            yield Case((3, 2, 5, 4), dtype, 2, dtype, layout=layout, grad_layout=layout)
            yield Case((3, 2, 5, 4), dtype, 3, dtype, layout=layout)
        yield Case((3, 5, 4), dtype, 3, dtype)
        yield Case((19,), dtype, 1, dtype)
        for dims in (3, 8, 9, 11):  # a row layout holds 8 dimensions
            yield Case((2,) * dims + (3,), dtype, 1, dtype, layout=reversed_rows, grad_layout=transposed)
        yield Case((6, 50), dtype, 1, dtype, eps=None)
        yield Case((6, 50), dtype, 1, dtype, eps=0.0)


def _groups() -> Iterator[Case]:
    group_dims = cycle((1, 2, 3, 1))  # four, so that each of nine layouts meets all of them in the four dtypes
    for dtype in DTYPES:
        for shape in ((37, 3, 5), (5, 11, 64), (3, 2, 769), (130, 8, 16), (0, 3, 8), (3, 0, 8), (2, 2, 9001)):
            yield Case(shape, dtype, 1, dtype, group_dims=1, has_residual=True)
        for layout in LAYOUTS:
            dims = next(group_dims)
            yield Case((5, 3, 4, 36), dtype, 1, torch.float32, EPS, 1.0, layout, layout, True, dims)
        yield Case((7, 3, 2, 5, 4), dtype, 2, torch.bfloat16, layout=transposed, group_dims=2)
        for number, (dims, ones) in enumerate(((3, (1, 2)), (3, (0, 2)), (3, (1,)), (2, (1,)), (1, (0,)), (3, ()))):
            layout, grad_layout = LAYOUTS[number], LAYOUTS[-1 - number]
            yield Case((5, 3, 4, 36), dtype, 1, torch.bfloat16, EPS, 1.0, layout, grad_layout, True, dims, ones)
        yield Case((3, 400, 70), dtype, 1, dtype, has_residual=True, group_dims=2, ones=(1,))
    for dims, ones in ((8, ()), (9, ()), (11, (0, 2, 4, 6, 8))):
        like = Case((2,) * dims + (3,), torch.float32, 1, torch.float32, layout=reversed_rows)
        yield like._replace(group_dims=dims - 2, ones=ones)


SIZES = tuple(_sizes())
CASES = (*SIZES, *_dtypes(), *_layouts(), *_shapes(), *_groups())

# A few of each kind, for tests that take long per case.
FEW_CASES = (
    Case((4, 8), torch.float32, 1, torch.float32),
    Case((4, 8), torch.float32, has_residual=True),
    Case((2, 3, 8), torch.bfloat16, 1, torch.float32, EPS, 1.0, transposed, expanded_scalar, True),
    Case((2, 3, 2, 8), torch.float16, 1, torch.float16, EPS, 0.0, qkv_slice, padded_rows),
    Case((3, 2, 4), torch.float64, 2, torch.float64, layout=strided_columns, has_residual=True),
    Case((0, 8), torch.float32, 1, torch.float32),
    Case((5, 3, 2, 8), torch.float32, 1, torch.bfloat16, EPS, 1.0, qkv_slice, transposed, True, 2),
    Case((3, 4, 8), torch.bfloat16, 1, torch.bfloat16, EPS, 1.0, contiguous, contiguous, True, 2, (1,)),
)
