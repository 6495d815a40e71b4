"""A wrong call gives one message, which names the argument, what was expected and what came, in every mode."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import normops
from normops import _C

ops = torch.ops.normops

Arguments = dict[str, Any]


def forward_arguments(**changes: object) -> Arguments:
    return {"input": torch.ones(2, 3, 4), "normalized_shape": [4], "weight": torch.ones(4), "eps": 1e-5} | changes


def backward_arguments(**changes: object) -> Arguments:
    return forward_arguments(grad_output=torch.ones(2, 3, 4), grad_residual=torch.ones(2, 3, 4)) | changes


WEIGHT = (
    "expected weight to have shape [4], the normalized_shape, or more of the last dimensions of input, whose shape is "
    "[2, 3, 4]"
)
COMMON: list[tuple[Arguments, str]] = [
    (
        {"weight": torch.ones(5)},
        f"{WEIGHT}, but got [5]",
    ),
    (
        {"weight": torch.ones(1, 4)},
        f"{WEIGHT}, but got [1, 4]",
    ),
    (
        {"weight": torch.ones(1, 2, 3, 4)},
        f"{WEIGHT}, but got [1, 2, 3, 4]",
    ),
    (
        {"weight": torch.ones(4), "normalized_shape": [3, 4]},
        "expected weight to have shape [3, 4], the normalized_shape, or more of the last dimensions of input, whose "
        "shape is [2, 3, 4], but got [4]",
    ),
    (
        {"weight": torch.ones(4), "normalized_shape": [2, 3, 4]},
        "expected weight to have shape [2, 3, 4], the normalized_shape, but got [4]",
    ),
    (
        {"normalized_shape": [5], "weight": None},
        "expected normalized_shape to be the last dimensions of input, whose shape is [2, 3, 4], but got [5]",
    ),
    (
        {"normalized_shape": [1, 2, 3, 4], "weight": None},
        "expected normalized_shape to be the last dimensions of input, whose shape is [2, 3, 4], but got [1, 2, 3, 4]",
    ),
    (
        {"normalized_shape": [], "weight": None},
        "expected normalized_shape to have at least one dimension, but got []",
    ),
    (
        {"weight": torch.ones(4, dtype=torch.int32)},
        "expected weight to be float16, bfloat16, float32 or float64, but got int32",
    ),
    ({"eps": float("nan")}, "expected eps to be a number, but got nan"),
    (
        {"weight": torch.ones(4, device="meta")},
        "expected weight to be on cpu, the device of input, but got meta",
    ),
]

FORWARD: list[tuple[Arguments, str]] = [
    *COMMON,
    (
        {"input": torch.ones(2, 3, 4, dtype=torch.int64)},
        "expected input to be float16, bfloat16, float32 or float64, but got int64",
    ),
    (
        {"input": torch.ones(2, 3, 4, dtype=torch.complex64)},
        "expected input to be float16, bfloat16, float32 or float64, but got complex64",
    ),
    (
        {"input": torch.ones(2, 3, 4, dtype=torch.float8_e4m3fn)},
        "expected input to be float16, bfloat16, float32 or float64, but got float8_e4m3fn",
    ),
]

BACKWARD: list[tuple[Arguments, str]] = [
    *COMMON,
    (
        {"grad_output": torch.ones(2, 4, 4)},
        "expected grad_output to have shape [2, 3, 4], the shape of input, but got [2, 4, 4]",
    ),
    (
        {"grad_output": torch.ones(3, 4)},
        "expected grad_output to have shape [2, 3, 4], the shape of input, but got [3, 4]",
    ),
    (
        {"grad_output": torch.ones(2, 3, 4, dtype=torch.float64)},
        "expected grad_output to be float32, the dtype of input, or float16 or bfloat16, but got float64",
    ),
    (
        {"grad_output": torch.ones(2, 3, 4, device="meta")},
        "expected grad_output to be on cpu, the device of input, but got meta",
    ),
    (
        {"grad_residual": torch.ones(2, 3, 5)},
        "expected grad_residual to have shape [2, 3, 4], the shape of input, but got [2, 3, 5]",
    ),
    (
        {"grad_residual": torch.ones(2, 3, 4, dtype=torch.bfloat16)},
        "expected grad_residual to be float32, the dtype of input, but got bfloat16",
    ),
]


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def as_fake(mode: FakeTensorMode, arguments: Arguments) -> Arguments:
    return {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def assert_same_everywhere(op: Callable[..., object], arguments: Arguments, expected: str) -> None:
    assert message_of(lambda: op(**arguments)).splitlines()[0] == expected
    with torch.inference_mode():
        assert message_of(lambda: op(**arguments)).splitlines()[0] == expected
    with FakeTensorMode() as mode:
        assert message_of(lambda: op(**as_fake(mode, arguments))).splitlines()[0] == expected
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: op(**kwargs), backend="aot_eager", fullgraph=True)
    assert expected in message_of(lambda: compiled(arguments))


@pytest.mark.parametrize(("changes", "expected"), FORWARD, ids=lambda p: p if isinstance(p, str) else "")
def test_forward(changes: Arguments, expected: str) -> None:
    assert_same_everywhere(ops.rms_norm, forward_arguments(**changes), f"rms_norm: {expected}")


@pytest.mark.parametrize(("changes", "expected"), BACKWARD, ids=lambda p: p if isinstance(p, str) else "")
def test_backward(changes: Arguments, expected: str) -> None:
    assert_same_everywhere(ops.rms_norm_backward, backward_arguments(**changes), f"rms_norm_backward: {expected}")


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse(layout: str) -> None:
    sparse = torch.ones(3, 4).to_sparse() if layout == "coo" else torch.ones(3, 4).to_sparse_csr()
    name = {"coo": "Sparse", "csr": "SparseCsr"}[layout]
    expected = f"rms_norm: expected input to be a dense (strided) tensor, but got layout {name}"
    assert message_of(lambda: ops.rms_norm(sparse, [4])).splitlines()[0] == expected
    with torch.inference_mode():
        assert message_of(lambda: ops.rms_norm(sparse, [4])).splitlines()[0] == expected


def test_the_checks_alone() -> None:
    for changes, expected in FORWARD:
        arguments = forward_arguments(**changes)
        assert message_of(partial(_C.check_rms_norm, **arguments)).splitlines()[0] == f"rms_norm: {expected}"
    for changes, expected in BACKWARD:
        arguments = backward_arguments(**changes)
        message = message_of(partial(_C.check_rms_norm_backward, **arguments)).splitlines()[0]
        assert message == f"rms_norm_backward: {expected}"


@pytest.mark.parametrize(("changes", "expected"), FORWARD, ids=lambda p: p if isinstance(p, str) else "")
def test_function(changes: Arguments, expected: str) -> None:
    """normops.rms_norm calls the operator past torch.ops where it can."""
    assert_same_everywhere(normops.rms_norm, forward_arguments(**changes), f"rms_norm: {expected}")


def test_arguments_of_another_type_are_told_by_the_schema() -> None:
    x = torch.ones(2, 4)
    for arguments in ((x.tolist(), 4), (x, "4"), (x, 4.0), (x, (4, None)), (x, 4, 1.0), (x, 4, None, "1e-5")):
        with pytest.raises((RuntimeError, TypeError), match="rms_norm"):
            normops.rms_norm(*arguments)
    with pytest.raises((RuntimeError, OverflowError)):
        normops.rms_norm(x, 2**70)


def test_function_and_module_pass_the_message_on() -> None:
    expected = (
        "rms_norm: expected normalized_shape to be the last dimensions of input, whose shape is [2, 5], but got [4]"
    )
    assert message_of(lambda: normops.rms_norm(torch.ones(2, 5), 4)).splitlines()[0] == expected
    assert message_of(lambda: normops.RMSNorm(4)(torch.ones(2, 5))).splitlines()[0] == expected


def test_symbolic_width_against_a_weight_of_another() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, [x.shape[-1]], w), backend="aot_eager", dynamic=True)
    compiled(torch.ones(3, 8), torch.ones(8))
    assert "expected weight to have shape" in message_of(lambda: compiled(torch.ones(3, 9), torch.ones(7)))
