"""rounding="original" keeps the bits of a model, whose norms round in their own order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import norms_of_others as others
import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from profiles import operators_run
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import normops
from normops.inductor import ModelRounding
from reference.cases import HALVES

SIZE = 64
EPS = 1e-6

every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


THEIRS = {norm.__name__: partial(norm, SIZE, EPS) for norm in (LlamaRMSNorm, Qwen3RMSNorm)}


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


@pytest.mark.parametrize("by", ["patch", "inductor"])
@pytest.mark.parametrize("theirs", THEIRS)
@every_half
@pytest.mark.covering(core=1)
def test_patched_norms_have_the_bits_of_transformers(theirs: str, dtype: torch.dtype, by: str) -> None:
    """Compares the result and the input's gradient. The float32 sum of squares may be added in another order; all other
    operations equal the model's.
    """
    original, fused = others.patched_pair(THEIRS[theirs], dtype, rounding="original")
    _, once = others.patched_pair(THEIRS[theirs], dtype)
    if by == "inductor":
        fused, graphs = compiled_with_passes(original, rounding="original")  # type: ignore[assignment]
    x = inputs(dtype)
    results, expected = with_gradients(fused, x), with_gradients(original, x)
    assert_of_a_statistic_nearby(results[0], x[0], original.get_parameter("weight"))
    for actual, one_rounding, own in zip(results, with_gradients(once, x), expected, strict=True):
        assert share_that_differs(actual, own) < 2e-3
        assert share_that_differs(one_rounding, own) > 0.1
    if by == "inductor":
        assert (norms(graphs.forward), norms(graphs.backward)) == (["rms_norm"], ["rms_norm_backward"])


def assert_of_a_statistic_nearby(y: Tensor, x: Tensor, weight: Tensor) -> None:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    ulp = torch.nextafter(rstd, torch.tensor(torch.inf)) - rstd
    is_found = torch.zeros(len(x), dtype=torch.bool)
    for ulps in range(-2, 3):
        is_found |= (y == weight * (x * (rstd + ulps * ulp)).to(x.dtype)).all(-1)
    assert is_found.all()


@pytest.mark.parametrize("norm", others.NORMS)
@every_half
@pytest.mark.covering(core=1)
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


@pytest.mark.parametrize("by", ["patch", "inductor"])
@pytest.mark.parametrize(("norm", "share"), [(others.T5Norm, 0.41), (others.WeightlessNorm, 0.69)])
@every_half
def test_gradient_of_an_input_cast_twice_is_rounded_once(
    norm: Callable[[int], nn.Module], share: float, dtype: torch.dtype, by: str
) -> None:
    """The fused gradient is more accurate: autograd rounds the gradient of each cast, and their sum."""
    original, fused = others.patched_pair(partial(norm, SIZE), dtype, rounding="original")
    if by == "inductor":
        fused, _ = compiled_with_passes(original, rounding="original")  # type: ignore[assignment]
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


class RoundedProduct(others.WideNorm):
    """Rounds the product, and its sum with the bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


@pytest.mark.parametrize(
    ("norm", "computes"), [(RoundedOffset, "1 + weight, eps: eps"), (RoundedProduct, "scale, bias, eps: eps")]
)
def test_unsupported_rounding_order_is_skipped(norm: Callable[[int], nn.Module], computes: str) -> None:
    module = norm(SIZE)
    name, reason = type(module).__name__, 'rounds in an order that rounding="original" does not support'
    assert others.patch(module, rounding="original").skipped == {"": f"{name}: {reason}"}
    assert others.patch(module).patched == {"": f"{name}: {computes}, dtype: promoted, rounds otherwise"}


# The passes for torch.compile.

Fn = Callable[..., Any]


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def normalized(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(mean_square(wide) + EPS)


def llama(x: Tensor, w: Tensor) -> Tensor:
    return w * normalized(x).to(x.dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    return (normalized(x) * w.float()).to(x.dtype)


def tensors(dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x, r = inputs(dtype, 2)
    weight = torch.rand(SIZE, generator=torch.Generator().manual_seed(2)) + 0.5
    return x, r, weight.to(weight_dtype or dtype)


ORDERS: dict[str, tuple[Fn, str | None]] = {
    "llama": (llama, "llama"),
    "T5": (lambda x, w: w * (x * torch.rsqrt(mean_square(x.float()) + EPS)).to(x.dtype), "llama"),
    "division": (lambda x, w: (x.float() / (mean_square(x.float()) + EPS).sqrt()).to(x.dtype) * w, "llama"),
    "product in float32": (lambda x, w: (normalized(x).to(x.dtype) * w.float()).to(x.dtype), "llama"),
    "offset": (lambda x, w: (normalized(x).to(x.dtype) * (1 + w.float())).to(x.dtype), "llama"),
    "weight rounded first": (lambda x, w: normalized(x).to(x.dtype) * (1 + w.float()).to(x.dtype), "llama"),
    "gemma": (gemma, "once"),
    "gemma's offset": (lambda x, w: (normalized(x) * (1 + w.float())).to(x.dtype), "once"),
    "weight first": (
        lambda x, w: (w.float() * x.float() * torch.rsqrt(mean_square(x.float()) + EPS)).to(x.dtype),
        "once",
    ),
    "without weight": (lambda x, w: normalized(x).to(x.dtype), "once"),
    "unweighted used elsewhere": (lambda x, w: (n := normalized(x).to(x.dtype)) * w + n, "once"),
    "float32 result": (lambda x, w: normalized(x) * w, "once"),
    "float64": (lambda x, w: (x.double() * torch.rsqrt(mean_square(x.double()) + EPS) * w).to(x.dtype), "once"),
    "another 16 bits": (
        lambda x, w: (normalized(x) * w.float()).to(torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16),
        "once",
    ),
    "torch": (lambda x, w: F.rms_norm(x, (SIZE,), w, EPS), "once"),
    "torch, float32 weight": (lambda x, w: F.rms_norm(x, (SIZE,), w.float() * 1.001, EPS), "once"),
    "rounded offset": (lambda x, w: normalized(x).to(x.dtype) * (1 + w), None),
    "rounded offset, one cast": (lambda x, w: (normalized(x) * (1 + w).float()).to(x.dtype), None),
    "factor": (lambda x, w: x * torch.rsqrt(mean_square(x.float()) + EPS).to(x.dtype) * w, None),
    "no casts": (lambda x, w: x * torch.rsqrt(mean_square(x) + EPS) * w, None),
    "squares": (lambda x, w: (x.float() * torch.rsqrt(x.pow(2).float().mean(-1, True) + EPS) * w).to(x.dtype), None),
    "float32 weight": (lambda x, w: w.float() * normalized(x).to(x.dtype), None),
    "float64 weight": (lambda x, w: (w.double() * normalized(x).to(x.dtype)).to(x.dtype), None),
    "float32 input": (lambda x, w: w * normalized(x.float() * 1.001).to(w.dtype), None),
    "another 16 bits between": (
        lambda x, w: (normalized(x).to(torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16) * w).to(x.dtype),
        None,
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@every_half
@pytest.mark.covering(core=1)
def test_passes_recognize_the_rounding_orders_of_programs(order: str, dtype: torch.dtype) -> None:
    """Orders with None are not replaced; the others have the program's bits."""
    fn, rounding = ORDERS[order]
    x, _, w = tensors(dtype)
    compiled, graphs = compiled_with_passes(fn, rounding="original")
    y = compiled(x, w)
    before, after = graphs.of_dynamo
    if rounding is None:
        assert before == after
    else:
        assert f"rounding: {rounding}" in after
        expected = fn(x, w)
        if y.dtype == torch.float32:
            torch.testing.assert_close(y, expected)
        else:
            assert share_that_differs(y, expected) < 5e-4
    once, graphs = compiled_with_passes(fn)
    assert once(x, w).dtype == y.dtype
    assert "rounding: once" in graphs.of_dynamo[1]


def test_float32_programs_have_no_intermediate_roundings() -> None:
    x, _, w = tensors(torch.float32)
    for order in ("llama", "gemma", "T5", "no casts", "rounded offset"):
        compiled, graphs = compiled_with_passes(ORDERS[order][0], rounding="original")
        compiled(x, w)
        assert norms(graphs.forward) == ["rms_norm"], order


SUMS: dict[str, tuple[Fn, torch.dtype, list[str]]] = {
    "plain": (lambda x, r, w: (llama(h := x + r, w), h), torch.bfloat16, ["add_rms_norm"]),
    "plain, gemma": (lambda x, r, w: (gemma(h := x + r, w), h), torch.bfloat16, ["add_rms_norm"]),
    "scaled": (lambda x, r, w: (llama(h := r + x * 0.22, w), h), torch.bfloat16, ["add_rms_norm"]),
    "scaled, float16": (lambda x, r, w: (llama(h := 0.22 * x + r, w), h), torch.float16, ["add_rms_norm"]),
    "scaled, gemma": (lambda x, r, w: (gemma(h := r + x * 0.22, w), h), torch.bfloat16, ["rms_norm"]),
    "scaled, float32": (lambda x, r, w: (gemma(h := r + x * 0.22, w), h), torch.float32, ["add_rms_norm"]),
    "scaled, float64": (lambda x, r, w: (F.rms_norm(h := r + x * 0.22, (SIZE,)), h), torch.float64, ["add_rms_norm"]),
    "alpha": (lambda x, r, w: (llama(h := torch.add(r, x, alpha=0.22), w), h), torch.bfloat16, ["rms_norm"]),
    "alpha, float32": (lambda x, r, w: (llama(h := torch.add(r, x, alpha=0.22), w), h), torch.float32, ["rms_norm"]),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_keep_their_bits(case: str) -> None:
    fn, dtype, expected = SUMS[case]
    x, r, w = tensors(dtype)
    compiled, graphs = compiled_with_passes(fn, rounding="original")
    outputs, own = compiled(x, r, w), fn(x, r, w)
    assert norms(graphs.forward) == expected
    if isinstance(own, tuple):
        assert torch.equal(outputs[1], own[1])
        outputs, own = outputs[0], own[0]
    if dtype in HALVES:
        assert share_that_differs(outputs, own) < 5e-4
    # Rounding once also fuses sums whose fused product, or product rounded before an unrounded sum, has other bits.
    compiled, graphs = compiled_with_passes(fn)
    compiled(x, r, w)
    assert norms(graphs.forward) == ["add_rms_norm"]


def test_scaled_torch_add_is_not_fused_into_a_norm_that_rounds() -> None:
    """add_rms_norm with rounding="llama" would also round the product."""

    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.add(r, x, alpha=0.22)
        return normops.rms_norm(h, SIZE, w, EPS, rounding="llama"), h

    compiled, graphs = compiled_with_passes(fn)
    compiled(*tensors(torch.bfloat16))
    assert norms(graphs.forward) == ["rms_norm"]


@pytest.mark.parametrize(("dtype", "additions"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_16_bit_gradients_are_rounded_before_an_addition(dtype: torch.dtype, additions: int) -> None:

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return llama(x, w).sin() + x.mm(x.detach().T).mm(x.detach())

    x, _, w = tensors(dtype)
    compiled, graphs = compiled_with_passes(fn, rounding="original")
    results = [torch.autograd.grad(f(leaf := x.clone().requires_grad_(), w).sum(), leaf)[0] for f in (fn, compiled)]
    assert norms(graphs.backward) == ["rms_norm_backward"]
    assert len([name for name in graphs.backward if name == "aten.add.Tensor"]) == additions
    if dtype == torch.bfloat16:
        assert share_that_differs(*results) < 2e-3


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(llama(x, w), cos, sin)


@pytest.mark.parametrize("rounding", ["once", "original"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_16_bit_rotations_are_not_fused_with_original_rounding(dtype: torch.dtype, rounding: ModelRounding) -> None:
    x, r, w = tensors(dtype)
    compiled, graphs = compiled_with_passes(rotated, rounding=rounding)
    y = compiled(x, w, r.cos(), r.sin())
    is_joined = rounding == "once" or dtype == torch.float32
    assert norms(graphs.forward) == ["rms_norm_rope" if is_joined else "rms_norm"]
    if not is_joined:
        assert share_that_differs(y, rotated(x, w, r.cos(), r.sin())) < 5e-4


def test_norm_that_rounds_does_so_before_a_fused_rotation() -> None:
    x, r, w = tensors(torch.bfloat16)

    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turned(normops.rms_norm(x, SIZE, w, EPS, rounding="llama"), cos, sin)

    compiled, graphs = compiled_with_passes(fn)
    y = compiled(x, w, r.cos(), r.sin())
    assert norms(graphs.forward) == ["rms_norm_rope"]
    assert torch.equal(y, normops.rms_norm_rope(x, r.cos(), r.sin(), SIZE, w, EPS, rounding="llama"))


def granite(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=128,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.22,
    )
    model: nn.Module = GraniteForCausalLM(config).eval()
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model, torch.randint(3, 128, (2, 12))


@pytest.mark.release  # compiles a whole model
@pytest.mark.parametrize("rounding", ["once", "original"])
@pytest.mark.parametrize("emulate", [False, True])
def test_granite_by_inductor(rounding: ModelRounding, emulate: bool) -> None:
    """Without emulate_precision_casts, Inductor omits roundings between fused operations."""
    model, ids = granite(torch.bfloat16)
    torch._dynamo.reset()
    options = normops.inductor_options({"emulate_precision_casts": emulate}, rounding=rounding)
    compiled = torch.compile(model, fullgraph=True, options=options)
    with torch.no_grad():
        y, own = (run(input_ids=ids, use_cache=False).logits for run in (compiled, model))
        ran = operators_run(lambda: compiled(input_ids=ids, use_cache=False))
    assert ran == ["normops::rms_norm", *["normops::add_rms_norm"] * 4]
    assert (share_that_differs(y, own) < 0.25) == (emulate and rounding == "original")


@pytest.mark.parametrize("rounding", ["once", "original"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covering(core=1)
def test_granite_fuses_scaled_additions(dtype: torch.dtype, rounding: ModelRounding) -> None:
    """All four additions of two layers fuse with their products; rounding="original" keeps the bits of the logits."""
    model, ids = granite(dtype)
    compiled, graphs = compiled_with_passes(model, rounding=rounding)
    outputs = []
    for run in (model, compiled):
        model.zero_grad()
        logits = run(input_ids=ids, use_cache=False).logits
        logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits).to(dtype))
        outputs.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for actual, own in zip(outputs[1], outputs[0], strict=True):
        assert actual is not None
        assert own is not None
        error = (actual.double() - own.double()).abs().max() / own.double().abs().max()
        assert error <= (1e-5 if dtype == torch.float32 else 5e-2)
    if dtype == torch.bfloat16:
        # One different statistic of a norm changes later tokens, too.
        assert (share_that_differs(outputs[1][0], outputs[0][0]) < 0.25) == (rounding == "original")
    assert norms(graphs.forward) == ["rms_norm", *["add_rms_norm"] * 4]
    assert norms(graphs.backward) == ["rms_norm_backward"] * 5


def test_unknown_rounding_raises() -> None:
    with pytest.raises(ValueError) as raised:
        normops.inductor_options(rounding="twice")  # type: ignore[arg-type]
    assert str(raised.value) == 'rounding: expected "once" or "original", but got \'twice\''


def test_cache_keys_depend_on_the_rounding() -> None:
    once, original = normops.inductor_options(), normops.inductor_options(rounding="original")
    assert once != original == normops.inductor_options(rounding="original")
    assert once == normops.inductor_options(rounding="once") == normops.inductor_options(original)
    uuids = [each.uuid() for options in (once, original) for each in options.values()]
    assert len(set(uuids)) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": normops.inductor_options(rounding="original")},
        {"backend": "normops", "options": {"rounding": "original"}},
        {"backend": "normops", "options": normops.inductor_options(rounding="original")},
    ],
)
def test_original_rounding_by_inductor(arguments: dict[str, Any]) -> None:
    torch._dynamo.reset()
    x, _, w = tensors(torch.bfloat16)
    y = torch.compile(llama, fullgraph=True, **arguments)(x, w)
    assert torch.equal(y, normops.rms_norm(x, SIZE, w, EPS, rounding="llama"))
