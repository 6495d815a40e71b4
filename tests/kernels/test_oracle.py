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
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SHAPE = (40, 96)
OFFSET = 1.0


def mean_square(x: Tensor) -> Tensor:
    return x.double().square().mean(-1, keepdim=True)


def rstd(x: Tensor, eps: float = EPS) -> Tensor:
    return torch.rsqrt(mean_square(x) + eps)


def scale(w: Tensor) -> Tensor:
    return w.double() + OFFSET


def forward(x: Tensor, w: Tensor, r: Tensor | None = None) -> Tensor:
    return x.double() * (rstd(x) if r is None else r) * scale(w)


FORWARD_MUTANTS: dict[str, Forward] = {
    "eps dropped": lambda x, w: forward(x, w, rstd(x, 0.0)),
    "eps of another type": lambda x, w: forward(x, w, rstd(x, EPS + torch.finfo(torch.bfloat16).eps)),
    "eps outside the root": lambda x, w: forward(x, w, 1 / (mean_square(x).sqrt() + EPS)),
    "mean over one column too few": lambda x, w: forward(x, w, torch.rsqrt(mean_square(x) * 96 / 95 + EPS)),
    "last column left out of the sum": lambda x, w: forward(x, w, torch.rsqrt(mean_square(x[:, :-1]) * 95 / 96 + EPS)),
    "weight left out": lambda x, w: x.double() * rstd(x),
    "offset dropped": lambda x, w: forward(x, w - OFFSET),
    "rounded before the weight": lambda x, w: (x.double() * rstd(x)).to(x.dtype).double() * scale(w),
    "weight and offset rounded": lambda x, w: x.double() * rstd(x) * (w + OFFSET).to(torch.bfloat16).double(),
    "sum of squares in a half type": lambda x, w: forward(
        x, w, torch.rsqrt(x.to(torch.bfloat16).square().mean(-1, keepdim=True).double() + EPS)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [None, *FORWARD_MUTANTS])
def test_forward_mutants_are_rejected(name: str | None, dtype: torch.dtype) -> None:
    if name == "rounded before the weight" and dtype == torch.float32:
        pytest.skip("computing in float32 rounds there")
    x, w = cases.values(SHAPE, dtype, 1), cases.values((96,), torch.float32, 2)
    output = (FORWARD_MUTANTS[name] if name else forward)(x, w).to(dtype)
    rejected = oracle.violation(output, oracle.rms_norm(x, (96,), w, EPS, OFFSET)) is not None
    assert rejected == (name is not None)


def grad_input(
    dy: Tensor, x: Tensor, w: Tensor, residual: Tensor, r: Tensor | None = None, projection: Tensor | None = None
) -> Tensor:
    r, g = rstd(x) if r is None else r, dy.double() * scale(w)
    if projection is None:
        projection = x.double() * r**2 * (g * x.double()).mean(-1, keepdim=True)
    return r * (g - projection) + residual.double()


def products(dy: Tensor, x: Tensor) -> Tensor:
    return dy.double() * x.double() * rstd(x)


def grad_weight(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return products(dy, x).sum(0)


def half_sum(terms: Tensor) -> Tensor:
    total = torch.zeros(terms.shape[1], dtype=torch.bfloat16)
    for row in terms:
        total += row.to(torch.bfloat16)
    return total.double()


GRAD_INPUT_MUTANTS: dict[str, Gradient] = {
    "rstd taken for a constant": lambda dy, x, w, s: grad_input(dy, x, w, s, projection=torch.zeros(())),
    "weight left out of the projection": lambda dy, x, w, s: grad_input(
        dy, x, w, s, projection=x.double() * rstd(x) ** 2 * (dy * x).double().mean(-1, keepdim=True)
    ),
    "projection not squared": lambda dy, x, w, s: grad_input(
        dy, x, w, s, projection=x.double() * rstd(x) * (dy.double() * scale(w) * x.double()).mean(-1, keepdim=True)
    ),
    "eps dropped": lambda dy, x, w, s: grad_input(dy, x, w, s, rstd(x, 0.0)),
    "offset dropped": lambda dy, x, w, s: grad_input(dy, x, w - OFFSET, s),
    "residual dropped": lambda dy, x, w, s: grad_input(dy, x, w, torch.zeros_like(s)),
    "residual rounded in": lambda dy, x, w, s: grad_input(dy, x, w, 0 * s).to(torch.bfloat16).double() + s.double(),
    "computed after grad_output was overwritten": lambda dy, x, w, s: grad_input(grad_input(dy, x, w, s), x, w, s),
}
GRAD_WEIGHT_MUTANTS: dict[str, Gradient] = {
    "without the last row": lambda dy, x, w, s: products(dy, x)[:-1].sum(0),
    "scaled by the weight": lambda dy, x, w, s: products(dy, x).sum(0) * scale(w),
    "summed in bfloat16": lambda dy, x, w, s: half_sum(products(dy, x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [None, *GRAD_INPUT_MUTANTS, *GRAD_WEIGHT_MUTANTS])
def test_backward_mutants_are_rejected(name: str | None, dtype: torch.dtype) -> None:
    dy, x, residual = (cases.values(SHAPE, dtype, seed) for seed in (1, 2, 3))
    w = cases.values((96,), torch.float32, 4)
    dx = GRAD_INPUT_MUTANTS.get(str(name), grad_input)(dy, x, w, residual)
    dw = GRAD_WEIGHT_MUTANTS.get(str(name), grad_weight)(dy, x, w, residual)
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
    """Rounds to bfloat16 in the forward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


rounded: Callable[[Tensor], Tensor] = Rounded.apply

# Mutants with the right output are detected by the gradients, which autograd derives.
GATED_MUTANTS: dict[str, Gated] = {
    "the other order": lambda x, g, w, first: gated(x, g, w, not first),
    "eps dropped": lambda x, g, w, first: gated(x, g, w, first, r=rstd(x if first else x * F.silu(g), 0.0)),
    "statistics of the other input": lambda x, g, w, first: gated(
        x, g, w, first, r=rstd(x * F.silu(g) if first else x)
    ),
    "activation rounded": lambda x, g, w, first: gated(x, g, w, first, a=rounded(F.silu(g))),
    "sigmoid rounded": lambda x, g, w, first: gated(x, g, w, first, a=g * rounded(g.sigmoid())),
    "a polynomial of degree six": lambda x, g, w, first: gated(
        x, g, w, first, a=g * (0.5 + 0.25 * g - g**3 / 48 + g**5 / 480)
    ),
    "rstd taken for a constant": lambda x, g, w, first: gated(
        x, g, w, first, r=rstd(x if first else x * F.silu(g)).detach()
    ),
    "slope without its second term": lambda x, g, w, first: gated(x, g, w, first, a=g * g.sigmoid().detach()),
    "no gradient through the gate": lambda x, g, w, first: gated(x, g.detach(), w, first) + 0 * g,
    "gradient not through the last row's gate": lambda x, g, w, first: gated(
        x, g, w, first, a=torch.cat([F.silu(g[:-1]), F.silu(g[-1:]).detach()])
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", [None, *GATED_MUTANTS])
def test_gated_mutants_are_rejected(name: str | None, norm_first: bool, dtype: torch.dtype) -> None:
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
