"""Tensors with more elements than a 32-bit integer counts."""

import pytest
import torch

from reference import cases, oracle
from reference.cases import on

ops = torch.ops.normops

COLS = 2**20
ROWS = 2**11 + 1  # 2^31 + 2^20 elements, of which one row is stored


@pytest.mark.full
def test_forward(device: str) -> None:
    row = cases.values((1, COLS), torch.bfloat16, 1)
    output = ops.rms_norm(on(device, row.expand(ROWS, COLS)), (COLS,), None, cases.EPS)
    oracle.assert_within(output[-1:], oracle.rms_norm(row, (COLS,), None, cases.EPS))
    assert torch.equal(output[0], output[-1])


def test_backward(device: str) -> None:
    row, gradient = cases.values((1, COLS), torch.bfloat16, 1), cases.values((1, COLS), torch.bfloat16, 2)
    grad_input, _ = ops.rms_norm_backward(
        on(device, gradient.expand(ROWS, COLS)), on(device, row.expand(ROWS, COLS)), (COLS,), None, cases.EPS
    )
    expected = oracle.rms_norm_backward(gradient, row, (COLS,), None, cases.EPS)
    oracle.assert_within(grad_input[-1:], expected.grad_input, "grad_input")
    assert torch.equal(grad_input[0], grad_input[-1])


@pytest.mark.release  # writes 8 GB, by what shares its rows with test_forward
def test_add(device: str) -> None:
    row, residual = cases.values((1, COLS), torch.bfloat16, 1), cases.values((1, COLS), torch.bfloat16, 2)
    output, residual_out = ops.add_rms_norm(
        on(device, row.expand(ROWS, COLS)), on(device, residual.expand(ROWS, COLS)), (COLS,), None, cases.EPS
    )
    assert torch.equal(residual_out[-1:].cpu(), row + residual)
    oracle.assert_within(output[-1:], oracle.rms_norm(row + residual, (COLS,), None, cases.EPS))
    assert torch.equal(output[0], output[-1])


@pytest.mark.release  # as test_add
def test_gated(device: str) -> None:
    row, gate = cases.values((1, COLS), torch.bfloat16, 1), cases.values((1, COLS), torch.bfloat16, 2)
    output = ops.gated_rms_norm(
        on(device, row.expand(ROWS, COLS)), on(device, gate.expand(ROWS, COLS)), (COLS,), None, cases.EPS
    )
    oracle.assert_within(output[-1:], oracle.gated_rms_norm(row, gate, (COLS,), None, cases.EPS))
    assert torch.equal(output[0], output[-1])


@pytest.mark.release  # as test_add
def test_rotated(device: str) -> None:
    row, cos, sin = (cases.values((1, COLS), torch.bfloat16, seed) for seed in range(3))
    output = ops.rms_norm_rope(
        on(device, row.expand(ROWS, COLS)), on(device, cos), on(device, sin), (COLS,), None, cases.EPS
    )
    oracle.assert_within(output[-1:], oracle.rms_norm_rope(row, cos, sin, (COLS,), None, cases.EPS))
    assert torch.equal(output[0], output[-1])
