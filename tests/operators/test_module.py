"""normops.rms_norm and normops.RMSNorm replace torch's."""

import inspect

import pytest
import torch
from torch import nn

import normops
from reference import cases


def test_first_arguments_match_torch() -> None:
    ours = list(inspect.signature(normops.rms_norm).parameters.values())
    theirs = list(inspect.signature(nn.functional.rms_norm).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    module = list(inspect.signature(normops.RMSNorm.__init__).parameters.values())
    torch_module = list(inspect.signature(nn.RMSNorm.__init__).parameters.values())
    assert [(p.name, p.default) for p in module[: len(torch_module)]] == [(p.name, p.default) for p in torch_module]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [8, (8,), [3, 8]])
def test_same_as_torch(
    shape: int | tuple[int, ...] | list[int], affine: bool, eps: float | None, dtype: torch.dtype, device: str
) -> None:
    ours = normops.RMSNorm(shape, eps, affine, device, dtype)
    theirs = nn.RMSNorm(shape, eps, affine, device, dtype)
    assert isinstance(ours, nn.RMSNorm)
    torch.manual_seed(0)
    if affine:
        nn.init.normal_(theirs.weight)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert str(theirs.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    assert repr(ours) == repr(theirs)
    x = cases.values((2, 3, 8), dtype).to(device)
    # The reference is float64, as torch's float32 gradients are less accurate than those of normops.
    if eps is None:
        theirs.eps = torch.finfo(dtype).eps
    exact = theirs.double()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    torch.testing.assert_close(ours(a), exact(b).to(dtype))
    ours(a).square().sum().backward()
    exact(b).square().sum().backward()
    assert b.grad is not None
    torch.testing.assert_close(a.grad, b.grad.to(dtype))
    for p, q in zip(ours.parameters(), exact.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad.to(dtype))


def test_weight_offset_starts_without_scaling() -> None:
    norm = normops.RMSNorm(8, weight_offset=1.0)
    assert torch.equal(norm.weight, torch.zeros(8))
    assert repr(norm) == "RMSNorm((8,), eps=None, elementwise_affine=True, weight_offset=1.0)"
    x = cases.values((3, 8), torch.float32)
    assert torch.equal(norm(x), normops.RMSNorm(8)(x))


def test_bias_has_the_shape_of_the_weight() -> None:
    norm = normops.RMSNorm(8, 1e-3, dtype=torch.bfloat16, bias=True)
    assert norm.bias is not None
    assert (norm.bias.shape, norm.bias.dtype) == (norm.weight.shape, torch.bfloat16)
    assert torch.equal(norm.bias, torch.zeros_like(norm.weight))
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert repr(norm).endswith(", bias=True)")
    nn.init.normal_(norm.bias)
    x = cases.values((5, 3, 8), torch.float32)
    assert torch.equal(norm(x), normops.rms_norm(x, 8, norm.weight, 1e-3, bias=norm.bias))
    with pytest.raises(RuntimeError, match="RMSNorm: expected no residual with a bias, a dim or an activation"):
        norm(x, x)
    assert normops.RMSNorm(8, elementwise_affine=False, bias=True).bias is None


def test_groups_are_rows_with_separate_weights() -> None:
    norm = normops.RMSNorm(8, 1e-3, group_size=4)
    assert repr(norm) == "RMSNorm((8,), eps=0.001, elementwise_affine=True, group_size=4)"
    nn.init.normal_(norm.weight)
    assert normops.RMSNorm(8, elementwise_affine=False, group_size=4).weight is None
    x, other = (cases.values((5, 8), torch.float32, seed) for seed in range(2))
    a, b, w = (tensor.unflatten(-1, (2, 4)) for tensor in (x, other, norm.weight))
    assert torch.equal(norm(x), normops.rms_norm(a, 4, w, 1e-3).flatten(-2))
    for result, of_parts in zip(norm(x, other, 0.5), normops.add_rms_norm(a, b, 4, w, 1e-3, alpha=0.5), strict=True):
        assert torch.equal(result, of_parts.flatten(-2))
