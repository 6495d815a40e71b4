"""The passes for torch.compile fuse scales, shifts, gates, residuals and activations into the norm before them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from assertions import assert_same_bits
from test_inductor import assert_close, results
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normops
from reference.cases import EPS, values

SAMPLES, TOKENS, SIZE = 2, 5, 32

Modulated = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def problem(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns tokens, a tensor of the same shape, numbers for each sample, and a weight."""
    torch.manual_seed(0)
    shapes = [(SAMPLES, TOKENS, SIZE)] * 2 + [(SAMPLES, 4 * SIZE), (SIZE,)]
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def plain(x: Tensor, w: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (SIZE,), w, 1e-6)


def llama(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def parts(m: Tensor) -> tuple[Tensor, ...]:
    return m.unsqueeze(1).chunk(4, -1)


def widened(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scale, shift, *_ = (part.float() for part in parts(m))
    return (plain(x) * (1.0 + scale) + shift).to(x.dtype)


def written_between(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scale = r * 1
    factor = 1 + scale
    scale.zero_()
    return plain(x) * factor + scale


def written_after(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Tensor:
    shift = r * 1
    y = plain(x) + shift
    shift.zero_()
    return y


# Modulations that fuse into one norm, and the additions and products left in the forward: rounding once and original.
JOINED: dict[str, tuple[Modulated, int, int]] = {
    "scale and shift": (lambda x, r, m, w: plain(x) * (1 + parts(m)[0]) + parts(m)[1], 0, 1),
    "shift first": (lambda x, r, m, w: parts(m)[1] + (parts(m)[0] + 1.0) * plain(x), 0, 1),
    "scale alone": (lambda x, r, m, w: plain(x).mul(parts(m)[0]), 0, 0),
    "shift alone": (lambda x, r, m, w: plain(x).add(parts(m)[0]), 0, 0),
    "for each token": (lambda x, r, m, w: plain(x) * (1 + r) + r.sin(), 0, 1),
    "for each position": (lambda x, r, m, w: plain(x) * r[:1] + r[0], 0, 0),
    "for each column": (lambda x, r, m, w: r + plain(x) * w, 0, 0),
    "addcmul": (lambda x, r, m, w: torch.addcmul(parts(m)[1], plain(x), 1 + parts(m)[0]), 0, 2),
    "addcmul of a gate": (lambda x, r, m, w: r.addcmul(parts(m)[0].tanh(), plain(x)), 0, 1),
    "casts": (widened, 0, 3),
    "in float32": (lambda x, r, m, w: (plain(x.float()) * (1 + parts(m)[0].float())).to(x.dtype), 0, 0),
    "in float32, by a rounded factor": (lambda x, r, m, w: (plain(x.float()) * (1 + parts(m)[0])).to(x.dtype), 0, 1),
    "in float32, then not": (lambda x, r, m, w: plain(x.float(), w.float()).to(x.dtype) + r, 0, 1),
    "in float32 alone": (lambda x, r, m, w: plain(x.float(), w.float()).to(x.dtype), 0, 0),
    "residual": (lambda x, r, m, w: r + llama(x, w), 0, 0),
    "residual, rounded once": (lambda x, r, m, w: r + plain(x, w), 0, 1),
    # The factor and the weight are multiplied before the norm.
    "gate": (lambda x, r, m, w: r + parts(m)[0].tanh() * plain(x, w), 1, 2),
    "weight and scale": (lambda x, r, m, w: llama(x, w) * (1 + parts(m)[0]), 2, 2),
    "weight and a scale for each position": (lambda x, r, m, w: plain(x, w) * r[:1], 1, 1),
    "sum, used elsewhere": (lambda x, r, m, w: (h := plain(x) + r) + h.sin().cos(), 1, 1),
    "scale written between": (written_between, 2, 2),
    "shift written after": (written_after, 1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", JOINED)
def test_modulations_fuse_into_one_operator_each_way(case: str, dtype: torch.dtype) -> None:
    fn, once, _ = JOINED[case]
    compiled, graphs = compiled_with_passes(fn, dynamic=True)
    assert_close(results(compiled, problem(dtype)), results(fn, problem(dtype)), dtype)
    assert norms(graphs.forward) == ["rms_norm"]
    assert norms(graphs.backward) == ["rms_norm_backward"]
    assert arithmetic(graphs.forward) == once
    # Modulations may be cast, tokens may not.
    assert graphs.forward.count("aten._to_copy.default") <= 2


def test_modulations_fuse_inside_checkpoints() -> None:
    def fn(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Any:
        return checkpoint(JOINED["scale and shift"][0], x, r, m, w, use_reentrant=False)

    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, problem(torch.float32)), results(fn, problem(torch.float32)), torch.float32)
    assert (norms(graphs.forward), arithmetic(graphs.forward)) == (["rms_norm"], 0)


def biased_after_a_sum(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return normops.rms_norm(x + r, SIZE, w, bias=parts(m)[0])


def biased_and_rotated(x: Tensor, r: Tensor, m: Tensor, w: Tensor) -> Tensor:
    y, angles = normops.rms_norm(x, SIZE, w, bias=parts(m)[0]), r.detach()
    first, second = y.chunk(2, -1)
    return y * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


@pytest.mark.parametrize("fn", [biased_after_a_sum, biased_and_rotated])
def test_biased_norm_is_not_fused_into_operators_without_bias(fn: Modulated) -> None:
    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, problem(torch.float32)), results(fn, problem(torch.float32)), torch.float32)
    assert norms(graphs.forward) == ["rms_norm"]


def arithmetic(names: list[str]) -> int:
    return sum(name in ("aten.add.Tensor", "aten.mul.Tensor", "aten.addcmul.default") for name in names)


@pytest.mark.parametrize("case", JOINED)
def test_original_rounding_gives_the_bits_of_eager(case: str) -> None:
    fn, _, original = JOINED[case]
    compiled, graphs = compiled_with_passes(fn, rounding="original")
    assert_same_bits(results(compiled, problem(torch.bfloat16)), results(fn, problem(torch.bfloat16)))
    assert arithmetic(graphs.forward) == original


# Modulations that do not fuse, and the additions and products left after the norm.
LEFT: dict[str, tuple[Modulated, int]] = {
    "weight and a scale for each token": (lambda x, r, m, w: plain(x, w) * r, 1),
    "used twice": (lambda x, r, m, w: (y := plain(x)) * parts(m)[0] + y, 2),
    "to itself": (lambda x, r, m, w: (y := plain(x)) + y, 1),
    "numbers": (lambda x, r, m, w: plain(x) * 2 + 1, 2),
    "a number for each row": (lambda x, r, m, w: plain(x) * r[..., :1], 1),
    "more rows": (lambda x, r, m, w: plain(x) + torch.stack([r, r]), 1),
    "more rows of one": (lambda x, r, m, w: plain(x[:1]) + r, 1),
    "scaled by alpha": (lambda x, r, m, w: torch.add(r, plain(x), alpha=2), 1),
    "scaled by value": (lambda x, r, m, w: torch.addcmul(r, plain(x), parts(m)[0], value=2), 1),
    "in place": (lambda x, r, m, w: (r * 1).add_(plain(x)), 1),
    "wider": (lambda x, r, m, w: plain(x) * r.double(), 1),
    "a sum in another order": (lambda x, r, m, w: r.detach().mT.contiguous().mT + plain(x), 1),
    "after the sum": (lambda x, r, m, w: (plain(x) + r) * parts(m)[0], 1),
    "a second sum": (lambda x, r, m, w: plain(x) + r + parts(m)[0], 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_unsupported_modulations_stay_after_the_norm(case: str) -> None:
    fn, left = LEFT[case]
    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, problem(torch.float32)), results(fn, problem(torch.float32)), torch.float32)
    assert norms(graphs.forward) == ["rms_norm"]
    assert arithmetic(graphs.forward[graphs.forward.index("normops.rms_norm.default") :]) == left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["once", "original"])
def test_activations_fuse_into_channel_norms(rounding: Any, dtype: torch.dtype) -> None:
    block = nn.Sequential(
        *(normops.RMSNorm(8, EPS, dim=1, bias=True), nn.SiLU(), normops.RMSNorm(8, EPS, dim=1), nn.Sigmoid()),
        *(normops.RMSNorm(8, EPS, dim=1, activation="silu"), nn.SiLU(), normops.RMSNorm(8, EPS, dim=1), nn.ReLU()),
    ).to(dtype)
    x = values((2, 8, 9, 4), dtype).requires_grad_()
    (expected,) = torch.autograd.grad((y := block(x)).square().sum(), x)
    compiled, graphs = compiled_with_passes(block, rounding=rounding)
    (gradient,) = torch.autograd.grad((output := compiled(x)).square().sum(), x)
    if dtype == torch.float32 or rounding == "original":
        torch.testing.assert_close((output, gradient), (y, expected))
    assert graphs.forward.count("normops.channel_rms_norm.default") == 4
    joins = rounding == "once" or dtype == torch.float32
    activations = re.findall(r"channel_rms_norm.*activation: (\w+)", graphs.of_dynamo[1])
    assert activations == ["silu" if joins else "identity", "sigmoid" if joins else "identity", "silu", "identity"]
