"""Tests tensors whose storage was freed, is too short, or is shared with a lazy clone: an error names the argument."""

from typing import Any

import pytest
import torch
from torch import Tensor

import normops
from reference.cases import Case, copy_of
from reference.operators import OPERATORS, Operator, OperatorCase

ROWS = Case((4, 3, 36), torch.float32, 1, torch.float32, has_residual=True)


def channel_arguments(**others: Any) -> dict[str, Any]:
    return {
        "input": torch.randn(2, 16, 5, 5),
        "normalized_shape": [16],
        "weight": torch.randn(16),
        "bias": torch.randn(16),
        "dim": -3,
        "activation": "silu",
        **others,
    }


def operator_calls() -> list[tuple[str, Any, dict[str, Any]]]:
    """Returns the name, the functional overload and the arguments of a call of every operator."""
    rows = [(str(each), each.default, OperatorCase(each, ROWS, each.flags[0], {}).arguments()) for each in OPERATORS]
    channels, backward = torch.ops.normops.channel_rms_norm, torch.ops.normops.channel_rms_norm_backward
    return [
        *rows,
        ("channel_rms_norm", channels.default, channel_arguments()),
        (
            "channel_rms_norm_backward",
            backward.default,
            channel_arguments(grad_output=torch.randn(2, 16, 5, 5)),
        ),
    ]


def tensors_of(overload: Any) -> list[str]:
    kinds = ("Tensor", "Optional[Tensor]")
    return [argument.name for argument in overload._schema.arguments if str(argument.type) in kinds]


CALLS = operator_calls()
TENSORS = [(name, tensor) for name, overload, arguments in CALLS for tensor in tensors_of(overload)]


def copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: copy_of(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def with_storage(tensor: Tensor, elements: int) -> Tensor:
    """Returns the tensor, whose storage keeps only the first elements."""
    tensor.untyped_storage().resize_(elements * tensor.itemsize)
    return tensor


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
@pytest.mark.parametrize("is_freed", [True, False], ids=["freed", "short"])
def test_argument_without_memory_is_an_error(name: str, tensor: str, is_freed: bool) -> None:
    ((overload, given),) = ((overload, arguments) for other, overload, arguments in CALLS if other == name)
    arguments = copies(given)
    if arguments[tensor] is None:
        pytest.skip("not an argument of the case")
    elements = arguments[tensor].untyped_storage().nbytes() // arguments[tensor].itemsize
    arguments[tensor] = with_storage(arguments[tensor], 0 if is_freed else elements - 1)
    got = "0: it was freed" if is_freed else rf"{(elements - 1) * arguments[tensor].itemsize}$"
    message = rf"{name}: expected the storage of {tensor} to have at least {elements * given[tensor].itemsize} bytes"
    with pytest.raises(RuntimeError, match=rf"{message}, which its sizes, strides and offset reach, but got {got}"):
        overload(**arguments)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_target_without_memory_is_an_error(operator: Operator) -> None:
    case = OperatorCase(operator, ROWS, operator.flags[0], {})
    for name in operator.targets:
        targets = case.targets()
        if targets[name].numel() == 0:
            continue
        targets[name] = with_storage(copy_of(targets[name]), 0)
        with pytest.raises(RuntimeError, match=f"{operator}: expected the storage of {name} to have at least"):
            operator.out(**case.arguments(), **targets)


def test_module_whose_parameters_are_freed() -> None:
    """FSDP frees the storages of gathered parameters."""
    module = normops.RMSNorm(24)
    module.weight.untyped_storage().resize_(0)
    for call in (module, torch.no_grad()(module)):
        with pytest.raises(RuntimeError, match="rms_norm: expected the storage of weight to have at least 96 bytes"):
            call(torch.randn(2, 24))


def test_freed_weight_before_backward() -> None:
    weight = torch.randn(24, requires_grad=True)
    output = normops.rms_norm(torch.randn(2, 24, requires_grad=True), 24, weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="rms_norm_backward: expected the storage of weight"):
        output.sum().backward()


def test_empty_tensors_need_no_storage() -> None:
    empty = with_storage(torch.randn(0, 24), 0)
    assert normops.rms_norm(empty, 24, torch.randn(24)).shape == (0, 24)


def test_declined_calls_check_memory() -> None:
    """The definition computes channels with few positions."""
    arguments = channel_arguments(input=torch.randn(2, 16, 2, 2))
    with_storage(arguments["weight"], 0)
    with pytest.raises(RuntimeError, match="channel_rms_norm: expected the storage of weight"):
        torch.ops.normops.channel_rms_norm(**arguments)


def lazy_clone() -> tuple[Tensor, Tensor]:
    original = torch.randn(2, 16, 5, 5)
    return original, torch._lazy_clone(original)


def test_lazy_clones_are_copied_before_writes() -> None:
    """Writes to a lazy clone leave the original unchanged, for every operator over channels."""
    functions = torch.ops.normops
    arguments = channel_arguments(activation="identity")
    expected = functions.channel_rms_norm(**arguments)

    original, target = lazy_clone()
    before = original.clone()
    functions.channel_rms_norm.out(**arguments, out=target)
    assert torch.equal(original, before)
    assert torch.equal(target, expected)

    original, target = lazy_clone()
    before = original.clone()
    functions.channel_rms_norm_(**arguments | {"input": target})
    assert torch.equal(original, before)
    assert torch.equal(target, functions.channel_rms_norm(**arguments | {"input": before}))

    original, target = lazy_clone()
    before, weight = original.clone(), torch._lazy_clone(arguments["weight"])
    gradients = {"grad_input": target, "grad_weight": weight, "grad_bias": torch.empty(16)}
    functions.channel_rms_norm_backward.out(**arguments, grad_output=torch.randn(2, 16, 5, 5), **gradients)
    assert torch.equal(original, before)
    assert not torch.equal(weight, arguments["weight"])
