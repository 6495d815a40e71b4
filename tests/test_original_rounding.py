"""rounding="original": the bits of a model, which rounds in an order of its own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import norms_of_others as others
import pytest
import torch
from graphs import computed_besides_views
from profiles import operators_run
from torch import Tensor, nn
from traced_graphs import trace
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import normops

SIZE = 64
EPS = 1e-6
HALVES = (torch.float16, torch.bfloat16)

every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


class Theirs(NamedTuple):
    """A norm of transformers, the operator that computes it, and how many tensors it takes."""

    make: Callable[[], nn.Module]
    operator: str
    arguments: int = 1


PLAIN = (Theirs(partial(LlamaRMSNorm, SIZE, EPS), "rms_norm"), Theirs(partial(Qwen3RMSNorm, SIZE, EPS), "rms_norm"))
GATED = (
    Theirs(partial(MambaRMSNormGated, SIZE, group_size=SIZE, eps=EPS), "gated_rms_norm", 2),
    Theirs(partial(MambaRMSNormGated, SIZE, group_size=16, eps=EPS), "gated_rms_norm", 2),
    Theirs(partial(Qwen3NextRMSNormGated, SIZE, eps=EPS), "gated_rms_norm", 2),
)
every_norm = pytest.mark.parametrize("theirs", [*PLAIN, *GATED], ids=lambda theirs: type(theirs.make()).__name__)


def pair(make: Callable[[], nn.Module], dtype: torch.dtype, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A norm with a random weight, and the same patched."""
    torch.manual_seed(0)
    original = make()
    for parameter in original.parameters():
        nn.init.uniform_(parameter, -0.5, 1.5)
    original.to(dtype)
    patched = copy.deepcopy(original)
    assert len(normops.patch(patched, strict=True, **options).patched) == 1
    return original, patched


def inputs(dtype: torch.dtype, count: int = 1, rows: int = 512) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, SIZE, generator=generator).to(dtype) for _ in range(count)]


def share_that_differs(a: Tensor, b: Tensor) -> float:
    assert a.dtype == b.dtype
    return float((a != b).double().mean())


def with_gradients(module: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y = module(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs(y.dtype)[0].sin())]


@every_norm
@every_half
def test_bits_of_transformers(theirs: Theirs, dtype: torch.dtype) -> None:
    """Of the result, and of the gradients of what has the shape of the input."""
    tensors = inputs(dtype, theirs.arguments)
    original, patched = pair(theirs.make, dtype, rounding="original")
    _, once = pair(theirs.make, dtype)
    expected = with_gradients(original, tensors)
    for actual, one_rounding, own in zip(
        with_gradients(patched, tensors), with_gradients(once, tensors), expected, strict=True
    ):
        assert share_that_differs(actual, own) < 2e-3
        assert share_that_differs(one_rounding, own) > 0.1


@pytest.mark.parametrize("theirs", PLAIN, ids=lambda theirs: type(theirs.make()).__name__)
@every_half
def test_bits_are_those_of_a_statistic_nearby(theirs: Theirs, dtype: torch.dtype) -> None:
    """The float32 sum of squares has more than one order; whatever else happens in a row is what the model does."""
    original, patched = pair(theirs.make, dtype, rounding="original")
    (x,) = inputs(dtype)
    assert_of_a_statistic_nearby(patched(x), x, original.get_parameter("weight"))


def assert_of_a_statistic_nearby(y: Tensor, x: Tensor, weight: Tensor) -> None:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    ulp = torch.nextafter(rstd, torch.tensor(torch.inf)) - rstd
    is_found = torch.zeros(len(x), dtype=torch.bool)
    for ulps in range(-2, 3):
        is_found |= (y == weight * (x * (rstd + ulps * ulp)).to(x.dtype)).all(-1)
    assert is_found.all()


@every_norm
@every_half
def test_one_operator_each_way(theirs: Theirs, dtype: torch.dtype) -> None:
    _, patched = pair(theirs.make, dtype, rounding="original")
    graphs = trace(patched, *(tensor.requires_grad_() for tensor in inputs(dtype, theirs.arguments)), dynamic=False)
    assert graphs.backward is not None
    assert computed_besides_views(graphs.forward) == [f"normops.{theirs.operator}.default"]
    assert computed_besides_views(graphs.backward) == [f"normops.{theirs.operator}_backward.default"]


@pytest.mark.parametrize("norm", others.NORMS)
@every_half
def test_bits_of_others(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
    original, patched = pair(partial(norm, SIZE), dtype, rounding="original")
    x = inputs(dtype)[0].view(-1, 2, SIZE)
    assert any(name.startswith("normops::") for name in operators_run(lambda: patched(x)))
    assert share_that_differs(patched(x), original(x)) < 5e-4
    # torch's own and those that round once have them in either way.
    _, once = pair(partial(norm, SIZE), dtype)
    rounds_twice = norm in (others.LlamaNorm, others.T5Norm)
    assert (share_that_differs(once(x), original(x)) > 0.1) == rounds_twice


@pytest.mark.parametrize("norm", [others.LlamaNorm, others.T5Norm, others.GroupedNorm])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_where_dtypes_differ(norm: Callable[[int], nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    original, patched = pair(partial(norm, SIZE), weight_dtype, rounding="original")
    (x,) = inputs(dtype)
    y, expected = patched(x), original(x)
    assert y.dtype == expected.dtype
    # Bits, where the last rounding is to bfloat16; else what comes of the roundings to bfloat16 before, which are many
    # times as large as those to float32.
    assert float(((y.double() - expected.double()).abs() > 1e-6 * expected.double().abs()).double().mean()) < 5e-4


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gated_norm_with_a_wider_weight(gate_dtype: torch.dtype) -> None:
    """Its product with the weight is float32, and not rounded before the gate."""
    original, patched = pair(partial(Qwen3NextRMSNormGated, SIZE, eps=EPS), torch.float32, rounding="original")
    x, gate = inputs(torch.bfloat16, 2)
    y = patched(x, gate.to(gate_dtype))
    assert share_that_differs(y, original(x, gate.to(gate_dtype))) < 5e-4
    assert operators_run(lambda: patched(x, gate.to(gate_dtype))) == ["normops::rms_norm"]


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


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_offset_is_added_without_rounding(weight_dtype: torch.dtype) -> None:
    original, patched = pair(partial(OffsetTwice, SIZE), weight_dtype, rounding="original")
    (x,) = inputs(torch.bfloat16)
    assert share_that_differs(patched(x), original(x)) < 5e-4
    assert operators_run(lambda: patched(x)) == ["normops::rms_norm"]


def test_a_rounded_sum_of_weight_and_offset_is_an_order_of_its_own() -> None:
    module = RoundedOffset(SIZE)
    reason = 'rounds in an order of its own, which rounding="original" does not have'
    assert normops.patch(module, rounding="original").skipped == {"": f"RoundedOffset: {reason}"}
    assert normops.patch(module).patched == {
        "": "RoundedOffset: 1 + weight, eps: eps, dtype: promoted, rounds otherwise"
    }
