"""Tests that functions bypass torch.ops, unless a call must be intercepted."""

from typing import Any

import pytest
import torch
from assertions import assert_same_bits
from torch import Tensor

from normops import _C
from reference.cases import Case
from reference.operators import DIFFERENTIABLE, Operator, OperatorCase

over_operators = pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)


class Logged(Tensor):
    calls: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def arguments_of(operator: Operator) -> dict[str, Any]:
    case = Case((3, 8), torch.float32, weight_dtype=torch.float32, has_residual=True)
    return OperatorCase(operator, case, operator.flags[0], {}).arguments()


def goes_direct(operator: Operator, *arguments: object) -> bool:
    return getattr(_C, operator.name)(*arguments) is not NotImplemented


def others_of(value: object) -> tuple[object, ...]:
    """Returns values that are not exactly of the type of an argument."""
    match value:
        case Tensor():
            return 8, value.as_subclass(Logged)
        case bool():
            return 1, None
        case float():
            return True, 2**70
        case int():
            return None, True, 8.0
        case None:  # rotary_dim
            return 8.0, 2**70
        case str():
            return None, b"silu", "\udc00"
    return True, "8"


@over_operators
def test_plain_arguments_bypass_torch_ops(operator: Operator) -> None:
    arguments = arguments_of(operator)
    for name, plain in (
        ("normalized_shape", 8),
        ("normalized_shape", [8]),
        ("weight", None),
        ("eps", None),
        ("eps", 1),
    ):
        assert goes_direct(operator, *(arguments | {name: plain}).values()), name
    assert not goes_direct(operator, *list(arguments.values())[:-1])
    for name, value in arguments.items():
        for other in others_of(value):
            assert not goes_direct(operator, *(arguments | {name: other}).values()), (name, other)


@over_operators
def test_subclasses_intercept_the_operator(operator: Operator) -> None:
    arguments, function = arguments_of(operator), operator.function
    assert function is not None
    expected = operator.results(function(**arguments))
    for name in operator.inputs:
        Logged.calls.clear()
        results = operator.results(function(**arguments | {name: arguments[name].as_subclass(Logged)}))
        assert {type(result) for result in results} == {Logged}
        assert {operator.packet, operator.default} & set(Logged.calls)
        assert_same_bits([result.as_subclass(Tensor) for result in results], expected)
