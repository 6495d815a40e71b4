"""normops.patch on the gated norms of transformers, and on other third-party styles."""

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import norms_of_others as others
import pytest
import torch
from graphs import computed_besides_views
from profiles import operators_run
from torch import Tensor, nn
from traced_graphs import trace
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridRMSNormGated
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import normops
from normops.adoption.norm import DTYPES

SIZE = 64
HALVES = (torch.float16, torch.bfloat16)


class Gated(NamedTuple):
    """A gated norm, its expected description, and how often it rounds to 16 bits."""

    make: Callable[[], nn.Module]
    described: str
    roundings: int


def _all() -> list[Any]:
    weight = "weight, eps: variance_epsilon"
    first = "silu(gate) before the norm, dtype: promoted, rounds twice"
    after = "silu(gate) after the norm, rounds thrice"
    found = [
        Gated(partial(MambaRMSNormGated, SIZE, group_size=SIZE), f"{weight}, {first}", 2),
        *(
            Gated(partial(norm, SIZE, group_size=16), f"{weight}, groups of 16, {first}", 2)
            for norm in (
                MambaRMSNormGated,
                Zamba2RMSNormGated,
                BambaRMSNormGated,
                GraniteMoeHybridRMSNormGated,
                NemotronHRMSNormGated,
            )
        ),
        *(
            Gated(partial(norm, SIZE), f"{weight}, {after}", 3)
            for norm in (
                Qwen3NextRMSNormGated,
                Qwen3_5RMSNormGated,
                Qwen3_5MoeRMSNormGated,
                Qwen4ExpTextRMSNormGated,
                OlmoHybridRMSNormGated,
            )
        ),
        Gated(
            partial(Qwen4ExpTextRMSNormGated, SIZE, activation="sigmoid"),
            f"{weight}, sigmoid(gate) after the norm, rounds thrice",
            3,
        ),
        *(
            Gated(partial(norm, SIZE), f"{weight}, sigmoid(gate) after the norm", 1)
            for norm in (KimiLinearRMSNormGated, BailingHybridRMSNormGated, Glm5NextTextRMSNormGated)
        ),
        Gated(partial(FalconH1RMSNormGated, SIZE), f"{weight}, silu(gate) after the norm", 1),
        Gated(partial(FalconH1RMSNormGated, SIZE, n_groups=4), f"{weight}, groups of 16, silu(gate) after the norm", 1),
        Gated(
            partial(FalconH1RMSNormGated, SIZE, n_groups=4, norm_before_gate=False),
            f"{weight}, groups of 16, silu(gate) before the norm",
            1,
        ),
        Gated(
            partial(others.GateFirstNorm, SIZE),
            f"{weight}, silu(gate) before the norm, dtype: promoted, rounds otherwise",
            4,  # two of them: the activated gate and its product with the input
        ),
        Gated(partial(others.NormFirstNorm, SIZE), "1 + weight, eps: eps, groups of 16, sigmoid(z) after the norm", 1),
        Gated(partial(others.WeightlessGatedNorm, SIZE), "no weight, eps: 1e-05, sigmoid(gate) before the norm", 1),
    ]
    return [pytest.param(each, id=f"{type(each.make()).__name__}, {each.described}") for each in found]


every_norm = pytest.mark.parametrize("gated", _all())


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
def test_gated_norm_is_recognized(gated: Gated) -> None:
    module = gated.make()
    (described,) = others.patch(module, strict=True).patched.values()
    assert described.removesuffix(", measured") == f"{type(module).__name__}: {gated.described}"


@every_norm
def test_patched_matches_original_in_float32(gated: Gated) -> None:
    original, patched = others.patched_pair(gated.make, torch.float32)
    results, expected = run_with_gradients(patched, torch.float32), run_with_gradients(original, torch.float32)
    assert operators_run(lambda: patched(*inputs(torch.float32))) == ["normops::gated_rms_norm"]
    torch.testing.assert_close(results[0], expected[0], rtol=1e-5, atol=0.0)
    assert len(results) == len(expected) == 3 + len(list(original.parameters()))
    for actual, exact in zip(results[1:], expected[1:], strict=True):
        # Sums have terms that cancel, so the tolerance is relative to the largest element.
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@every_norm
def test_gradients_match_original_in_bfloat16(gated: Gated) -> None:
    original, patched = others.patched_pair(gated.make, torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    results, expected = run_with_gradients(patched, torch.bfloat16), run_with_gradients(original, torch.bfloat16)
    for actual, theirs in zip(results, expected, strict=True):
        assert actual.dtype == theirs.dtype
        torch.testing.assert_close(actual, theirs, rtol=0.0, atol=8 * eps * float(theirs.abs().max()))


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
def test_signature_is_unchanged(gated: Gated) -> None:
    module = gated.make()
    parameters = inspect.signature(module.forward).parameters.values()
    x, gate = inputs(torch.float32)
    names = {parameter.name: tensor for parameter, tensor in zip(parameters, (x, gate), strict=True)}
    others.patch(module)
    now = inspect.signature(module.forward).parameters.values()
    assert [(each.name, each.default) for each in now] == [(each.name, each.default) for each in parameters]
    assert torch.equal(module(**names), module(x, gate))


@every_norm
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_patched_compiles_to_one_operator_each_way(gated: Gated, dynamic: bool) -> None:
    _, patched = others.patched_pair(gated.make, torch.float32)
    tensors = (tensor.contiguous().requires_grad_() for tensor in inputs(torch.float32))
    graphs = trace(patched, *tensors, dynamic=dynamic)
    assert graphs.backward is not None
    assert computed_besides_views(graphs.forward) == ["normops.gated_rms_norm.default"]
    assert computed_besides_views(graphs.backward) == ["normops.gated_rms_norm_backward.default"]


def test_exported_program_has_one_gated_operator() -> None:
    norm = Qwen3NextRMSNormGated(SIZE)
    others.patch(norm)
    x, gate = inputs(torch.float32)
    rows = torch.export.Dim("rows")
    shapes = {"hidden_states": {0: rows}, "gate": {0: rows}}
    program = torch.export.export(norm, (x, gate), dynamic_shapes=shapes)
    assert [str(node.target) for node in program.graph.nodes if "norm" in str(node.target)] == [
        "normops.gated_rms_norm.default"
    ]
    assert torch.equal(program.module()(x[:2], gate[:2]), norm(x[:2], gate[:2]))


def test_pickled_norm_can_be_unpatched() -> None:
    norm = Zamba2RMSNormGated(SIZE, group_size=16)
    x, gate = inputs(torch.float32)
    expected = norm(x, gate)
    others.patch(norm)
    again = pickle.loads(pickle.dumps(norm))
    assert torch.equal(again(x, gate), norm(x, gate))
    assert operators_run(lambda: again(x, gate)) == ["normops::gated_rms_norm"]
    assert list(others.patch(again).already) == [""]
    assert normops.unpatch(again) == 1
    assert torch.equal(again(x, gate), expected)


def test_normops_module_is_reported_as_running_normops() -> None:
    assert others.patch(normops.GatedRMSNorm(SIZE)).already == {"": "GatedRMSNorm"}


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
