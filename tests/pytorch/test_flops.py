"""Tests that FlopCounterMode counts the operators by the formulas of normops.flops."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import normops
import normops.flops
from reference.cases import Case
from reference.operators import (
    ADD_RMS_NORM,
    GATED_RMS_NORM,
    GATED_RMS_NORM_BACKWARD,
    OPERATORS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    RMS_NORM_BACKWARD_FROM_STATS,
    RMS_NORM_BACKWARD_STATS,
    RMS_NORM_FROM_STATS,
    RMS_NORM_ROPE,
    RMS_NORM_ROPE_BACKWARD,
    RMS_NORM_STATS,
    Flags,
    Operator,
    Variant,
)

ops = torch.ops.normops

SHAPE, COLS = (2, 3, 8), 8
ELEMENTS = 2 * 3 * 8


def counts(call: Callable[[], object]) -> dict[object, float]:
    """Returns operations per element, by operator."""
    with FlopCounterMode(display=False) as counter:
        call()
    return {op: count / ELEMENTS for op, count in counter.get_flop_counts().get("Global", {}).items()}


def gating(activation: str, norm_before_gate: bool, **mask: list[bool]) -> Flags:
    return {"activation": activation, "norm_before_gate": norm_before_gate, **mask}


def wanting(*output_mask: bool) -> dict[str, list[bool]]:
    return {"output_mask": [*output_mask]}


# Counts with and without a weight. A residual and a bias each add one operation forward, and one backward.
COUNTS: tuple[tuple[Operator, Flags, tuple[float, float]], ...] = (
    (RMS_NORM, {}, (5, 4)),
    (ADD_RMS_NORM, {}, (5, 4)),
    (RMS_NORM_BACKWARD, {}, (13, 9)),
    (RMS_NORM_BACKWARD, wanting(True, False, False), (9, 8)),
    (RMS_NORM_BACKWARD, wanting(False, True, False), (5, 0)),
    (RMS_NORM_BACKWARD, wanting(False, False, True), (1, 1)),
    (RMS_NORM_BACKWARD, wanting(False, False, False), (0, 0)),
    *((GATED_RMS_NORM, gating("silu", first), (9, 8)) for first in (True, False)),
    *((GATED_RMS_NORM, gating("sigmoid", first), (8, 7)) for first in (True, False)),
    # g = dy * w, the sum of grad_weight, and the norm for grad_gate if the norm comes first
    *((GATED_RMS_NORM_BACKWARD, gating("silu", first), (18 + 1 + 3 + first, 18)) for first in (True, False)),
    *((GATED_RMS_NORM_BACKWARD, gating("sigmoid", first), (16 + 1 + 3 + first, 16)) for first in (True, False)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", True, **wanting(True, False, False)), (2 + 6 + 4 + 1, 12)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", True, **wanting(False, True, False)), (2 + 4 + 5 + 2, 12)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", True, **wanting(False, False, True)), (2 + 3 + 4 + 1, 0)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", False, **wanting(True, False, False)), (2 + 6 + 4 + 2, 13)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", False, **wanting(False, True, False)), (2 + 6 + 4 + 5 + 1, 17)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", False, **wanting(False, False, True)), (2 + 3 + 4 + 1, 0)),
    (GATED_RMS_NORM_BACKWARD, gating("silu", False, **wanting(False, False, False)), (0, 0)),
    *(
        (operator, {"rotary_dim": rotary_dim}, (with_weight + more, without + more))
        for operator, with_weight, without in ((RMS_NORM_ROPE, 4, 3), (RMS_NORM_ROPE_BACKWARD, 11, 7))
        for rotary_dim, more in ((None, 3), (4, 1.5), (0, 0))
    ),
    (RMS_NORM_ROPE_BACKWARD, wanting(False, False), (0, 0)),
    # Both steps together count the same as the norm, except that g is computed twice.
    (RMS_NORM_STATS, {}, (2, 2)),
    (RMS_NORM_FROM_STATS, {}, (2, 1)),
    (RMS_NORM_BACKWARD_STATS, {}, (5, 4)),
    (RMS_NORM_BACKWARD_FROM_STATS, {}, (8, 4)),
)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("operator", "flags", "expected"), COUNTS, ids=str)
def test_flops_of_operators(operator: Operator, flags: Flags, expected: tuple[float, float], has_weight: bool) -> None:
    """The out and in-place variants count the same."""
    like = Case(SHAPE, torch.float32, weight_dtype=torch.float32 if has_weight else None, has_residual=True)
    case, count = Variant(operator, flags).at(like), expected[not has_weight]
    assert counts(case.results) == {operator.packet: count}
    assert counts(lambda: operator.out(**case.arguments(), **case.targets())) == {operator.packet: count}
    if operator.inplace:
        assert counts(lambda: operator.inplace(**case.arguments())) == {getattr(ops, f"{operator}_"): count}


def test_every_operator_is_counted() -> None:
    assert {operator for operator, *_ in COUNTS} == {*OPERATORS}


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
