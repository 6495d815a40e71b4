"""Tests that AOTAutograd traces only one fused operator forward and one backward, on every device."""

from typing import Any

import pytest
import torch
from graphs import assert_one_operator_each_way
from torch import Tensor
from traced_graphs import TracedGraphs, trace

from reference.cases import EPS, Case
from reference.operators import DIFFERENTIABLE, Variant, named, of_argument, other_dtypes, variants


@pytest.mark.parametrize(
    ("has_weight", "groups", "dynamic"),
    [
        (True, 0, False),
        pytest.param(True, 1, True, marks=pytest.mark.full),
        pytest.param(False, 0, True, marks=pytest.mark.release),
    ],
)
@pytest.mark.parametrize("variant", variants(DIFFERENTIABLE), ids=str)
def test_one_forward_one_backward(variant: Variant, has_weight: bool, groups: int, dynamic: bool, device: str) -> None:
    operator, function = variant.operator, variant.operator.function
    assert function is not None
    assert operator.gradient is not None
    weight_dtype = torch.float32 if has_weight else None
    of_rows = Case((6, 3, 16), torch.bfloat16, 1, weight_dtype, EPS, 0.5, has_residual=True, group_dims=groups)
    for dtypes in ({}, *other_dtypes(operator, torch.bfloat16)):

        def traced(device: str, dtypes: dict[str, torch.dtype] = dtypes) -> TracedGraphs:
            arguments = variant.at(of_rows, dtypes).arguments(device)
            tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
            leaves = [tensor.requires_grad_(name not in operator.tables) for name, tensor in tensors.items()]

            def call(*changed: Tensor) -> Any:
                return function(**arguments | dict(zip(tensors, changed, strict=True)))

            return trace(call, *leaves, dynamic=dynamic)

        # A gradient that inputs share, or that is the output's gradient, is converted if the dtypes differ.
        given = {of_argument(name) for name in named(operator.gradient).outputs} - ({"bias"} if not groups else set())
        is_shared = not {*operator.inputs} <= given.union(operator.tables)
        scaled = ["aten.mul.Scalar"] if variant.flags.get("alpha", 1.0) != 1.0 else []
        assert_one_operator_each_way(
            traced,
            device,
            f"normops.{operator}.default",
            f"normops.{operator.gradient}.default",
            others=[*scaled, *(["aten._to_copy.default"] if dtypes and is_shared else [])],
        )
