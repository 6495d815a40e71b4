"""rounding and alpha give the bits of models and inference kernels that round intermediate results."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from assertions import assert_same_bits, same_bits
from norms_of_others import LlamaNorm
from torch import Tensor
from torch.nn import functional as F

import normops
from normops.functional import Rounding
from reference import cases
from reference.cases import HALVES, Case
from reference.operators import OPERATORS, Variant
from reference.oracle import exact_sum

COLS = 1024

ROUNDING = [operator for operator in OPERATORS if "rounding" in operator.names]


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """LlamaRMSNorm, Qwen3RMSNorm, T5LayerNorm and their like."""
    return torch.func.functional_call(LlamaNorm(COLS, 0.0), {"weight": weight}, (x,))


def gate_first(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """MambaRMSNormGated."""
    h = x.float() * F.silu(gate.float())
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)


def norm_first(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Qwen3NextRMSNormGated."""
    return (llama(x, weight) * F.silu(gate.float())).to(x.dtype)


def exact_rows(dtype: torch.dtype) -> Tensor:
    """Returns rows whose mean square is the square of a small integer: sums in any order, and roots, are exact."""
    signs = torch.randint(0, 2, (5, 8, COLS), generator=torch.Generator().manual_seed(0)) * 2 - 1
    pairs = torch.tensor([(1, 7), (7, 17), (7, 23), (17, 31), (1, 41)])
    return (pairs.repeat(1, COLS // 2).unsqueeze(1) * signs).flatten(0, 1).to(dtype)


def weights(dtype: torch.dtype) -> Tensor:
    return (cases.values((COLS,), torch.float64, 3, scale=0.5) + 1).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.triton
def test_llama_rounding_has_the_bits_of_models(dtype: torch.dtype, device: str) -> None:
    x, weight = exact_rows(dtype), weights(dtype)
    # The sigmoid of these gates is exactly 1, so that silu returns the gate; powers of two keep a row's sum exact.
    gates = torch.randint(33, 64, x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    powers = torch.full_like(x, 32)
    for model, fused in (
        (llama(x, weight), partial(normops.rms_norm, x.to(device))),
        (llama(x, weight) + gates, partial(normops.rms_norm, x.to(device), bias=gates.to(device))),
        (gate_first(x, powers, weight), gated(x, powers, device, norm_before_gate=False)),
        (norm_first(x, gates, weight), gated(x, gates, device, norm_before_gate=True)),
    ):
        output = fused(COLS, weight.to(device), 0.0, rounding="llama").cpu()
        assert torch.equal(output, model)
        assert not torch.equal(fused(COLS, weight.to(device), 0.0).cpu(), model)


@pytest.mark.parametrize("rounding", ["once", "llama"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.triton
def test_full_size_weight_has_the_bits_of_a_shared_one(dtype: torch.dtype, rounding: Rounding, device: str) -> None:
    x, weight, bias = (
        cases.values(shape, dtype, seed).to(device) for seed, shape in enumerate([(2, 3, 40), (40,), (2, 1, 40)])
    )
    for given in (None, bias):
        norm = partial(normops.rms_norm, x, 40, weight_offset=1.0, rounding=rounding, bias=given)
        assert torch.equal(norm(weight.expand_as(x)), norm(weight))


def gated(x: Tensor, gate: Tensor, device: str, *, norm_before_gate: bool) -> Callable[..., Tensor]:
    return partial(normops.gated_rms_norm, x.to(device), gate.to(device), norm_before_gate=norm_before_gate)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.triton
def test_llama_rounding_has_the_bits_of_vllm(dtype: torch.dtype, device: str) -> None:
    """Its kernel fused_add_rms_norm normalizes the rounded sum."""
    h, weight = exact_rows(dtype), weights(dtype)
    x = torch.randint(-64, 64, h.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows = x.to(device), (h - x).to(device)
    output, total = normops.add_rms_norm(*rows, COLS, weight.to(device), 0.0, rounding="llama")
    assert torch.equal(total.cpu(), h)
    assert torch.equal(output.cpu(), llama(h, weight))


@pytest.mark.parametrize("alpha", [0.22, -1.4, 0.0])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.triton
def test_scaled_sum_rounds_like_models_or_once(dtype: torch.dtype, alpha: float, device: str) -> None:
    """``residual + x * alpha`` is computed with a model's operations, or rounded once."""
    x, residual = (cases.values((37, COLS), dtype, seed, scale=1.0) for seed in range(2))
    norm = partial(normops.add_rms_norm, x.to(device), residual.to(device), COLS, alpha=alpha)
    output, total = norm(rounding="llama")
    assert same_bits(total.cpu(), residual + x * alpha)
    assert same_bits(output, normops.rms_norm(total, COLS, rounding="llama"))
    has_kernels = device != "cpu" or normops.build_info()["cpu_isa"] != "composite"
    if dtype != torch.float64 and has_kernels:
        assert same_bits(norm()[1].cpu(), exact_sum(x, residual, alpha))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_modes_are_equal_beyond_16_bits(dtype: torch.dtype, device: str) -> None:
    for operator in ROUNDING:
        case = Variant(operator, operator.flags[0]).at(Case((7, 100), dtype, weight_dtype=dtype, has_residual=True))
        casts, rounds_once = (case.results(device, rounding=mode) for mode in ("llama", "once"))
        assert_same_bits(casts, rounds_once, operator)


def test_modules_take_rounding_and_alpha() -> None:
    norm = normops.RMSNorm(64, 1e-6, rounding="llama", dtype=torch.bfloat16)
    x, residual = (cases.values((5, 64), torch.bfloat16, seed) for seed in range(2))
    assert str(norm) == "RMSNorm((64,), eps=1e-06, elementwise_affine=True, rounding=llama)"
    assert same_bits(norm(x), normops.rms_norm(x, 64, norm.weight, 1e-6, rounding="llama"))
    pair = normops.add_rms_norm(x, residual, 64, norm.weight, 1e-6, rounding="llama", alpha=0.22)
    assert all(same_bits(a, b) for a, b in zip(norm(x, residual, 0.22), pair, strict=True))
    gated_norm = normops.GatedRMSNorm(64, rounding="llama", dtype=torch.bfloat16)
    expected = normops.gated_rms_norm(x, residual, 64, gated_norm.weight, 1e-5, rounding="llama")
    assert same_bits(gated_norm(x, residual), expected)
