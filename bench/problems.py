"""Defines problems: an operator on one size, dtype and device, and the tensors that it reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.operators import MODULATIONS, TABLES, VECTORS, Operator, heads_of, samples_of

Tensors = Mapping[str, Tensor]

SHAPES = {
    "llama": ((512, 4096), (512, 8192), (2048, 5120), (4096, 4096)),
    "qk": ((8, 64), (1024, 64), (16384, 64), (16384, 128)),
    "wide": ((64, 16384), (8, 65536), (1, 1048576)),
    "decode": ((1, 64), (1, 4096), (8, 4096), (64, 4096), (512, 4096)),
}

# Tensors of FILL_BYTES, which no cache holds, with rows of these widths.
FILL = "fill"
FILL_BYTES = 512 << 20
FILL_COLS = tuple(64 << n for n in range(13))


@dataclass(frozen=True)
class Size:
    rows: int
    cols: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols} {dtype_name(self.dtype)}"

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.cols * self.dtype.itemsize


@dataclass(frozen=True)
class Problem:
    operator: Operator
    size: Size
    memory: str

    def __str__(self) -> str:
        return f"{self.operator.name} {self.size} {self.memory}"

    @property
    def bytes(self) -> int:
        """The bytes that must move, regardless of how the operator is computed."""
        return self.operator.elements(self.size.rows, self.size.cols) * self.size.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_shapes(name: str, itemsize: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of an argument of --shapes: a set's name, ``all`` or ROWSxCOLS."""
    if name == "all":
        return tuple(shape for shapes in SHAPES.values() for shape in shapes)
    if name == FILL:
        return tuple((FILL_BYTES // (cols * itemsize), cols) for cols in FILL_COLS)
    if name in SHAPES:
        return SHAPES[name]
    try:
        rows, cols = map(int, name.split("x"))
    except ValueError:
        raise ValueError(f"expected {', '.join(SHAPES)}, {FILL}, all or ROWSxCOLS, but got {name}") from None
    return ((rows, cols),)


def make_inputs(size: Size, names: Iterable[str], seed: int = 0) -> Tensors:
    generator = torch.Generator(size.device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=size.device).mul_(scale)

    def make(name: str) -> Tensor:
        if name in VECTORS:
            return random(size.cols, scale=0.1).add_(name == "weight")
        if name in MODULATIONS:
            return random(samples_of(size.rows), 1, size.cols, scale=0.1)
        if name in TABLES:
            tokens = size.rows // heads_of(size.rows)
            frequencies = 10000 ** -(torch.arange(size.cols, device=size.device) % -(-size.cols // 2) / size.cols * 2)
            angles = torch.outer(torch.arange(tokens, device=size.device), frequencies)
            return angles.cos() if name == "cos" else angles.sin()
        return random(size.rows, size.cols)

    return {name: make(name).to(size.dtype) for name in sorted(names)}
