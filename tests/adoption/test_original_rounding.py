"""rounding="original" keeps the bits of a model, whose norms round in their own order."""

from collections.abc import Callable
from functools import partial

import norms_of_others as others
import pytest
import torch
from profiles import operators_run
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from reference.cases import HALVES

SIZE = 64
EPS = 1e-6

every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def inputs(dtype: torch.dtype, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(512, SIZE, generator=generator).to(dtype) for _ in range(count)]


def share_that_differs(a: Tensor, b: Tensor) -> float:
    assert a.dtype == b.dtype
    return float((a != b).double().mean())


def with_gradients(module: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y = module(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs(y.dtype)[0].sin())]


@every_half
def test_patched_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    """Compares the result and the input's gradient. The float32 sum of squares may be added in another order; all other
    operations equal the model's.
    """
    original, fused = others.patched_pair(partial(LlamaRMSNorm, SIZE, EPS), dtype, rounding="original")
    _, once = others.patched_pair(partial(LlamaRMSNorm, SIZE, EPS), dtype)
    x = inputs(dtype)
    results, expected = with_gradients(fused, x), with_gradients(original, x)
    rstd = torch.rsqrt(x[0].float().square().mean(-1, keepdim=True) + EPS)
    ulp = torch.nextafter(rstd, torch.tensor(torch.inf)) - rstd
    near = [original.get_parameter("weight") * (x[0] * (rstd + ulps * ulp)).to(dtype) for ulps in range(-2, 3)]
    assert torch.stack([(results[0] == y).all(-1) for y in near]).any(0).all()
    for actual, one_rounding, own in zip(results, with_gradients(once, x), expected, strict=True):
        assert share_that_differs(actual, own) < 2e-3
        assert share_that_differs(one_rounding, own) > 0.1


@pytest.mark.parametrize("norm", others.NORMS)
@every_half
def test_patched_norms_have_the_bits_of_third_party_norms(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
    original, patched = others.patched_pair(partial(norm, SIZE), dtype, rounding="original")
    x = inputs(dtype)[0].view(-1, 2, SIZE)
    assert any(name.startswith("normops::") for name in operators_run(lambda: patched(x)))
    assert share_that_differs(patched(x), original(x)) < 5e-4
    # torch's norm and norms that round once have the same bits with either rounding.
    _, once = others.patched_pair(partial(norm, SIZE), dtype)
    rounds_on_the_way = norm in (others.LlamaNorm, others.T5Norm, others.BiasedNorm)
    assert (share_that_differs(once(x), original(x)) > 0.1) == rounds_on_the_way


@pytest.mark.parametrize("norm", [others.LlamaNorm, others.T5Norm, others.GroupedNorm, others.BiasedNorm])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_mixed_weight_dtypes(norm: Callable[[int], nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    original, patched = others.patched_pair(partial(norm, SIZE), weight_dtype, rounding="original")
    (x,) = inputs(dtype)
    y, expected = patched(x), original(x)
    assert y.dtype == expected.dtype
    # If the last rounding is to bfloat16, bits are equal. Otherwise values differ by roundings to float32, which are
    # much smaller than the earlier roundings to bfloat16.
    assert float(((y.double() - expected.double()).abs() > 1e-6 * expected.double().abs()).double().mean()) < 5e-4


@pytest.mark.parametrize(("norm", "share"), [(others.T5Norm, 0.41), (others.WeightlessNorm, 0.69)])
@every_half
def test_gradient_of_an_input_cast_twice_is_rounded_once(
    norm: Callable[[int], nn.Module], share: float, dtype: torch.dtype
) -> None:
    """The fused gradient is more accurate: autograd rounds the gradient of each cast, and their sum."""
    original, fused = others.patched_pair(partial(norm, SIZE), dtype, rounding="original")
    tensors = inputs(dtype)
    (actual, grad), (own, own_grad) = (with_gradients(module, tensors) for module in (fused, original))
    assert share_that_differs(actual, own) < 5e-4
    assert share_that_differs(grad, own_grad) == pytest.approx(share, abs=0.01)  # as docs/reproducibility.md says
    x = tensors[0].double().requires_grad_()
    weight = dict(original.named_parameters()).get("weight", torch.ones(()))
    y = weight.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (1e-6 if norm is others.T5Norm else 1e-5))
    (exact,) = torch.autograd.grad(y, x, tensors[0].sin().double())
    error, own_error = (float((each.double() - exact).abs().mean()) for each in (grad, own_grad))
    assert error < 0.8 * own_error


class OffsetTwice(others.GemmaNorm):
    """Rounds twice, but not the sum of weight and offset."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((1.0 + self.weight.float()) * normalized.to(x.dtype)).to(x.dtype)


class RoundedOffset(others.GemmaNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (1.0 + self.weight) * normalized.to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "weight_dtype", "gate_dtypes"),
    [
        (partial(Qwen3NextRMSNormGated, SIZE, eps=EPS), torch.float32, (torch.bfloat16,)),
        (partial(Qwen3NextRMSNormGated, SIZE, eps=EPS), torch.float32, (torch.float32,)),
        (partial(OffsetTwice, SIZE), torch.bfloat16, ()),
        (partial(OffsetTwice, SIZE), torch.float32, ()),
    ],
)
def test_unrounded_intermediates_keep_bits(
    norm: Callable[[], nn.Module], weight_dtype: torch.dtype, gate_dtypes: tuple[torch.dtype, ...]
) -> None:
    """Covers a product with a wider weight before the gate, and a weight with an offset."""
    original, patched = others.patched_pair(norm, weight_dtype, rounding="original")
    x, gate = inputs(torch.bfloat16, 2)
    tensors = [x, *map(gate.to, gate_dtypes)]
    assert share_that_differs(patched(*tensors), original(*tensors)) < 5e-4
    assert operators_run(lambda: patched(*tensors)) == ["normops::rms_norm"]


@pytest.mark.parametrize(
    ("norm", "computes"),
    [(RoundedOffset, "1 + weight, eps: eps, dtype: promoted"), (others.FactorNorm, "no weight, eps: eps")],
)
def test_unsupported_rounding_order_is_skipped(norm: Callable[[int], nn.Module], computes: str) -> None:
    module = norm(SIZE)
    name = type(module).__name__
    reason = 'rounds in an order that rounding="original" does not support; patch(model, rounding="once") takes it'
    assert others.patch(module, rounding="original").skipped == {"": f"{name}: {reason}"}
    (described,) = others.patch(module).patched.values()
    assert described.removesuffix(", measured") == f"{name}: {computes}, rounds otherwise"
