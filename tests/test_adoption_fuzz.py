"""Fuzzes normops.patch with random modules, and normops.patch and the torch.compile passes with random programs.

Results must equal those of the unpatched module or program. ``NORMOPS_FUZZ=20 pytest
tests/test_adoption_fuzz.py`` runs twenty times as many, from other seeds; ``make test`` runs a few.
"""

import linecache
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from norms_of_others import GemmaNorm, LlamaNorm, WideNorm
from test_lookalikes import assert_alike, assert_is_what_it_was
from tiers import divided
from torch import Tensor, nn

import normops

TIMES = int(os.environ.get("NORMOPS_FUZZ", "1"))
MODULES_EACH = 60
PROGRAMS_EACH = 12
SIZE = 32


def one_of(draw: random.Random, usual: str, *others: str, rarely: float = 0.12) -> str:
    """Returns the usual source or, rarely, one of the others."""
    return draw.choice(others) if others and draw.random() < rarely else usual


def source_of_a_norm(draw: random.Random, is_gated: bool) -> str:
    """Returns a forward made of parts of norms and of parts that only resemble them."""
    x, gate = "x", draw.choice(("F.silu(gate)", "torch.sigmoid(gate)", "F.silu(gate.float())"))
    gate = one_of(
        draw, gate, "gate", "F.gelu(gate)", "F.silu(gate.detach())", "F.silu(gate.clamp(-3, 3))", "F.silu(2 * gate)"
    )
    gate_first = is_gated and draw.random() < 0.5
    lines = []
    has_weight = draw.random() < 0.85
    cast = draw.choice(("", ".float()", ".to(torch.float32)", ".double()"))
    cast = one_of(draw, cast, ".bfloat16()", ".half()", rarely=0.04)
    lines += [f"h = {x}{cast}"]
    if gate_first:
        lines += [f"h = h * {gate}"]
    shaping = one_of(draw, "", "h = h.unflatten(-1, (-1, 8))", "h = h.unflatten(-1, (self.groups, -1))", rarely=0.3)
    shaping = one_of(
        draw, shaping, "h = h.reshape(-1, h.shape[-1])", "h = h[..., :16]", "h = h.contiguous()", rarely=0.08
    )
    lines += [shaping] if shaping else []
    dim = one_of(draw, "-1", "(-1,)", "[-1]", rarely=0.3)
    dim = one_of(draw, dim, "1", "0", "-2", "(-2, -1)", "self.dim", "tuple(range(1, h.dim()))")
    square = draw.choice(("h.pow(2)", "h * h", "h.square()", "torch.square(h)", "h ** 2"))
    square = one_of(
        draw, square, "h.abs()", "h.pow(3)", "h.pow(self.exponent)", "(h - h.mean(-1, keepdim=True)).pow(2)"
    )
    mean = one_of(draw, f"({square}).mean({dim}, keepdim=True)", f"({square}).sum({dim}, keepdim=True)", rarely=0.06)
    eps = one_of(draw, "self.eps", "1e-6", "1e-5", rarely=0.3)
    eps = one_of(
        draw, eps, "(self.eps if self.training else 1e-3)", "max(self.eps, 1e-7)", "self.eps * 2", "x.shape[0] * 1e-6"
    )
    under = one_of(draw, f"{mean} + {eps}", mean, f"({mean}).clamp(min={eps})", f"({mean} + {eps}) + 0.0", rarely=0.1)
    root = draw.choice(
        (f"torch.rsqrt({under})", f"({under}) ** -0.5", f"1 / torch.sqrt({under})", f"({under}).rsqrt()")
    )
    root = one_of(draw, root, f"torch.sqrt({under})", f"{root}.detach()", f"({root} + 1e-3)")
    lines += [draw.choice((f"h = h * {root}", f"h = {root} * h", f"h = h / torch.sqrt({under})"))]
    flat = ".flatten(-2)" if "unflatten" in shaping else ""
    lines += [f"h = h{flat}"] if flat else []
    lines += ["h = h.view(x.shape)"] if "reshape" in shaping else []
    lines += [one_of(draw, "h = h.to(x.dtype)", "h = h.type_as(x)", rarely=0.5)] if cast and draw.random() < 0.6 else []
    weight = draw.choice(("self.weight", "(1.0 + self.weight)", "self.weight.float()", "(1 + self.weight.float())"))
    weight = one_of(
        draw, weight, "self.weight.abs()", "self.weight.detach()", "(self.weight + self.offset)", "self.weight[0]"
    )
    if has_weight:
        lines += [draw.choice((f"h = {weight} * h", f"h = h * {weight}"))]
    if is_gated and not gate_first:
        lines += [f"h = h * {gate}"]
    extra = (
        "h = h * self.factor",
        "h = h + self.offset",
        "h = F.dropout(h, 0.5, self.training)",
        "h = h.clamp(-2, 2)",
        "h = 2 * h if self.training else h",
        "h = 2 * h if x.dim() == 3 else h",
        "h = 2 * h if x.shape[0] > 40 else h",
        "h = 2 * h if x.dtype is torch.bfloat16 else h",
        "h = x + h",
        "h *= 1.0",
        "self.calls += 1",
        "h = h if self.is_plain else 2 * h",
        "h = h.contiguous()",
        "h = h.transpose(-1, -2).transpose(-1, -2)",
        "x.mul_(1.0)",
        "h = h if x.requires_grad else 2 * h",
    )
    if draw.random() < 0.2:
        lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(extra))
    lines += ["h = h.to(x.dtype)"] if draw.random() < 0.5 else []
    return "\n    ".join([f"def forward(self, x{', gate' if is_gated else ''}):", *lines, "return h"]) + "\n"


def module_of(source: str, has_weight: bool, number: int) -> nn.Module:
    file, names = f"<norm {number}>", {"torch": torch, "F": F, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    cls: Any = type("RandomNorm", (nn.Module,), {"forward": names["forward"]})
    module = cls()
    if has_weight:
        module.weight = nn.Parameter(torch.linspace(-3.0, 3.0, SIZE))
    vars(module).update(eps=1e-6, groups=4, dim=-1, exponent=2.0, factor=1.0, offset=0.0, calls=0, is_plain=True)
    return module


CHANGES = {"eps": 0.5, "groups": 2, "dim": 0, "exponent": 4.0, "factor": 2.0, "offset": 1.0, "is_plain": False}


@pytest.mark.parametrize("seed", divided(range(10 * TIMES), range(1), range(3)))
def test_patched_random_modules_match_originals(seed: int) -> None:
    draw = random.Random(seed)
    count: Counter[str] = Counter()
    for number in range(MODULES_EACH):
        source = source_of_a_norm(draw, is_gated=draw.random() < 0.25)
        has_weight = "self.weight" in source
        patched, original = module_of(source, has_weight, number), module_of(source, has_weight, number)
        report = normops.patch(patched)
        count["patched" if report.patched else "left"] += 1
        if not report.patched:
            assert vars(patched).keys() == vars(original).keys()
            continue
        try:
            assert_is_what_it_was(patched, original, some=draw.random() < 0.7)
            name, value = draw.choice([*CHANGES.items()])
            for module in (patched, original):
                setattr(module, name, value)
            assert_is_what_it_was(patched, original, where=f"{name} = {value}", some=True)
        except AssertionError as error:
            pytest.fail(f"{error}\n{source}\n{report}")
    assert count["patched"] > 3, count
    assert count["left"] > 3, count


STEPS = (
    "h = self.norms[{n}](h)",
    "h = self.norms[{n}](h)",
    "h = h + self.norms[{n}](h)",
    "y = self.norms[{n}](h); h = h + self.linear(y)",
    "y = self.norms[{n}](h); h += y.to(h.dtype)",
    "y = self.norms[{n}](h); h = h * 1.0; h.mul_(0.5); h = h + y",
    "y = self.norms[{n}](h); h.mul_(0.5); h = h + y",
    "h = h.view(-1, h.shape[-1]).view(h.shape)",
    "h = self.norms[{n}](h.detach())",
    "h = self.norms[{n}](h.transpose(0, 1)).transpose(0, 1)",
    "h = self.norms[{n}](h[:, :3]).repeat(1, 2, 1)[:, :5]",
    "y = self.norms[{n}](h)[..., :16]; h = torch.cat([y, y], -1)",
    "h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale",
    "h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.scale)",
    "residual = h; h = self.linear(h); h = h + residual",
    "with torch.no_grad(): y = self.norms[{n}](h)\n    h = h + y",
    "y = self.norms[{n}](h); y.mul_(2); h = y",
    "h = F.silu(h)",
    "h = F.dropout(h, 0.5, False)",
    "h = self.linear(h)",
    "y = h.clone(); h = self.norms[{n}](y); y.zero_(); h = h + y",
    "h = F.rms_norm(h, (32,), self.scale, 1e-6)",
    "self.norms[{n}](h)",
    "h = h.to(torch.float32)",
)


class Program(nn.Module):
    """Runs steps around norms."""

    def __init__(self, steps: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds: list[Callable[[int], nn.Module]] = [LlamaNorm, GemmaNorm, WideNorm, nn.RMSNorm]
        self.norms = nn.ModuleList(kind(SIZE) for kind in kinds)
        self.linear = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.linspace(-1.0, 2.0, SIZE))
        for parameter in self.norms.parameters():
            nn.init.uniform_(parameter, -1.0, 2.0)
        self.to(dtype)
        self.source = "\n    ".join(["def run(self, x):", "h = x * 1.0", *steps, "return h"]) + "\n"
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, "<program>", "exec"), names)
        self.run = names["run"]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def outcome(module: nn.Module, run: Callable[..., Tensor], x: Tensor) -> tuple[str, Any]:
    """Returns output and gradients, or the kind of failure; missing gradients are zeros, as in compiled graphs."""
    leaf = x.clone().requires_grad_()
    try:
        y = run(leaf)
        if not y.requires_grad:
            return "runs", [y]
        upstream = torch.linspace(-1.0, 2.0, y.numel()).view(y.shape).to(y.dtype)
        grads = torch.autograd.grad(
            y, (leaf, *module.parameters()), upstream, allow_unused=True, materialize_grads=True
        )
        return "runs", [y, *grads]
    except RuntimeError as error:
        return f"fails: {'in place' if 'inplace' in str(error) or 'in-place' in str(error) else 'otherwise'}", []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", divided(range(4 * TIMES), (), range(1)))
def test_patched_and_compiled_random_programs_match_originals(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(1000 + seed)
    found = 0
    for _ in range(PROGRAMS_EACH):
        steps = [draw.choice(STEPS).format(n=draw.randrange(4)) for _ in range(draw.randint(2, 6))]
        steps = [step.replace("; ", "\n    ") for step in steps]
        if dtype != torch.float32:
            steps = [f"{step}\n    h = h.to(torch.bfloat16)" for step in steps]
        plain, patched = Program(steps, dtype), Program(steps, dtype)
        assert len(normops.patch(patched).patched) == 4
        x = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)
        expected, eager = outcome(plain, plain, x), outcome(patched, patched, x)
        assert_same_outcome(eager, expected, plain, dtype, "patched")
        # If the eager program cannot be differentiated, a compiled one may or may not.
        if expected[0] == "runs":
            for title, module in (("compiled", plain), ("patched and compiled", patched)):
                compiled, graphs = compiled_with_passes(module.forward)
                assert_same_outcome(outcome(module, compiled, x), expected, plain, dtype, title)
                found += len(norms(graphs.forward))
    assert found > PROGRAMS_EACH


def assert_same_outcome(
    actual: tuple[str, Any], expected: tuple[str, Any], program: Program, dtype: torch.dtype, title: str
) -> None:
    if expected[0] == "runs":
        assert actual[0] == "runs", f"{title}: {actual[0]}\n{program.source}"
        # Rounding errors grow along the program.
        for each, other in zip(actual[1], expected[1], strict=True):
            coarse = torch.finfo(dtype).eps
            largest = float(other.detach().float().abs().max())
            torch.testing.assert_close(
                each.detach().float(),
                other.detach().float(),
                rtol=0.0,
                atol=64 * coarse * max(largest, 1e-3),
                msg=lambda text: f"{title}: {text}\n{program.source}",
            )
            assert_alike(each.detach() * 0, other.detach() * 0, title)
