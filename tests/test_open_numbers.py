"""Code that torch.compile compiled for one value of a symbolic number is not reused for another value.

A Python float that varies is an input of the graph. torch's cache keys do not contain what a pass derives from its
value, unless torch traces again with the number in the graph.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from profiles import operators_run
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import normops

WIDTH = 8
W, R = torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)

Fn = Callable[[Tensor, Any], Tensor]
Number = Callable[[Tensor, Any], Any]


def root(x: Tensor, eps: Any = 1e-3) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def in_a_body(x: Tensor, eps: Any) -> Tensor:
    result: Tensor = checkpoint(lambda x, w, eps: x * root(x, eps) * w, x, W, eps, use_reentrant=False)
    return result


def rotated(x: Tensor, number: Any) -> Tensor:
    x, size = x * root(x) * W, 2 * (int(4 * number) % 4 + 1)
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = torch.cat((-second, first), -1)
    return torch.cat((x[..., :size] * W[:size].cos() + turned * W[:size].sin(), x[..., size:]), -1)


def handwritten(x: Tensor, eps: Any) -> Tensor:
    return x * root(x, eps)


def of_torch(x: Tensor, eps: Any) -> Tensor:
    return F.rms_norm(x, (WIDTH,), W, eps)


# Functions in which a pass reads a number. Exponents, alpha of torch.add, and ``//`` are left out, because torch 2.13
# reuses their code for other numbers even without a pass.
PLACES: dict[str, Fn] = {
    "eps, and elsewhere": lambda x, number: handwritten(x, number) + number,
    "eps of several": lambda x, number: of_torch(handwritten(x, number) + R, number),
    "eps in a body": in_a_body,
    "offset": lambda x, number: x * root(x) * (number + W),
    "alpha": lambda x, number: (h := x * number + R) + h * root(h) * W,
    "rotary_dim": rotated,
}

COMPUTED: dict[str, Number] = {
    "s + c": lambda x, s: s + 1e-3,
    "c - s": lambda x, s: 8 - s,
    "c * s": lambda x, s: 1e-2 * s,
    "s / c": lambda x, s: s / 2,
    "c / s": lambda x, s: 1 / s,
    "s ** 2": lambda x, s: s**2,
    "s ** 0.5": lambda x, s: s**0.5,
    "s * s": lambda x, s: s * s,
    "abs": lambda x, s: abs(s),
    "min": lambda x, s: min(s, 1.0),
    "max": lambda x, s: max(s, 0.5),
    "int": lambda x, s: float(int(s * 4)),
    "sqrt": lambda x, s: math.sqrt(s),
    "columns": lambda x, s: s * x.shape[-1] ** -0.5,
    "rows": lambda x, s: s * x.shape[0] ** -0.5,
    "of rows": lambda x, s: x.shape[0] ** -0.5,
}


class Scaled(nn.Module):
    """Uses its scale twice, so that torch does not specialize on it."""

    def __init__(self, scale: float, fn: Fn, number: Number) -> None:
        super().__init__()
        self.scale = scale
        self.fn = fn
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x * self.scale, self.number(x, self.scale))


def check(fn: Fn, number: Number, dynamic: bool | None = True) -> set[int]:
    """Compares with eager for several numbers in turn, then for another number with only the cache on disk.

    Returns:
        The numbers of normops operators that ran.
    """
    options = normops.inductor_options({"fallback_by_default": True})  # generates no code
    x, counts = 0.1 * R, set()
    with fresh_cache():
        for scales in ((0.25, 1.5, 6.0), (0.75,)):
            torch._dynamo.reset()
            for scale in scales:
                module = Scaled(scale, fn, number)
                compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, options=options)
                torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
                ran = operators_run(lambda compiled=compiled: compiled(x))  # type: ignore[misc]
                counts.add(len([name for name in ran if name.startswith("normops::")]))
    return counts


@pytest.mark.parametrize("dynamic", [True, None, False])
@pytest.mark.parametrize("norm", [handwritten, of_torch])
@pytest.mark.covering(core=1)
def test_norm_with_eps_from_the_caller_is_replaced(norm: Fn, dynamic: bool | None) -> None:
    assert check(norm, lambda x, s: s, dynamic) == {1}


@pytest.mark.parametrize("number", COMPUTED)
def test_handwritten_norm_with_computed_eps_is_not_replaced(number: str) -> None:
    assert check(handwritten, COMPUTED[number]) == {0}


@pytest.mark.parametrize("number", ["s + c", "c * s", "rows", "of rows"])
def test_torch_norm_with_computed_eps_is_replaced_unless_from_sizes(number: str) -> None:
    """torch specializes on the eps in any case, but caches keep the guards on sizes."""
    assert check(of_torch, COMPUTED[number]) == {0 if "rows" in number else 1}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", ["s", "c * s"])
@pytest.mark.covering(core=1)
def test_numbers_in_other_arguments_match_eager(place: str, number: str) -> None:
    check(PLACES[place], COMPUTED.get(number, lambda x, s: s))


def test_norm_with_eps_from_a_tensor_is_not_replaced() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled, graphs = compiled_with_passes(lambda x, eps: handwritten(x, eps.item()), dynamic=True)
        for eps in (0.5, 2.0):
            torch.testing.assert_close(compiled(R, torch.tensor(eps)), handwritten(R, eps))
    assert norms(graphs.forward) == []
