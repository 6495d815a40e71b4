"""Tests in-place operators, whose results replace their inputs."""

from itertools import product

import pytest
import torch
from assertions import assert_same_bits, message_of
from sampling import pairwise
from torch import Tensor

from reference import cases
from reference.cases import Case
from reference.operators import OPERATORS, Operator, Variant, other_dtypes, variants

INPLACE = [operator for operator in OPERATORS if operator.inplace]
over_operators = pytest.mark.parametrize("operator", INPLACE, ids=str)

LAYOUTS = (
    cases.contiguous,
    cases.misaligned,
    cases.qkv_slice,
    cases.strided_columns,
    cases.transposed_columns,
)


@pairwise
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("variant", "cols"),
    [
        (variant, cols)
        for variant, cols in product(variants(INPLACE), (0, 1, 5, 64, 100, 40000))
        if variant.operator.takes(Case((cols,), torch.float32))
    ],
    ids=str,
)
@pytest.mark.triton_release
def test_results_replace_inputs(
    variant: Variant, cols: int, dtype: torch.dtype, layout: cases.Layout, device: str
) -> None:
    operator = variant.operator
    shape = (2, 3, 2, cols) if cols < 1000 else (1, 1, 2, cols)
    of_rows = Case(shape, dtype, 1, torch.float32, weight_offset=0.5, layout=layout, grad_layout=layout)
    for dtypes in ({}, *other_dtypes(operator, dtype)):
        case = variant.at(of_rows, dtypes)
        expected = case.results(device)
        for call in (operator.inplace, operator.inplace_function):
            arguments = case.arguments(device)
            replaced = [arguments[name] for name in operator.replaced]
            returned = call(**arguments)
            # The dispatcher cannot box an operator that returns several of its arguments.
            results = replaced if returned is None and call is operator.inplace else operator.results(returned)
            assert all(result is tensor for result, tensor in zip(results, replaced, strict=True))
            assert_same_bits(replaced, expected)


@over_operators
def test_invalid_targets_raise(operator: Operator, device: str) -> None:
    x = cases.values((3, 4), torch.float32).to(device)
    case = Variant(operator, {}).at(Case((3, 4), torch.float32, weight_dtype=torch.float32))

    def message(**changes: Tensor) -> str:
        text = message_of(lambda: operator.inplace_function(**case.arguments(device) | changes))
        return text.removeprefix(f"{operator}_: expected ")

    for replaced, target in zip(operator.replaced, operator.targets, strict=True):
        expanded = f"{replaced} to have no expanded dimension, but got strides [0, 1]"
        assert message(**{replaced: x[:1].expand(3, 4)}) == expanded
        overlap = f"{replaced} to be exactly weight or to share no memory with it, but got a partial overlap"
        if (target, "weight") in operator.never_over:
            overlap = f"{replaced} and weight to share no memory, but got an overlap"
        assert message(**{replaced: x, "weight": x[1]}) == overlap
        integers = f"{replaced} to be float16, bfloat16, float32 or float64, but got int32"
        assert message(**{replaced: x.int()}) == integers
        for other in operator.replaced:
            if other > replaced:
                shared = f"{replaced} and {other} to share no memory, but got an overlap"
                assert message(**{replaced: x, other: x}) == shared


@pytest.mark.parametrize("cols", [64, 100, 40000])
@over_operators
def test_weight_may_alias_input_of_a_single_row(operator: Operator, cols: int, device: str) -> None:
    """It may also alias any other input that is not written before the weight is read."""
    case = Variant(operator, {}).at(Case((cols,), torch.float32, weight_dtype=torch.float32))
    for replaced, target in zip(operator.replaced, operator.targets, strict=True):
        arguments = case.arguments(device)
        arguments["weight"] = arguments[replaced]
        if (target, "weight") in operator.never_over:
            expected = f"{operator}_: expected {replaced} and weight to share no memory, but got an overlap"
            assert message_of(lambda: operator.inplace(**arguments)) == expected  # noqa: B023
        else:
            results = operator.call(**arguments)
            operator.inplace(**arguments)
            assert_same_bits([arguments[name] for name in operator.replaced], results)
