"""Tests tensors whose storage was freed, is too short, or is shared with a lazy clone: an error names the argument."""

from typing import Any

import channels
import pytest
import torch
from torch import Tensor

import normops
from reference.cases import Case, copy_of
from reference.operators import OPERATORS, Operator, OperatorCase

ops = torch.ops.normops

ROWS = Case((4, 3, 36), torch.float32, 1, torch.float32, has_residual=True)
IMAGE = (2, 16, 5, 5)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{str(each): (each.default, OperatorCase(each, ROWS, each.flags[0], {}).arguments()) for each in OPERATORS},
    "channel_rms_norm": (ops.channel_rms_norm.default, channels.arguments(IMAGE, torch.float32)),
    "channel_rms_norm_backward": (
        ops.channel_rms_norm_backward.default,
        channels.arguments(IMAGE, torch.float32) | {"grad_output": torch.randn(IMAGE)},
    ),
}
TENSORS = [
    (name, tensor)
    for name, (_, arguments) in CALLS.items()
    for tensor, value in arguments.items()
    if isinstance(value, Tensor)
]


def with_storage(tensor: Tensor, elements: int) -> Tensor:
    """Returns the tensor, whose storage keeps only the first elements."""
    tensor.untyped_storage().resize_(elements * tensor.itemsize)
    return tensor


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
@pytest.mark.parametrize("is_freed", [True, False], ids=["freed", "short"])
def test_argument_without_memory_is_an_error(name: str, tensor: str, is_freed: bool) -> None:
    overload, arguments = CALLS[name]
    copied = copy_of(arguments[tensor])
    size = copied.untyped_storage().nbytes()
    short = with_storage(copied, 0 if is_freed else size // copied.itemsize - 1)
    got = "0: it was freed" if is_freed else rf"{size - copied.itemsize}$"
    message = rf"{name}: expected the storage of {tensor} to have at least {size} bytes"
    with pytest.raises(RuntimeError, match=rf"{message}, which its sizes, strides and offset reach, but got {got}"):
        overload(**arguments | {tensor: short})


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
    arguments = channels.arguments((2, 16, 2, 2), torch.float32)
    with_storage(arguments["weight"], 0)
    with pytest.raises(RuntimeError, match="channel_rms_norm: expected the storage of weight"):
        ops.channel_rms_norm(**arguments)


@pytest.mark.parametrize("way", ["out", "in place", "backward"])
def test_lazy_clones_are_copied_before_writes(way: str) -> None:
    """Writes to a lazy clone leave the original unchanged, for every operator over channels."""
    original, arguments = torch.randn(IMAGE), channels.arguments(IMAGE, torch.float32)
    before, target = original.clone(), torch._lazy_clone(original)
    if way == "out":
        expected = ops.channel_rms_norm(**arguments)
        ops.channel_rms_norm.out(**arguments, out=target)
    elif way == "in place":
        expected = ops.channel_rms_norm(**arguments | {"input": before})
        ops.channel_rms_norm_(**arguments | {"input": target})
    else:
        arguments["grad_output"], weight = torch.randn(IMAGE), torch._lazy_clone(arguments["weight"])
        expected, expected_weight, _ = ops.channel_rms_norm_backward(**arguments)
        gradients = {"grad_input": target, "grad_weight": weight, "grad_bias": torch.empty(16)}
        ops.channel_rms_norm_backward.out(**arguments, **gradients)
        assert torch.equal(weight, expected_weight)
        assert not torch.equal(weight, arguments["weight"])
    assert torch.equal(original, before)
    assert torch.equal(target, expected)
