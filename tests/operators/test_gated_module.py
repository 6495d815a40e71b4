"""Tests that normops.GatedRMSNorm calls the operator, with the state of other libraries' gated norms."""

from typing import Any

import pytest
import torch
from torch import Tensor

import normops
from reference import cases


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns input and gate as slices of one projection."""
    x, gate = cases.values((*shape[:-1], 2 * shape[-1]), dtype, scale=2.0).chunk(2, dim=-1)
    return x, gate


def module(**options: Any) -> normops.GatedRMSNorm:
    norm = normops.GatedRMSNorm(8, 1e-3, weight_offset=1.0, **options)
    norm.weight.data.copy_(cases.values((8,), torch.float32, 3))
    return norm


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 8, 4, 1])
def test_arguments_reach_the_operator(group_size: int | None, norm_before_gate: bool, activation: Any) -> None:
    options: dict[str, Any] = {"activation": activation, "norm_before_gate": norm_before_gate}
    norm, size = module(group_size=group_size, **options), group_size or 8
    x, gate = inputs(2, 3, 8)
    a, b, weight = (tensor.unflatten(-1, (-1, size)) for tensor in (x, gate, norm.weight))
    expected = normops.gated_rms_norm(a, b, size, weight, 1e-3, weight_offset=1.0, **options).flatten(-2)
    assert torch.equal(norm(x, gate), expected)
    assert torch.equal(norm(input=x, gate=gate), expected)


def test_several_dimensions() -> None:
    norm = normops.GatedRMSNorm((3, 8), 1e-3)
    assert norm.weight.shape == (3, 8)
    x, gate = inputs(2, 3, 8)
    assert torch.equal(norm(x, gate), normops.gated_rms_norm(x, gate, (3, 8), norm.weight, 1e-3))


def test_repr() -> None:
    assert repr(normops.GatedRMSNorm(8)) == (
        "GatedRMSNorm((8,), eps=1e-05, elementwise_affine=True, activation=silu, norm_before_gate=True)"
    )
    assert repr(module(activation="sigmoid", norm_before_gate=False, group_size=4)) == (
        "GatedRMSNorm((8,), eps=0.001, elementwise_affine=True, weight_offset=1.0, group_size=4, "
        "activation=sigmoid, norm_before_gate=False)"
    )


def test_initial_weight_does_not_scale() -> None:
    x, gate = inputs(3, 8)
    for group_size in (None, 4):
        norm = normops.GatedRMSNorm(8, weight_offset=1.0, group_size=group_size)
        assert torch.equal(norm.weight, torch.zeros(8))
        assert torch.equal(norm(x, gate), normops.GatedRMSNorm(8, group_size=group_size)(x, gate))
        without = normops.GatedRMSNorm(8, elementwise_affine=False, group_size=group_size)
        assert without.weight is None
        assert without.state_dict() == {}
        assert torch.equal(norm(x, gate), without(x, gate))


@pytest.mark.parametrize(("shape", "group_size"), [((8,), 3), ((8,), 0), ((8,), -2), ((8,), 16), ((2, 8), 2)])
def test_indivisible_group_size_raises(shape: tuple[int, ...], group_size: int) -> None:
    with pytest.raises(ValueError) as error:
        normops.GatedRMSNorm(shape, group_size=group_size)
    assert str(error.value) == (
        f"group_size: expected a divisor of one normalized dimension, but got {group_size} of {shape}"
    )


@pytest.mark.parametrize("group_size", [None, 4])
def test_compiled_and_exported(group_size: int | None) -> None:
    norm, (x, gate) = module(group_size=group_size), inputs(3, 8)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, gate), norm(x, gate))
    rows = torch.export.Dim("rows")
    program = torch.export.export(norm, (x, gate), dynamic_shapes={"input": {0: rows}, "gate": {0: rows}})
    assert torch.equal(program.module()(x[:2], gate[:2]), norm(x[:2], gate[:2]))
