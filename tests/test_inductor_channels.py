"""Tests that the passes for torch.compile replace handwritten norms over the channels of ``[N, C, H, W]``."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from torch import Tensor

from normops.inductor import ModelRounding

C, EPS = 8, 1e-3
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)


FORMS: dict[str, Norm] = {
    "subscript": lambda x, w, b: normalized(x) * w[:, None, None],
    "view": lambda x, w, b: x * torch.rsqrt(torch.mean(x.pow(2), dim=1, keepdim=True) + EPS) * w.view(1, -1, 1, 1),
    "weight first": lambda x, w, b: w[:, None, None] * (x / (x.square().mean(-3, True) + EPS).sqrt()),
    "sum": lambda x, w, b: x / torch.sqrt(x.square().sum(1, keepdim=True) / C + EPS),
    "float32": lambda x, w, b: (
        (x.float() * torch.rsqrt(x.float().pow(2).mean([1], True) + EPS)).to(x) * w[:, None, None]
    ),
    "offset, bias": lambda x, w, b: normalized(x) * (1 + w[:, None, None]) + b[:, None, None],
    "bias, SiLU": lambda x, w, b: F.silu(normalized(x) * w[:, None, None] + b[:, None, None]),
    "unit norm": lambda x, w, b: F.normalize(x, dim=1) * C**0.5 * w.view(-1, 1, 1),
    "unit norm, bias, SiLU": lambda x, w, b: F.silu(
        F.normalize(x, dim=-3) * C**0.5 * w[:, None, None] + b[None, :, None, None]
    ),
}

# Their number of channels is a constant of the program, which torch.compile does not compare with an open size.
OF_KNOWN_SIZE = ("sum", "unit norm", "unit norm, bias, SiLU")


def problem(dtype: torch.dtype, *shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape or (2, C, 6, 5), generator=generator)
    w, b = torch.rand(C, generator=generator) + 0.5, torch.randn(C, generator=generator)
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (x, w, b))


def compare(fn: Norm, compiled: Norm, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Compares outputs, their strides and all gradients."""
    expected, actual = fn(*inputs), compiled(*inputs)
    assert (actual.stride(), actual.dtype) == (expected.stride(), expected.dtype)
    gradient = torch.linspace(-1, 1, expected.numel()).view_as(expected).to(expected.dtype)
    pairs = [torch.autograd.grad(output, inputs, gradient, allow_unused=True) for output in (actual, expected)]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2  # the original rounds several times to 16 bits
    for a, b in zip((actual, *pairs[0]), (expected, *pairs[1]), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=tolerance * float(b.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.covering(core=1)
def test_norms_over_channels_become_one_operator_each_way(form: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn, inputs = FORMS[form], problem(dtype)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    compare(fn, compiled, inputs, dtype)
    if not dynamic or form not in OF_KNOWN_SIZE:
        assert norms(graphs.forward) == ["channel_rms_norm"]
        assert norms(graphs.backward) == ["channel_rms_norm_backward"]
        leftovers = ("rsqrt", "sqrt", "mean", "pow", "sum", "silu", "sigmoid", "add", "linalg_vector_norm")
        assert not [name for name in graphs.forward if name.split(".")[1] in leftovers]


OTHERS: dict[str, Norm] = {
    "weight along the height": lambda x, w, b: normalized(x) * w[:, None],
    "bias along the height": lambda x, w, b: normalized(x) + b[:, None],
    "bias per pixel": lambda x, w, b: normalized(x) + x[:1, :1],
    "bias used twice": lambda x, w, b: (y := normalized(x)) + b[:, None, None] + y,
}
UNCHANGED: dict[str, Norm] = {
    "height": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + EPS) * w[:, None],
    "pixels": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + EPS) * w[:, None, None],
    "another size": lambda x, w, b: x / torch.sqrt(x.square().sum(1, keepdim=True) / 7 + EPS),
    "unit norm alone": lambda x, w, b: F.normalize(x, dim=1) * w[:, None, None],
    "another factor": lambda x, w, b: F.normalize(x, dim=1) * 2.5 * w[:, None, None],
    "another norm": lambda x, w, b: F.normalize(x, p=1.0, dim=1) * C**0.5 * w[:, None, None],
    "channels_last": lambda x, w, b: normalized(x.to(memory_format=torch.channels_last)) * w[:, None, None],
}


@pytest.mark.parametrize("other", [*OTHERS, *UNCHANGED])
def test_other_operations_stay(other: str) -> None:
    fn, inputs = (OTHERS | UNCHANGED)[other], problem(torch.float32, 2, C, C, C)
    compiled, graphs = compiled_with_passes(fn)
    compare(fn, compiled, inputs, torch.float32)
    assert norms(graphs.forward) == (["channel_rms_norm"] if other in OTHERS else [])


@pytest.mark.parametrize("form", FORMS)
def test_rounding_original_replaces_only_norms_whose_rounding_it_reproduces(form: str) -> None:
    rounding: ModelRounding = "original"
    for dtype in (torch.float32, torch.bfloat16):
        compiled, graphs = compiled_with_passes(FORMS[form], rounding=rounding)
        compare(FORMS[form], compiled, problem(dtype), dtype)
        is_replaced = dtype == torch.float32 or form == "float32"
        assert norms(graphs.forward) == (["channel_rms_norm"] if is_replaced else [])
