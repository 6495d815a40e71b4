"""Tests that real and fake kernels return the same strides, also in dimensions of size 1 and 0."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from reference.operators import OPERATORS, Operator, table_shape

SIZES = tuple(product((0, 1, 2), (0, 1, 2), (0, 1, 2, 8)))
CHANNEL_OPERATORS = (torch.ops.normops.channel_rms_norm, torch.ops.normops.channel_rms_norm_backward)


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Returns tensors of this shape: contiguous, with other strides in dimensions of size 1, and permuted."""
    contiguous = torch.randn(shape)
    odd = [7 if size == 1 else stride for size, stride in zip(shape, contiguous.stride(), strict=True)]
    found = [contiguous, torch.randn(512).as_strided(shape, odd)]
    found += [torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))]
    if len(shape) == 4:
        found.append(contiguous.to(memory_format=torch.channels_last))
    return found


def strides_of(results: Any) -> list[tuple[int, ...]]:
    return [result.stride() for result in (results if isinstance(results, tuple) else (results,))]


def assert_same_strides(overload: Any, **arguments: Any) -> None:
    """Compares the strides of real outputs with those of fake ones and of the device meta."""
    actual = strides_of(overload(**arguments))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in arguments.items()}
        assert actual == strides_of(overload(**fake)), arguments
    on_meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in arguments.items()}
    assert actual == strides_of(overload(**on_meta)), arguments


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_rows(operator: Operator) -> None:
    flags = operator.flags[0]
    for shape in SIZES:
        if operator.tables and shape[-1] % 2:
            continue
        for index, input in enumerate(layouts(shape)):
            others = {name: layouts(operator.shape_of(name, shape, flags))[index] for name in operator.tensors}
            tables = {name: torch.randn(table_shape(shape, flags)) for name in operator.tables}
            weight = torch.randn(shape[-1:])
            arguments = {"input": input, "normalized_shape": shape[-1:], "weight": weight, "row_size": 8}
            assert_same_strides(operator.default, **operator.given({**arguments, **others, **tables, **flags}))


def test_gradient_of_full_size_bias() -> None:
    for shape in SIZES:
        for grad_output in layouts(shape):
            arguments = {"grad_output": grad_output, "input": torch.randn(shape), "normalized_shape": shape[-1:]}
            for bias in (torch.randn(shape), torch.randn(shape[-1:])):
                overload = torch.ops.normops.rms_norm_backward.default
                assert_same_strides(overload, **arguments, bias=bias, output_mask=[False, False, True])


@pytest.mark.parametrize("operator", CHANNEL_OPERATORS, ids=str)
@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_channels(operator: Any, activation: str) -> None:
    for shape in product((0, 1, 2), (1, 8), (0, 1, 3), (1, 3)):
        for input in layouts(shape):
            arguments = {"input": input, "normalized_shape": shape[1:2], "weight": torch.randn(shape[1])}
            arguments |= {"bias": torch.randn(shape[1]), "dim": -3, "activation": activation}
            if operator is CHANNEL_OPERATORS[1]:
                arguments["grad_output"] = input
            assert_same_strides(operator.default, **arguments)
