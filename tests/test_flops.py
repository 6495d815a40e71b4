"""FlopCounterMode counts the operators by the formulas that normops.flops states."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import normops

ops = torch.ops.normops

SHAPE, COLS = (2, 3, 8), 8
ELEMENTS = 2 * 3 * 8


def counts(call: Callable[[], object]) -> dict[object, float]:
    """By operator, in operations per element."""
    with FlopCounterMode(display=False) as counter:
        call()
    return {op: count / ELEMENTS for op, count in counter.get_flop_counts().get("Global", {}).items()}


@pytest.mark.parametrize(
    ("has_weight", "needs_input", "needs_weight", "forward", "backward"),
    [
        (True, True, True, 4, 11),
        (True, True, False, 4, 8),
        (True, False, True, 4, 5),
        (False, True, False, 3, 7),
    ],
)
def test_forward_and_backward(
    has_weight: bool, needs_input: bool, needs_weight: bool, forward: int, backward: int
) -> None:
    x = torch.ones(SHAPE, requires_grad=needs_input)
    residual = torch.ones(SHAPE, requires_grad=needs_input)
    w = torch.ones(COLS, requires_grad=needs_weight) if has_weight else None

    def plain() -> None:
        normops.rms_norm(x, COLS, w).backward(torch.ones(SHAPE))

    def with_residual() -> None:
        torch.autograd.backward(normops.add_rms_norm(x, residual, COLS, w), [torch.ones(SHAPE)] * 2)

    assert counts(plain) == {ops.rms_norm: forward, ops.rms_norm_backward: backward}
    if needs_input:
        assert counts(with_residual) == {ops.add_rms_norm: forward + 1, ops.rms_norm_backward: backward + 1}


def test_operators_that_write() -> None:
    x, y, w = torch.ones(SHAPE), torch.ones(SHAPE), torch.ones(COLS)
    assert counts(lambda: ops.rms_norm.out(x, [COLS], weight=w, out=y)) == {ops.rms_norm: 4}
    assert counts(lambda: normops.rms_norm_(x, COLS)) == {ops.rms_norm_: 3}
    assert counts(lambda: normops.add_rms_norm_(x, y, COLS, w)) == {ops.add_rms_norm_: 5}
    dx, dw = torch.empty(SHAPE), torch.empty(COLS)
    backward = ops.rms_norm_backward.out
    assert counts(lambda: backward(y, x, [COLS], w, grad_input=dx, grad_weight=dw)) == {ops.rms_norm_backward: 11}


@pytest.mark.parametrize(("mask", "expected"), [([False, True], 5), ([True, False], 8), ([False, False], 0)])
def test_only_the_gradients_that_are_asked_for(mask: list[bool], expected: int) -> None:
    x, w = torch.ones(SHAPE), torch.ones(COLS)
    counted = counts(lambda: ops.rms_norm_backward(x, x, [COLS], w, output_mask=mask))
    assert counted == {ops.rms_norm_backward: expected}


def test_modules_and_compiled_graphs_are_counted() -> None:
    model = nn.Sequential(normops.RMSNorm(COLS), nn.Linear(COLS, COLS, bias=False))
    x = torch.ones(SHAPE)
    expected = {ops.rms_norm: 4, torch.ops.aten.mm: 2 * COLS}
    assert counts(lambda: model(x)) == expected
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    assert counts(lambda: compiled(x)) == expected
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_flop_counts()["Sequential.0"] == {ops.rms_norm: 4 * ELEMENTS}


def test_a_mode_sees_the_operator_whole() -> None:
    x = torch.ones(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output: Tensor = normops.rms_norm(x, COLS)
    assert set(counter.get_flop_counts()["Global"]) == {ops.rms_norm}
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "RmsNormBackward"


LATER = """
import sys, torch
heavy = {"torch.utils.flop_counter", "torch.nested._internal.ops"} - set(sys.modules)
import normops
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not {"normops.flops", "normops.nested"} & set(sys.modules)
from torch.utils.flop_counter import flop_registry
assert torch.ops.normops.rms_norm in flop_registry
"""

BEFORE = """
from torch.utils.flop_counter import flop_registry
import normops, torch
assert torch.ops.normops.rms_norm in flop_registry
"""


@pytest.mark.parametrize("program", [LATER, BEFORE], ids=["later", "before"])
def test_the_counter_may_be_imported(program: str) -> None:
    """Before normops or later; normops itself does not import it."""
    subprocess.run([sys.executable, "-c", program], check=True)
