"""normops.rms_norm and normops.RMSNorm replace torch's."""

import copy
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


@pytest.mark.parametrize(("groups", "shape"), [(3, (3, 8)), ((2, 3), (2, 3, 8)), ((), (8,))])
def test_weight_has_one_row_per_group(groups: int | tuple[int, ...], shape: tuple[int, ...]) -> None:
    norm = normops.RMSNorm(8, 1e-3, weight_offset=1.0, dtype=torch.bfloat16, groups=groups)
    assert {name: tuple(value.shape) for name, value in norm.state_dict().items()} == {"weight": shape}
    assert norm.weight.dtype == torch.bfloat16
    assert torch.equal(norm.weight, torch.zeros(shape))
    described = f", groups={shape[:-1]}" if groups else ""
    assert repr(norm) == f"RMSNorm((8,), eps=0.001, elementwise_affine=True, weight_offset=1.0{described})"
    nn.init.normal_(norm.weight)
    x = cases.values((5, *shape), torch.float32)
    assert torch.equal(norm(x), normops.rms_norm(x, 8, norm.weight, 1e-3, weight_offset=1.0))
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))
    assert normops.RMSNorm(8, elementwise_affine=False, groups=groups).weight is None


@pytest.mark.parametrize("groups", [(), 3])
def test_bias_has_the_shape_of_the_weight(groups: int | tuple[int, ...]) -> None:
    norm = normops.RMSNorm(8, 1e-3, dtype=torch.bfloat16, groups=groups, bias=True)
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


@pytest.mark.parametrize("groups", [(), (3,)])
def test_groups_and_group_size_combine(groups: tuple[int, ...]) -> None:
    norm = normops.RMSNorm(8, 1e-3, groups=groups, group_size=4)
    gated = normops.GatedRMSNorm(8, 1e-3, groups=groups, group_size=4)
    described = f"RMSNorm((8,), eps=0.001, elementwise_affine=True{', groups=(3,)' * len(groups)}, group_size=4"
    assert repr(norm) == f"{described})"
    assert repr(gated) == f"Gated{described}, activation=silu, norm_before_gate=True)"
    nn.init.normal_(norm.weight)
    gated.load_state_dict(norm.state_dict())
    x, other = (cases.values((5, *groups, 8), torch.float32, seed) for seed in range(2))
    a, b, w = (tensor.unflatten(-1, (2, 4)) for tensor in (x, other, norm.weight))
    assert torch.equal(norm(x), normops.rms_norm(a, 4, w, 1e-3).flatten(-2))
    assert torch.equal(gated(x, other), normops.gated_rms_norm(a, b, 4, w, 1e-3).flatten(-2))
    for result, of_parts in zip(norm(x, other, 0.5), normops.add_rms_norm(a, b, 4, w, 1e-3, alpha=0.5), strict=True):
        assert torch.equal(result, of_parts.flatten(-2))


def test_modules_pickled_without_groups_work() -> None:
    norm = normops.RMSNorm(8)
    del norm.groups, norm.group_size
    assert norm(torch.ones(2, 8)).shape == (2, 8)
    assert repr(norm) == repr(normops.RMSNorm(8))
