"""The oracle rejects wrong kernels: each mutant below is a mistake that a real kernel has made or could make."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import cases, oracle
from reference.cases import EPS

Forward = Callable[[Tensor, Tensor], Tensor]
SHAPE = (40, 96)
OFFSET = 1.0


def rstd(x: Tensor, eps: float = EPS) -> Tensor:
    return torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)


def scale(w: Tensor) -> Tensor:
    return w.double() + OFFSET


FORWARD_MUTANTS: dict[str, Forward] = {
    "no reduction": lambda x, w: x.double() * scale(w),
    "eps dropped": lambda x, w: x.double() * rstd(x, 0.0) * scale(w),
    "eps of another type": lambda x, w: x.double() * rstd(x, EPS + torch.finfo(torch.bfloat16).eps) * scale(w),
    "eps outside the root": lambda x, w: (
        x.double() / (x.double().square().mean(-1, keepdim=True).sqrt() + EPS) * scale(w)
    ),
    "mean over one column too few": lambda x, w: (
        x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) / 95 + EPS) * scale(w)
    ),
    "last column left out of the sum": lambda x, w: (
        x.double() * torch.rsqrt(x[:, :-1].double().square().sum(-1, keepdim=True) / 96 + EPS) * scale(w)
    ),
    "mean subtracted": lambda x, w: (x - x.mean(-1, keepdim=True)).double() * rstd(x) * scale(w),
    "weight left out": lambda x, w: x.double() * rstd(x),
    "offset dropped": lambda x, w: x.double() * rstd(x) * w.double(),
    "statistics of the next row": lambda x, w: x.double() * rstd(x).roll(1, 0) * scale(w),
    "rounded before the weight": lambda x, w: (x.double() * rstd(x)).to(x.dtype).double() * scale(w),
    "weight and offset rounded": lambda x, w: x.double() * rstd(x) * (w + OFFSET).to(torch.bfloat16).double(),
    "sum of squares in a half type": lambda x, w: (
        x.double() * torch.rsqrt(x.to(torch.bfloat16).square().mean(-1, keepdim=True).double() + EPS) * scale(w)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [None, *FORWARD_MUTANTS])
def test_forward_mutants(name: str | None, dtype: torch.dtype) -> None:
    if name == "rounded before the weight" and dtype == torch.float32:
        pytest.skip("computing in float32 rounds there")
    x, w = cases.values(SHAPE, dtype, 1), cases.values((96,), torch.float32, 2)
    definition: Forward = lambda x, w: x.double() * rstd(x) * scale(w)  # noqa: E731
    output = (FORWARD_MUTANTS[name] if name else definition)(x, w).to(dtype)
    rejected = oracle.violation(output, oracle.rms_norm(x, (96,), w, EPS, OFFSET)) is not None
    assert rejected == (name is not None)


Backward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def backward(
    dy: Tensor, x: Tensor, w: Tensor, residual: Tensor, *, r: Tensor | None = None, projection: float = 1.0
) -> tuple[Tensor, Tensor]:
    r = rstd(x) if r is None else r
    g, h = dy.double() * scale(w), x.double()
    dx = r * (g - projection * h * r**2 * (g * h).mean(-1, keepdim=True)) + residual.double()
    return dx, (dy.double() * h * r).sum(0)


def half_sum(terms: Tensor) -> Tensor:
    total = torch.zeros(terms.shape[1], dtype=torch.bfloat16)
    for row in terms:
        total += row.to(torch.bfloat16)
    return total.double()


BACKWARD_MUTANTS: dict[str, Backward] = {
    "rstd taken for a constant": lambda dy, x, w, s: backward(dy, x, w, s, projection=0.0),
    "weight left out of the projection": lambda dy, x, w, s: (
        rstd(x) * (dy.double() * scale(w) - x.double() * rstd(x) ** 2 * (dy * x).double().mean(-1, keepdim=True))
        + s.double(),
        backward(dy, x, w, s)[1],
    ),
    "projection not squared": lambda dy, x, w, s: (
        rstd(x)
        * (dy.double() * scale(w) - x.double() * rstd(x) * (dy.double() * scale(w) * x.double()).mean(-1, keepdim=True))
        + s.double(),
        backward(dy, x, w, s)[1],
    ),
    "eps dropped": lambda dy, x, w, s: backward(dy, x, w, s, r=rstd(x, 0.0)),
    "offset dropped": lambda dy, x, w, s: backward(dy, x, w - OFFSET, s),
    "residual dropped": lambda dy, x, w, s: backward(dy, x, w, torch.zeros_like(s)),
    "residual rounded in": lambda dy, x, w, s: (
        backward(dy, x, w, torch.zeros_like(s))[0].to(torch.bfloat16).double() + s.double(),
        backward(dy, x, w, s)[1],
    ),
    "grad_input computed after grad_output was overwritten": lambda dy, x, w, s: (
        backward(backward(dy, x, w, s)[0], x, w, s)[0],
        backward(dy, x, w, s)[1],
    ),
    "grad_weight without rstd": lambda dy, x, w, s: (backward(dy, x, w, s)[0], (dy.double() * x.double()).sum(0)),
    "grad_weight without the last row": lambda dy, x, w, s: (
        backward(dy, x, w, s)[0],
        (dy.double() * x.double() * rstd(x))[:-1].sum(0),
    ),
    "grad_weight scaled by the weight": lambda dy, x, w, s: (
        backward(dy, x, w, s)[0],
        backward(dy, x, w, s)[1] * scale(w),
    ),
    "grad_weight summed in bfloat16": lambda dy, x, w, s: (
        backward(dy, x, w, s)[0],
        half_sum(dy.double() * x.double() * rstd(x)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [None, *BACKWARD_MUTANTS])
def test_backward_mutants(name: str | None, dtype: torch.dtype) -> None:
    dy, x, residual = (cases.values(SHAPE, dtype, seed) for seed in (1, 2, 3))
    w = cases.values((96,), torch.float32, 4)
    dx, dw = (BACKWARD_MUTANTS[name] if name else backward)(dy, x, w, residual)
    expected = oracle.rms_norm_backward(dy, x, (96,), w, EPS, OFFSET, grad_residual=residual)
    assert expected.grad_weight is not None
    rejected = (
        oracle.violation(dx.to(dtype), expected.grad_input) is not None
        or oracle.violation(dw.float(), expected.grad_weight) is not None
    )
    assert rejected == (name is not None)


Gated = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def gated(
    x: Tensor, g: Tensor, w: Tensor, norm_first: bool, *, a: Tensor | None = None, r: Tensor | None = None
) -> Tensor:
    a = F.silu(g) if a is None else a
    h = x if norm_first else x * a
    r = rstd(h) if r is None else r
    return h * r * (w + OFFSET) * (a if norm_first else 1)


class Rounded(torch.autograd.Function):
    """To bfloat16, forward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


rounded: Callable[[Tensor], Tensor] = Rounded.apply

# Those that keep the output are seen in the gradients, which autograd derives.
GATED_MUTANTS: dict[str, Gated] = {
    "sigmoid for silu": lambda x, g, w, first: gated(x, g, w, first, a=g.sigmoid()),
    "gate left out": lambda x, g, w, first: gated(x, g, w, first, a=1 + 0 * g),
    "gate not activated": lambda x, g, w, first: gated(x, g, w, first, a=g),
    "the other order": lambda x, g, w, first: gated(x, g, w, not first),
    "offset dropped": lambda x, g, w, first: gated(x, g, w - OFFSET, first),
    "eps dropped": lambda x, g, w, first: gated(x, g, w, first, r=rstd(x if first else x * F.silu(g), 0.0)),
    "statistics of the other input": lambda x, g, w, first: gated(
        x, g, w, first, r=rstd(x * F.silu(g) if first else x)
    ),
    "gate of the next row": lambda x, g, w, first: gated(x, g, w, first, a=F.silu(g.roll(1, 0))),
    "activation rounded": lambda x, g, w, first: gated(x, g, w, first, a=rounded(F.silu(g))),
    "sigmoid rounded": lambda x, g, w, first: gated(x, g, w, first, a=g * rounded(g.sigmoid())),
    "a polynomial of degree six": lambda x, g, w, first: gated(
        x, g, w, first, a=g * (0.5 + 0.25 * g - g**3 / 48 + g**5 / 480)
    ),
    "rstd taken for a constant": lambda x, g, w, first: gated(
        x, g, w, first, r=rstd(x if first else x * F.silu(g)).detach()
    ),
    "slope without its second term": lambda x, g, w, first: gated(x, g, w, first, a=g * g.sigmoid().detach()),
    "slope without its first term": lambda x, g, w, first: gated(x, g, w, first, a=g.detach() * g.sigmoid()),
    "no gradient through the gate": lambda x, g, w, first: gated(x, g.detach(), w, first) + 0 * g,
    "gradient not through the last row's gate": lambda x, g, w, first: gated(
        x, g, w, first, a=torch.cat([F.silu(g[:-1]), F.silu(g[-1:]).detach()])
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", [None, *GATED_MUTANTS])
def test_gated_mutants(name: str | None, norm_first: bool, dtype: torch.dtype) -> None:
    dy, x = (cases.values(SHAPE, dtype, seed) for seed in (1, 2))
    g, w = cases.values(SHAPE, torch.float32, 3, scale=1.0), cases.values((96,), torch.float32, 4)
    leaves = [tensor.double().requires_grad_() for tensor in (x, g, w)]
    norm: Callable[..., Tensor] = GATED_MUTANTS[name] if name else gated
    output = norm(*leaves, norm_first)
    gradients = torch.autograd.grad(output, leaves, dy.double())
    gating: dict[str, Any] = {"weight_offset": OFFSET, "norm_before_gate": norm_first}
    expected = oracle.gated_rms_norm_backward(dy, x, g, (96,), w, EPS, **gating)
    problems = [oracle.violation(output.to(dtype), oracle.gated_rms_norm(x, g, (96,), w, EPS, **gating))]
    for gradient, bounded, result_dtype in zip(gradients, expected, (dtype, torch.float32, torch.float32), strict=True):
        assert bounded is not None
        problems.append(oracle.violation(gradient.to(result_dtype), bounded))
    assert any(problem is not None for problem in problems) == (name is not None)


def test_elements_never_written_are_rejected() -> None:
    x = cases.values(SHAPE, torch.float32)
    expected = oracle.rms_norm(x, (96,), None, EPS)
    output = torch.from_numpy(expected.value).float()
    assert oracle.violation(output, expected) is None
    output[39, 95] = torch.nan
    problem = oracle.violation(output, expected)
    assert problem is not None
    assert "1 of 3840 elements out of bounds; worst at (39, 95)" in problem
