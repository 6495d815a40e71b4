"""Nested tensors of jagged layout: the norm of their values, forward and backward, eager and compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nested
from torch.nn import functional as F

import normops
from reference import cases

Results = tuple[Tensor, ...]


def jagged(device: str, seed: int = 0, columns: tuple[int, ...] = (8,)) -> Tensor:
    """Three sequences, one of them empty."""
    values = cases.values((6, *columns), torch.float32, seed).to(device)
    return nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 6], device=device)).detach()


def weight(device: str) -> Tensor:
    return cases.values((8,), torch.float32, 3).to(device).requires_grad_()


def plain(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    return normops.rms_norm(x, 8, w, 1e-3, weight_offset=1.0) * residual


def with_residual(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
    y, h = normops.add_rms_norm(x, residual, 8, w, 1e-3, weight_offset=1.0)
    return y * h


def gated(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    return normops.gated_rms_norm(x, gate, 8, w, 1e-3, weight_offset=1.0, norm_before_gate=False)


def rotated(x: Tensor, angles: Tensor, w: Tensor) -> Tensor:
    """By angles of each position, or of all alike."""
    cos, sin = torch.cos(angles.detach()), torch.sin(angles.detach())
    row = torch.linspace(0, 1, 8, device=w.device)
    y = normops.rms_norm_rope(x, cos, sin, 8, w, 1e-3, interleaved=True) * angles
    return y + normops.rms_norm_rope(x, row.cos(), row.sin(), 8, w, 1e-3)


def derivatives(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, w: Tensor) -> Results:
    inputs = (x.requires_grad_(), residual.requires_grad_(), w)
    output = norm(*inputs)
    output = output.values() if output.is_nested else output
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    return output.detach(), *(g.values() if g.is_nested else g for g in gradients)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("norm", [plain, with_residual, gated, rotated], ids=lambda norm: norm.__name__)
def test_the_same_as_of_the_values(norm: Callable[..., Tensor], backend: str | None, device: str) -> None:
    torch._dynamo.reset()
    x, w = jagged(device), weight(device)
    residual = nested.nested_tensor_from_jagged(jagged(device, 1).values(), x.offsets()).detach()  # type: ignore[attr-defined]
    call = norm if backend is None else torch.compile(norm, backend=backend, fullgraph=True)
    expected = derivatives(norm, x.values().detach(), residual.values().detach(), w)
    for a, b in zip(derivatives(call, x, residual, w), expected, strict=True):
        assert torch.equal(a, b)


def test_the_same_as_of_torch(device: str) -> None:
    x, w = jagged(device), weight(device)
    y = normops.rms_norm(x, 8, w, 1e-3)
    assert y.layout == torch.jagged
    assert (y + x).shape == x.shape  # the sequences are known to be the same
    torch.testing.assert_close(y.values(), F.rms_norm(x, (8,), w, 1e-3).values())


def test_module_inference_and_transposed_heads(device: str) -> None:
    module = normops.RMSNorm(4).to(device)
    x = jagged(device, columns=(3, 4))
    with torch.inference_mode():
        assert torch.equal(module(x).values(), module(x.values()))
    assert torch.equal(module(x.transpose(1, 2)).transpose(1, 2).values(), module(x.values()))
    assert torch.equal(normops.rms_norm(x, (3, 4)).values(), normops.rms_norm(x.values(), (3, 4)))
    of_heads = cases.values((3, 4), torch.float32, 3).to(device)
    assert torch.equal(normops.rms_norm(x, 4, of_heads).values(), normops.rms_norm(x.values(), 4, of_heads))


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, w = jagged(device), weight(device)
    with pytest.raises(RuntimeError, match=r"rms_norm: expected normalized_shape to be dimensions behind the ragged"):
        normops.rms_norm(x, (6, 8))
    with pytest.raises(RuntimeError, match=r"rms_norm: expected normalized_shape to be dimensions behind the ragged"):
        normops.rms_norm(x.transpose(1, 2), 8)
    with pytest.raises(
        RuntimeError, match=r"expected weight to have shape \[8\], the normalized_shape, or .* got \[7\]"
    ):
        normops.rms_norm(x, 8, w[:7])
    with pytest.raises(
        RuntimeError, match=r"rms_norm: expected weight to have dimensions behind the ragged .* \[6, 8\]"
    ):
        normops.rms_norm(x, 8, w.expand(6, 8))
    other = nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, 1, 2, 6], device=device))
    with pytest.raises(RuntimeError, match="add_rms_norm: expected residual to have the sequences of input"):
        normops.add_rms_norm(x, other, 8)
    with pytest.raises(RuntimeError, match="gated_rms_norm: expected gate to have the sequences of input"):
        normops.gated_rms_norm(x, other, 8)
    with pytest.raises(RuntimeError, match="rms_norm_rope: expected cos to have the sequences of input"):
        normops.rms_norm_rope(x, other, other, 8)
    with pytest.raises(RuntimeError, match=r"rms_norm_rope: expected cos to be nested as input is, or .* got \[6, 8\]"):
        normops.rms_norm_rope(x, x.values(), x.values(), 8)
    for mixed in ((x, x.values()), (x.values(), x)):
        with pytest.raises(ValueError, match=r"add_rms_norm.*: expected (input|residual) to be a jagged layout"):
            normops.add_rms_norm(*mixed, 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_older_layout_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'normops::rms_norm' with arguments from the 'NestedTensorCPU'"):
        normops.rms_norm(nested.nested_tensor([torch.ones(2, 8)], layout=torch.strided), 8)
