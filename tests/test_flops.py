"""FlopCounterMode counts the operators by the formulas that normops.flops states."""

from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(
    ("activation", "norm_before_gate", "forward", "backward"),
    [("silu", True, 8, 18), ("silu", False, 8, 18), ("sigmoid", True, 7, 16), ("sigmoid", False, 7, 16)],
)
def test_gated(activation: Any, norm_before_gate: bool, forward: int, backward: int, has_weight: bool) -> None:
    x, gate = (torch.ones(SHAPE, requires_grad=True) for _ in range(2))
    w = torch.ones(COLS, requires_grad=True) if has_weight else None
    gating = {"activation": activation, "norm_before_gate": norm_before_gate}
    counted = counts(lambda: normops.gated_rms_norm(x, gate, COLS, w, **gating).backward(torch.ones(SHAPE)))
    # g = dy * w, the sum of grad_weight, and where the norm comes first, the norm for grad_gate
    of_weight = has_weight * (1 + 3 + norm_before_gate)
    assert counted == {
        ops.gated_rms_norm: forward + has_weight,
        ops.gated_rms_norm_backward: backward + of_weight,
    }


@pytest.mark.parametrize(
    ("mask", "norm_first", "gate_first"),
    [
        ([True, False, False], 2 + 6 + 4 + 1, 2 + 6 + 4 + 2),
        ([False, True, False], 2 + 4 + 5 + 2, 2 + 6 + 4 + 5 + 1),
        ([False, False, True], 2 + 3 + 4 + 1, 2 + 3 + 4 + 1),
        ([False, False, False], 0, 0),
    ],
)
def test_only_the_gradients_of_a_gated_norm_that_are_asked_for(
    mask: list[bool], norm_first: int, gate_first: int
) -> None:
    x, w = torch.ones(SHAPE), torch.ones(COLS)
    for norm_before_gate, expected in ((True, norm_first), (False, gate_first)):
        gating = {"norm_before_gate": norm_before_gate, "output_mask": mask}
        assert counts(lambda: ops.gated_rms_norm_backward(x, x, x, [COLS], w, **gating)) == {  # noqa: B023
            ops.gated_rms_norm_backward: expected
        }


def test_operators_that_write() -> None:
    x, y, w = torch.ones(SHAPE), torch.ones(SHAPE), torch.ones(COLS)
    assert counts(lambda: ops.rms_norm.out(x, [COLS], weight=w, out=y)) == {ops.rms_norm: 4}
    assert counts(lambda: normops.rms_norm_(x, COLS)) == {ops.rms_norm_: 3}
    assert counts(lambda: normops.add_rms_norm_(x, y, COLS, w)) == {ops.add_rms_norm_: 5}
    dx, dw = torch.empty(SHAPE), torch.empty(COLS)
    backward = ops.rms_norm_backward.out
    assert counts(lambda: backward(y, x, [COLS], w, grad_input=dx, grad_weight=dw)) == {ops.rms_norm_backward: 11}


@pytest.mark.parametrize(("rotary_dim", "per_element"), [(None, 3), (4, 1.5), (0, 0)])
def test_rotated(rotary_dim: int | None, per_element: float) -> None:
    x, w = torch.ones(SHAPE, requires_grad=True), torch.ones(COLS, requires_grad=True)
    table = torch.ones(COLS if rotary_dim is None else rotary_dim // 2)

    def call() -> None:
        normops.rms_norm_rope(x, table, table, COLS, w, rotary_dim=rotary_dim).backward(torch.ones(SHAPE))

    assert counts(call) == {ops.rms_norm_rope: 4 + per_element, ops.rms_norm_rope_backward: 11 + per_element}
    masked = counts(lambda: ops.rms_norm_rope_backward(x, x, table, table, [COLS], rotary_dim=rotary_dim))
    assert masked == {ops.rms_norm_rope_backward: 7 + per_element}
    nothing = {"rotary_dim": rotary_dim, "output_mask": [False, False]}
    assert counts(lambda: ops.rms_norm_rope_backward(x, x, table, table, [COLS], **nothing)) == {
        ops.rms_norm_rope_backward: 0
    }
    assert counts(lambda: normops.rms_norm_rope_(torch.ones(SHAPE), table, table, COLS, rotary_dim=rotary_dim)) == {
        ops.rms_norm_rope_: 3 + per_element
    }


def test_in_two_steps() -> None:
    """Together as many as of the norm, but for g, which is formed twice."""
    x, sums, norm = torch.ones(SHAPE), torch.ones(SHAPE[:-1]), {"normalized_shape": [COLS], "weight": torch.ones(COLS)}
    for op, expected, arguments in (
        (ops.rms_norm_from_stats, 2, (x, sums, COLS)),
        (ops.rms_norm_backward_stats, 5, (x, x)),
        (ops.rms_norm_backward_from_stats, 7, (x, x, sums, sums, COLS)),
    ):
        assert counts(lambda: op(*arguments, **norm)) == {op: expected}  # noqa: B023
    assert counts(lambda: ops.rms_norm_stats(x, [COLS])) == {ops.rms_norm_stats: 2}


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
