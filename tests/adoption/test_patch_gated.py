"""normops.patch on the gated norms of transformers, and on other third-party styles."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import norms_of_others as others
import pytest
import torch
from alike import SIZE, assert_is_what_it_was
from graphs import computed_besides_views
from profiles import operators_run
from torch import Tensor, nn
from traced_graphs import trace
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated

import normops
from normops.adoption.norm import DTYPES, HALVES


class Gated(NamedTuple):
    """A gated norm, its expected description, and how often it rounds to 16 bits."""

    make: Callable[[], nn.Module]
    described: str
    roundings: int


WEIGHT = "weight, eps: variance_epsilon"
BEFORE = "silu(gate) before the norm, dtype: promoted, rounds"
# One class of each form; test_table.py and test_families.py have the others.
GATED = (
    Gated(partial(MambaRMSNormGated, SIZE, group_size=SIZE), f"{WEIGHT}, {BEFORE} twice", 2),
    Gated(partial(MambaRMSNormGated, SIZE, group_size=16), f"{WEIGHT}, groups of 16, {BEFORE} twice", 2),
    Gated(partial(Qwen3NextRMSNormGated, SIZE), f"{WEIGHT}, silu(gate) after the norm, rounds thrice", 3),
    Gated(
        partial(Qwen4ExpTextRMSNormGated, SIZE, activation="sigmoid"),
        f"{WEIGHT}, sigmoid(gate) after the norm, rounds thrice",
        3,
    ),
    Gated(partial(KimiLinearRMSNormGated, SIZE), f"{WEIGHT}, sigmoid(gate) after the norm", 1),
    Gated(partial(FalconH1RMSNormGated, SIZE), f"{WEIGHT}, silu(gate) after the norm", 1),
    Gated(partial(FalconH1RMSNormGated, SIZE, n_groups=4), f"{WEIGHT}, groups of 16, silu(gate) after the norm", 1),
    Gated(
        partial(FalconH1RMSNormGated, SIZE, n_groups=4, norm_before_gate=False),
        f"{WEIGHT}, groups of 16, silu(gate) before the norm",
        1,
    ),
    # Four roundings: two of them are the activated gate and its product with the input.
    Gated(partial(others.GateFirstNorm, SIZE), f"{WEIGHT}, {BEFORE} otherwise", 4),
    Gated(partial(others.NormFirstNorm, SIZE), "1 + weight, eps: eps, groups of 16, sigmoid(z) after the norm", 1),
    Gated(partial(others.WeightlessGatedNorm, SIZE), "no weight, eps: 1e-05, sigmoid(gate) before the norm", 1),
)
every_norm = pytest.mark.parametrize("gated", GATED, ids=lambda each: f"{each.make.func.__name__}, {each.described}")


def inputs(dtype: torch.dtype, gate_dtype: torch.dtype | None = None, batch: int = 4) -> tuple[Tensor, Tensor]:
    """Returns an input and a gate: slices of one projection if their dtypes are equal."""
    torch.manual_seed(1)
    x, gate = torch.randn(batch, 5, 2 * SIZE).to(dtype).chunk(2, dim=-1)
    return x, gate.to(gate_dtype or dtype)


def run_with_gradients(module: nn.Module, dtype: torch.dtype, batch: int = 4) -> list[Tensor]:
    """Returns the output and the gradients of input, gate and parameters."""
    x, gate = (tensor.detach().requires_grad_() for tensor in inputs(dtype, batch=batch))
    y: Tensor = module(x, gate)
    y.backward(inputs(y.dtype, batch=batch)[0].sin())
    tensors = [y.detach(), x.grad, gate.grad, *(parameter.grad for parameter in module.parameters())]
    return [tensor for tensor in tensors if tensor is not None]


@every_norm
def test_gated_norm_is_recognized_and_equals_the_original(gated: Gated) -> None:
    original, patched = others.patched_pair(gated.make, torch.float32)
    (described,) = others.patch(copy.deepcopy(original)).patched.values()
    assert described.removesuffix(", measured") == f"{type(original).__name__}: {gated.described}"
    x, gate = inputs(torch.float32)
    assert operators_run(lambda: patched(x, gate)) == ["normops::gated_rms_norm"]
    names = inspect.signature(patched.forward).parameters
    assert names == inspect.signature(original.forward).parameters
    assert torch.equal(patched(**dict(zip(names, (x, gate), strict=True))), patched(x, gate))
    assert_is_what_it_was(patched, original, some=True)


@every_norm
def test_patched_matches_original_in_all_dtypes(gated: Gated) -> None:
    original, patched = others.patched_pair(gated.make, torch.float64)
    for dtype, gate_dtype, weight_dtype in product(DTYPES, repeat=3):
        x, gate = inputs(dtype, gate_dtype)
        y, expected = patched.to(weight_dtype)(x, gate), original.to(weight_dtype)(x, gate)
        assert y.dtype == expected.dtype
        coarse = max(torch.finfo(each).eps for each in (dtype, gate_dtype, weight_dtype, torch.float32))
        # Most originals compute in float32, even for float64, with up to eight roundings.
        rtol = (gated.roundings + 1) * coarse / 2 + 8 * torch.finfo(torch.float32).eps
        atol = 2.0**-24 if torch.float16 in (dtype, gate_dtype, weight_dtype) else 0.0
        torch.testing.assert_close(y.double(), expected.double(), rtol=rtol, atol=atol)


@every_norm
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_original_rounding_has_the_original_bits(gated: Gated, dtype: torch.dtype) -> None:
    if "otherwise" in gated.described:
        reason = 'rounds in an order that rounding="original" does not support; patch(model, rounding="once") takes it'
        assert list(others.patch(gated.make(), rounding="original").skipped.values()) == [f"GateFirstNorm: {reason}"]
        return
    original, patched = others.patched_pair(gated.make, dtype, rounding="original")
    _, once = others.patched_pair(gated.make, dtype)
    assert any(name.startswith("normops::") for name in operators_run(lambda: patched(*inputs(dtype))))
    results, expected, rounded_once = (run_with_gradients(each, dtype, 256) for each in (patched, original, once))
    shares = [float((actual != own).float().mean()) for actual, own in zip(results, expected, strict=True)]
    assert shares[0] < 5e-4
    assert max(shares) < 2e-3
    assert (float((rounded_once[0] != expected[0]).float().mean()) > 0.1) == (gated.roundings > 1)


def test_unsupported_gate_runs_the_original_forward() -> None:
    norm = MambaRMSNormGated(SIZE, group_size=16)
    original = copy.deepcopy(norm)
    others.patch(norm)
    x, gate = inputs(torch.float32)
    for gates in ((), (None,), (gate[:1],), (gate[..., :1],), (gate > 0,)):
        assert torch.equal(norm(x, *gates), original(x, *gates))
        assert operators_run(partial(norm, x, *gates)) == []


@every_norm
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_patched_compiles_to_one_operator_each_way(gated: Gated, dynamic: bool) -> None:
    _, patched = others.patched_pair(gated.make, torch.float32)
    tensors = (tensor.contiguous().requires_grad_() for tensor in inputs(torch.float32))
    graphs = trace(patched, *tensors, dynamic=dynamic)
    assert graphs.backward is not None
    assert computed_besides_views(graphs.forward) == ["normops.gated_rms_norm.default"]
    assert computed_besides_views(graphs.backward) == ["normops.gated_rms_norm_backward.default"]


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        (MambaRMSNormGated(SIZE, group_size=SIZE), {"norm_before_gate": False}),
        (MambaRMSNormGated(SIZE, group_size=16), {"norm_before_gate": False, "group_size": 16}),
        (Qwen3NextRMSNormGated(SIZE), {}),
        (KimiLinearRMSNormGated(SIZE), {"activation": "sigmoid"}),
    ],
)
def test_state_dicts_match_transformers(theirs: nn.Module, options: dict[str, Any]) -> None:
    nn.init.uniform_(theirs.get_parameter("weight"), -0.5, 1.5)
    ours = normops.GatedRMSNorm(SIZE, 1e-6, **options)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert str(theirs.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    x, gate = inputs(torch.float32)
    torch.testing.assert_close(ours(x, gate), theirs(x, gate), rtol=1e-5, atol=0.0)
