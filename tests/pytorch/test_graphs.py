"""Tests that AOTAutograd traces only one fused operator forward and one backward, on every device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_same_bits
from graphs import assert_one_operator_each_way
from sampling import marked
from torch import Tensor
from traced_graphs import TracedGraphs, operators, trace

from reference.cases import EPS, Case
from reference.operators import DIFFERENTIABLE, OperatorCase, Variant, named, of_argument, other_dtypes, variants

differentiable = pytest.mark.parametrize("variant", variants(DIFFERENTIABLE), ids=str)


def as_function(case: OperatorCase, device: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns the call as a function of its tensors, and the tensors, which require gradients if possible."""
    function, arguments = case.operator.function, case.arguments(device)
    assert function is not None
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}

    def call(*given: Tensor) -> Any:
        return function(**dict(zip(tensors, given, strict=True)), **others)

    return call, [tensor.requires_grad_(name not in case.operator.tables) for name, tensor in tensors.items()]


@pytest.mark.parametrize(
    ("has_weight", "groups", "dynamic"),
    [(True, 0, False), *marked(pytest.mark.full, [(False, 0, True), (True, 1, False)])],
)
@differentiable
def test_one_forward_one_backward(variant: Variant, has_weight: bool, groups: int, dynamic: bool, device: str) -> None:
    operator = variant.operator
    assert operator.gradient is not None
    weight_dtype = torch.float32 if has_weight else None
    of_rows = Case((6, 3, 16), torch.bfloat16, 1, weight_dtype, EPS, 0.5, has_residual=True, group_dims=groups)
    for dtypes in ({}, *other_dtypes(operator, torch.bfloat16)):

        def traced(device: str, dtypes: dict[str, torch.dtype] = dtypes) -> TracedGraphs:
            call, tensors = as_function(variant.at(of_rows, dtypes), device)
            return trace(call, *tensors, dynamic=dynamic)

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


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.full)])
@differentiable
def test_exported_program_contains_only_the_operator(variant: Variant, strict: bool) -> None:
    call, tensors = as_function(variant.at(Case((3, 8), torch.float32, weight_dtype=torch.float32)), "cpu")

    class Norm(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return call(*tensors)

    program = torch.export.export(Norm(), tuple(tensors), strict=strict)
    for version in (program, program.run_decompositions()):
        ours = [name for name in operators(version.graph_module) if name.startswith("normops.")]
        assert ours == operators(version.graph_module) == [f"normops.{variant.operator}.default"]
        results = (variant.operator.results(norm(*tensors)) for norm in (version.module(), call))
        assert_same_bits(*results)
