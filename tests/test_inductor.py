"""Tests the passes for torch.compile: which norms they replace, and what they leave unchanged."""

import copy
import operator
import sys
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import norms_of_others as others
import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from profiles import operators_run
from subclasses import KnowsTorchAlone
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code
from torch.utils.checkpoint import checkpoint
from trained import train

import normops
from normops.inductor import passes
from normops.inductor.calls import order_in_memory
from normops.inductor.effects import is_harmless, may_write
from normops.inductor.residuals import fuse_additions

Norm = Callable[[Tensor, Tensor], Tensor]

EPS = 1e-3


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


SPELLINGS: dict[str, Norm] = {
    "F.rms_norm": lambda x, w: F.rms_norm(x, (32,), w, EPS),
    "torch.rms_norm": lambda x, w: torch.rms_norm(x, [32], weight=w),
    "F.rms_norm without weight": lambda x, w: F.rms_norm(x, (x.shape[-1],), eps=EPS) * w[0],
    "two dimensions": lambda x, w: F.rms_norm(x, x.shape[-2:], torch.stack([w, w]), EPS),
    "rsqrt": lambda x, w: w * (x * torch.rsqrt(mean_square(x) + EPS)),
    "methods": lambda x, w: x.mul(x.square().mean(dim=-1, keepdim=True).add(EPS).rsqrt()).mul(w),
    "left to right": lambda x, w: x * torch.rsqrt(torch.mean(x * x, dim=2, keepdim=True) + EPS) * w,
    "weight first": lambda x, w: w * x * torch.rsqrt(mean_square(x) + EPS),
    "power": lambda x, w: x * torch.pow(EPS + mean_square(x), -0.5) * w,
    "**": lambda x, w: x * (mean_square(x) + EPS) ** -0.5 * w,
    "division": lambda x, w: x / torch.sqrt(mean_square(x) + EPS) * w,
    "division by a power": lambda x, w: x / (mean_square(x) + EPS) ** 0.5 * w,
    "weight over root": lambda x, w: (w * x) / (mean_square(x) + EPS).sqrt(),
    "inverse": lambda x, w: x * (1 / torch.sqrt(mean_square(x) + EPS)) * w,
    "reciprocal": lambda x, w: x * torch.sqrt(mean_square(x) + EPS).reciprocal() * w,
    "torch functions": lambda x, w: torch.mul(w, torch.div(x, torch.sqrt(torch.add(mean_square(x), EPS)))),
    "sum": lambda x, w: x * torch.rsqrt((x * x).sum([-1], keepdim=True) / x.shape[-1] + EPS) * w,
    "axis": lambda x, w: x * torch.rsqrt(torch.square(x).mean(axis=(-1,), keepdim=True) + EPS) * w,  # type: ignore[call-overload]
    "mean in float32": lambda x, w: (
        (x * torch.rsqrt((x * x).mean(-1, True, dtype=torch.float32) + EPS)).to(x.dtype) * w
    ),
    "negative eps": lambda x, w: x * torch.rsqrt(mean_square(x) + -1e-3) * w,
    "without eps": lambda x, w: x * torch.rsqrt(mean_square(x)) * w,
    "float32": lambda x, w: (x.float() * torch.rsqrt(mean_square(x.float()) + EPS)).type_as(x) * w,
    "float64": lambda x, w: (w.double() * (x.double() / (mean_square(x.double()) + EPS).sqrt())).to(x.dtype),
    "offset": lambda x, w: (x.float() * torch.rsqrt(mean_square(x.float()) + EPS) * (1 + w.float())).to(x),
    "offset -2": lambda x, w: x * torch.rsqrt(mean_square(x) + EPS) * (w + -2),
}


def problem(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*(shape or (4, 2, 32)), generator=generator)
    w = torch.rand(32, generator=generator) + 0.5
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def results(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Returns outputs, and gradients if there are any."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = fn(*leaves)
    outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
    gradients = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)]


def assert_close(actual: list[Tensor | None], expected: list[Tensor | None], dtype: torch.dtype) -> None:
    for a, b in zip(actual, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        # The originals round several times to 16 bits.
        assert error <= (2e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.covering(core=1)
def test_one_forward_one_backward(spelling: str, dtype: torch.dtype, dynamic: bool) -> None:
    norm, inputs = SPELLINGS[spelling], problem(dtype)
    compiled, graphs = compiled_with_passes(norm, dynamic=dynamic)
    assert_close(results(compiled, inputs), results(norm, inputs), dtype)
    assert norms(graphs.forward) == ["rms_norm"]
    assert norms(graphs.backward) == ["rms_norm_backward"]
    leftovers = ("rsqrt", "sqrt", "mean", "pow", "reciprocal", "sum")
    assert not [name for name in graphs.forward if name.split(".")[1] in leftovers]


def test_result_is_that_of_the_operator() -> None:
    x, w = problem(torch.bfloat16)
    compiled, _ = compiled_with_passes(SPELLINGS["offset"])
    assert torch.equal(compiled(x, w), normops.rms_norm(x, 32, w, EPS, weight_offset=1.0))
    compiled, _ = compiled_with_passes(SPELLINGS["torch.rms_norm"])
    assert torch.equal(compiled(x, w), normops.rms_norm(x, 32, w))


def test_float64_norms_stay_float64() -> None:
    x, w = problem(torch.float32)
    compiled, _ = compiled_with_passes(SPELLINGS["float64"])
    expected = normops.rms_norm(x.double(), 32, w, EPS).float()
    assert torch.equal(compiled(x, w), expected)
    assert not torch.equal(normops.rms_norm(x, 32, w, EPS), expected)

    def weighted_twice(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(mean_square(x) + EPS)) * w[None]

    compiled, graphs = compiled_with_passes(weighted_twice)
    torch.testing.assert_close(compiled(x.double(), w), weighted_twice(x.double(), w), rtol=1e-14, atol=1e-14)
    assert norms(graphs.forward) == ["rms_norm"]


@pytest.mark.parametrize("norm", others.NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.covering(core=1)
def test_norms_of_other_libraries_are_replaced(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
    module = norm(32).to(dtype)
    x = problem(dtype)[0]
    compiled, graphs = compiled_with_passes(module)
    assert_close(results(compiled, (x,)), results(module, (x,)), dtype)
    assert norms(graphs.forward) == ["rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_of_another_dtype(dtype: torch.dtype) -> None:
    x, w = problem(torch.bfloat16)[0], problem(dtype)[1]
    compiled, graphs = compiled_with_passes(SPELLINGS["float32"])
    y = compiled(x, w)
    assert y.dtype == dtype
    assert norms(graphs.forward) == ["rms_norm"]
    assert torch.equal(y, normops.rms_norm(x.to(dtype), 32, w, EPS))


OTHERS: dict[str, Norm] = {
    "layer norm": lambda x, w: w * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + EPS).sqrt(),
    "centered": lambda x, w: (x - x.mean(-1, True)) * torch.rsqrt(mean_square(x) + EPS) * w,
    "L2 norm": lambda x, w: w * x / torch.sqrt(x.square().sum(-1, keepdim=True) + EPS),
    "another size": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / 31 + EPS) * w,
    "clamped": lambda x, w: x * torch.rsqrt(mean_square(x).clamp(min=EPS)) * w,
    "infinite eps of torch's": lambda x, w: F.rms_norm(x, (32,), w, float("inf")),
    "infinite eps": lambda x, w: x * torch.rsqrt(mean_square(x) + float("inf")) * w,
    "eps in a tensor": lambda x, w: x * torch.rsqrt(mean_square(x) + torch.tensor(EPS)) * w,
    "eps scaled": lambda x, w: x * torch.rsqrt(torch.add(mean_square(x), 0.001, alpha=2)) * w,
    "another dimension": lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS) * w,
    "two dimensions": lambda x, w: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS) * w,
    "another dimension broadcast": lambda x, w: x * torch.rsqrt(x[:, 0].pow(2).mean(-1, keepdim=True) + EPS)[:, None],
    "without keepdim": lambda x, w: (y := x[0, :2, :2]) * torch.rsqrt(y.pow(2).mean(-1) + EPS) * w[:2],
    "cubes": lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS) * w,
    "another power": lambda x, w: x * (mean_square(x) + EPS) ** -0.25 * w,
    "two over root": lambda x, w: x * (2 / torch.sqrt(mean_square(x) + EPS)) * w,
    "another input": lambda x, w: (x + 1) * torch.rsqrt(mean_square(x) + EPS) * w,
    "detached": lambda x, w: x * torch.rsqrt(mean_square(x) + EPS).detach() * w,
    "rounded input": lambda x, w: x * torch.rsqrt(mean_square(x.to(torch.float16)).float() + EPS) * w,
    "factor alone": lambda x, w: torch.rsqrt(mean_square(x) + EPS) * w,
    "factor used twice": lambda x, w: (r := torch.rsqrt(mean_square(x) + EPS)) * x * w + r,
    "mean used twice": lambda x, w: (m := mean_square(x)) + x * torch.rsqrt(m + EPS) * w,
    "single numbers": lambda x, w: norm(x.sum(), w[:1]),
    "divisor of a number": lambda x, w: 2.0 / torch.sqrt(mean_square(x) + EPS) * w,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.covering(core=1)
def test_graphs_without_norms_are_unchanged(other: str, dynamic: bool) -> None:
    fn, inputs = OTHERS[other], problem(torch.float32)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    torch.testing.assert_close(results(compiled, inputs), results(fn, inputs), equal_nan=True)
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(mean_square(x) + EPS) * w


def writes_to_the_input(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    factor = torch.rsqrt(mean_square(x) + EPS)
    x.add_(1)
    return x * factor * w


def writes_to_the_input_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    wide, factor = x.float(), torch.rsqrt(mean_square(x.float()) + EPS)
    x[0] = 0
    return wide * factor * w


def writes_to_the_weight(x: Tensor, w: Tensor) -> Tensor:
    w = w * 1
    weight = w.float() + 1
    w += 1
    return x * torch.rsqrt(mean_square(x) + EPS) * weight


def writes_by_a_function(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    factor = torch.rsqrt(mean_square(x) + EPS)
    F.relu(x, inplace=True)
    return x * factor * w


def writes_to_an_out(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    with torch.no_grad():
        y = x.detach()
    factor = torch.rsqrt(mean_square(y) + EPS)
    torch.add(y.clone(), 1, out=y)
    return y * factor * w


def without_gradient_of_the_factor(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        factor = torch.rsqrt(mean_square(x) + EPS)
    return x * factor * w


def under_autocast_in_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        factor = torch.rsqrt(mean_square(x) + EPS)
    return x * factor * w


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        writes_to_the_input,
        writes_to_the_input_through_a_view,
        writes_to_the_weight,
        writes_by_a_function,
        writes_to_an_out,
        without_gradient_of_the_factor,
        under_autocast_in_part,
    ],
)
def test_norms_with_effects_inside_are_unchanged(fn: Norm, dynamic: bool) -> None:
    x, w = problem(torch.float32)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    with torch.set_grad_enabled(fn is without_gradient_of_the_factor):  # autograd refuses some writes
        torch.testing.assert_close(compiled(x, w), fn(x, w))
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


Effect = tuple[bool, bool]
DOES_NOTHING, DRAWS, WRITES = (False, True), (False, False), (True, False)


def sets_a_row(x: Tensor) -> None:
    x[0] = 1


@torch.library.custom_op("normops_tests::writes", mutates_args=("x",))
def writes_in_an_operator(x: Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x - 1, DOES_NOTHING),
        (lambda x: ~(x > 0), DOES_NOTHING),
        (lambda x: x[:, None], DOES_NOTHING),
        (lambda x: x.masked_fill(x > 0, 1), DOES_NOTHING),
        (lambda x: torch.stack([x, x]), DOES_NOTHING),
        (lambda x: F.linear(x, x), DOES_NOTHING),
        (lambda x: F.softplus(x), DOES_NOTHING),
        (lambda x: F.relu(x, inplace=False), DOES_NOTHING),
        (lambda x: torch.rand_like(x), DRAWS),
        (lambda x: F.dropout(x, 0.5), DRAWS),
        (lambda x: F.scaled_dot_product_attention(x, x, x), DRAWS),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=False), DRAWS),  # only writes of its body are known
        (lambda x: checkpoint(torch.sin_, x, use_reentrant=False), WRITES),
        (lambda x: F.relu(x, True), WRITES),
        (lambda x: F.relu(x, inplace=True), WRITES),
        (lambda x: x.copy_(x + 1), WRITES),
        (lambda x: x.add_(1), WRITES),
        (lambda x: operator.iadd(x, 1), WRITES),  # type: ignore[no-untyped-call]
        (sets_a_row, WRITES),
        (lambda x: torch.sub(x, 1, out=x), WRITES),
        (lambda x: torch._foreach_add_([x], 1), WRITES),
        (lambda x: F.batch_norm(x, x[0], x[0], training=True), WRITES),
        (lambda x: torch.batch_norm(x, None, None, x[0], x[0], True, 0.1, 1e-5, False), WRITES),
        (lambda x: F.embedding(torch.zeros(1, dtype=torch.long), x, max_norm=1.0), WRITES),
        (lambda x: torch.ops.normops_tests.writes(x), WRITES),
        (lambda x: torch.ops.normops.rms_norm_(x, [32]), WRITES),
        (lambda x: torch.ops.normops.rms_norm(x, [32]), DOES_NOTHING),
    ],
)
@pytest.mark.covering(core=1)
def test_effects(fn: Callable[[Tensor], Any], expected: Effect) -> None:
    """Checks the effects of all nodes that Dynamo traces for a function."""
    found: list[Effect] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        found.append((any(map(may_write, nodes)), all(map(is_harmless, nodes))))
        return graph

    def on_a_copy(x: Tensor) -> Any:
        return x + 1, fn(x * 1)

    torch._dynamo.reset()
    torch.compile(on_a_copy, backend=backend, fullgraph=True)(torch.randn(32, 32))
    assert found == [expected]


def writes_before(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x, w = x * 1, w * 1
    x.mul_(2)
    w[0] = 2
    return norm(x, w), x * w


def writes_to_the_result(x: Tensor, w: Tensor) -> Tensor:
    y = norm(x, w)
    y[0] += 1
    y.mul_(2)
    return y


def others_between(x: Tensor, w: Tensor) -> Tensor:
    factor = torch.rsqrt(mean_square(x) + EPS)
    gate = F.silu(w.neg()[None, :]) + torch.cat([w[:16], w[16:]]).exp() > 0
    return x * factor * gate.unsqueeze(0) * (2 - w[:, None].T)


def two_between_each_other(x: Tensor, w: Tensor) -> Tensor:
    a, b = x * 2, x + 1
    of_a, of_b = mean_square(a), mean_square(b)
    return (a * torch.rsqrt(of_a + EPS) * w).view(-1, 32) + (b * torch.rsqrt(of_b + EPS) * w).view(-1, 32)


def wholly_under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return norm(x, w)


def input_and_weight_are_used_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    wide, weight = x.float() * 1, 1 + w
    return (wide * torch.rsqrt(mean_square(wide) + EPS)).to(x.dtype) * weight + wide + weight


def hook_on_an_offset(norm: Norm, x: Tensor, w: Tensor) -> Tensor:
    weight = 1 + w
    y = norm(x, weight)
    weight.register_hook(lambda gradient: gradient * 3)
    return y


def hook_on_a_cast(x: Tensor, w: Tensor) -> Tensor:
    wide = x.double()
    y = norm(wide, w)
    wide.register_hook(lambda gradient: gradient * 3)
    return y


def written_where_gradients_are_recorded(x: Tensor, w: Tensor) -> Tensor:
    columns = x.detach().transpose(0, 1)
    with torch.no_grad():
        y = columns * torch.rsqrt(mean_square(columns) + EPS)
    return y.mul_(w) + x.flip(0).view_as(y)


AROUND: dict[str, tuple[Callable[..., Any], int]] = {
    "hook on 1 + weight": (partial(hook_on_an_offset, norm), 1),
    "hook on a factor": (partial(hook_on_an_offset, lambda x, w: F.rms_norm(x, (32,)) * w), 1),
    "hook on a cast": (hook_on_a_cast, 1),
    "written where gradients are recorded": (written_where_gradients_are_recorded, 0),
    "under vmap": (lambda x, w: torch.vmap(lambda x: norm(x, w))(x), 0),
    "a factor of 8 bits": (lambda x, w: norm(x, w) * w.detach().to(torch.float8_e4m3fn).to(w.dtype), 1),
    "a mask": (lambda x, w: F.rms_norm(x, (32,)) * (x.detach() > 0).float() + w, 1),
    "times its input": (lambda x, w: F.rms_norm(x, (32,)) * x + w, 1),
    "writes before": (writes_before, 1),
    "writes to the result": (writes_to_the_result, 1),
    "others between": (others_between, 1),
    "scaled by row": (lambda x, w: x * torch.rsqrt(mean_square(x) + EPS) * (1 + w[:2, None]), 1),
    "two between each other": (two_between_each_other, 2),
    "wholly under autocast": (wholly_under_autocast, 1),
    "unweighted, too": (lambda x, w: ((y := x * torch.rsqrt(mean_square(x) + EPS)) * w, y), 1),
    "input and weight are used elsewhere": (input_and_weight_are_used_elsewhere, 1),
    "biased": (lambda x, w: norm(x, w) + w, 1),
    "weight of more dimensions": (lambda x, w: norm(x.view(-1, 1, 32).expand(8, 32, 32) * 1, w.outer(w)), 1),
    "wider afterwards": (lambda x, w: (x * torch.rsqrt(mean_square(x) + EPS)).double().mul(3), 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", AROUND)
@pytest.mark.covering(core=1)
def test_operations_around_norms_are_kept(case: str, dynamic: bool) -> None:
    (fn, count), inputs = AROUND[case], problem(torch.float32)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    assert_close(results(compiled, inputs), results(fn, inputs), torch.float32)
    assert len(norms(graphs.forward)) == count


def in_float32(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(mean_square(wide) + EPS)).to(x.dtype)


def written_after(norm: Norm, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 1
    y = norm(h, w)
    h += y
    return y, h


def written_after_through_a_view(norm: Norm, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 1
    view = h.view(-1)[3:40]
    y = norm(h, w)
    view.zero_()
    return y, h


def written_after_without_gradient(norm: Norm, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 1
    y = norm(h, w)
    with torch.no_grad():
        torch.add(y, 1, out=h)
    return y, x * 1


def written_in_a_checkpoint(norm: Norm, x: Tensor, w: Tensor) -> Any:
    return checkpoint(partial(written_after, norm), x, w, use_reentrant=False)


def written_after_a_checkpoint(norm: Norm, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 1
    y = checkpoint(norm, h, w, use_reentrant=False)
    h.add_(1)
    return y, h


WRITTEN_AFTER = (
    written_after,
    written_after_through_a_view,
    written_after_without_gradient,
    written_in_a_checkpoint,
    written_after_a_checkpoint,
)


def weight_written_after(norm: Norm, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    w = w * 1
    y = norm(x, w)
    w += 1
    return y, x * w


@pytest.mark.parametrize(
    ("fn", "norm"),
    [*product(WRITTEN_AFTER, (in_float32, SPELLINGS["F.rms_norm"])), (weight_written_after, SPELLINGS["offset"])],
)
def test_inputs_may_be_written_after_the_norm(fn: Callable[..., Any], norm: Norm) -> None:
    """The originals save casts, which later writes do not change."""
    inputs = problem(torch.bfloat16)
    torch._dynamo.reset()
    expected = results(torch.compile(partial(fn, norm), backend="aot_eager", fullgraph=True), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(partial(fn, norm), backend="normops", fullgraph=True)
    assert_close(results(compiled, inputs), expected, torch.bfloat16)
    assert "normops::rms_norm_backward" in operators_run(lambda: results(compiled, inputs))


@pytest.mark.parametrize("needs_gradient", ["input", "weight"])
@pytest.mark.parametrize("fn", [written_after, weight_written_after])
def test_inputs_may_be_written_after_a_norm_with_one_gradient(fn: Callable[..., Any], needs_gradient: str) -> None:
    """Only autograd knows what the original saves; with the passes, more programs work than before."""
    x, w = problem(torch.float32)
    x.requires_grad_(needs_gradient == "input")
    w.requires_grad_(needs_gradient == "weight")
    compiled, graphs = compiled_with_passes(partial(fn, norm))
    y, _ = compiled(x, w)
    (gradient,) = torch.autograd.grad(y.sum(), x if needs_gradient == "input" else w)
    reference = norm(x, w)
    torch.testing.assert_close(gradient, torch.autograd.grad(reference.sum(), x if needs_gradient == "input" else w)[0])
    assert norms(graphs.backward) == ["rms_norm_backward"]


def writes_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    y, other = norm(x * 1, w), x.sin()
    other.add_(1)
    return F.dropout(F.silu(y), 0.5, training=False) + F.layer_norm(other, (32,))


@pytest.mark.parametrize(("fn", "count"), [(norm, 0), (writes_elsewhere, 0), (partial(written_after, norm), 1)])
def test_unwritten_inputs_are_not_copied(fn: Callable[..., Any], count: int) -> None:
    compiled, graphs = compiled_with_passes(fn)
    compiled(*problem(torch.float32))
    assert graphs.of_dynamo[1].count("target=clone") == count
    compiled, graphs = compiled_with_passes(fn)
    with torch.no_grad():  # nothing is saved
        compiled(*problem(torch.float32))
    assert "target=clone" not in graphs.of_dynamo[1]


def test_copies_add_no_kernels() -> None:
    """Inductor generates as many kernels for a norm whose input is written as for one whose input is not."""

    def kernels(write: bool) -> int:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            h = x.mm(x.detach())
            y = in_float32(h, w)
            if write:
                h += y
            else:
                h = h + y
            return y.mm(y) + h

        torch._dynamo.reset()
        x, w = problem(torch.bfloat16, 32, 32)
        compiled = torch.compile(fn, fullgraph=True, backend="normops")
        _, sources = run_fw_bw_and_get_code(lambda: compiled(x, w))
        return sum(source.count("async_compile.cpp") for source in sources)

    assert kernels(write=True) == kernels(write=False)


def test_result_is_rounded_before_it_is_widened() -> None:
    x, w = problem(torch.bfloat16)
    compiled, graphs = compiled_with_passes(AROUND["wider afterwards"][0])
    assert torch.equal(compiled(x, w), normops.rms_norm(x, 32, None, EPS).double().mul(3))
    assert norms(graphs.forward) == ["rms_norm"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", [norm, SPELLINGS["float32"], SPELLINGS["F.rms_norm"]])
def test_permuted_inputs_keep_strides(norm: Norm, dynamic: bool) -> None:
    """Strides are kept, as later views of the result may need them."""

    def transposed(x: Tensor, w: Tensor) -> Tensor:
        return norm(x.view(4, 3, 2, 32).transpose(1, 2), w)

    inputs = problem(torch.bfloat16, 4, 6, 32)
    compiled, graphs = compiled_with_passes(transposed, dynamic=dynamic)
    assert_close(results(compiled, inputs), results(transposed, inputs), torch.bfloat16)
    assert norms(graphs.forward) == ["rms_norm"]
    assert norms(graphs.backward) == ["rms_norm_backward"]
    assert "aten.clone.default" not in graphs.forward


@pytest.mark.parametrize("rows", [(1, 3), (3, 1), (1, 1), (1, 4, 1), (4, 1, 3), (1, 2, 3)])
def test_dimensions_of_size_1_keep_strides(rows: tuple[int, ...]) -> None:
    """A size-1 dimension has its stride of eager mode, in every order of the rows."""
    for order in permutations(range(len(rows))):
        x = torch.randn(*rows, 32).permute(*order, len(rows))
        w = torch.rand(32)
        compiled, graphs = compiled_with_passes(SPELLINGS["float32"])
        assert compiled(x, w).stride() == SPELLINGS["float32"](x, w).stride()
        assert norms(graphs.forward) == ["rms_norm"]


def test_order_of_many_dimensions() -> None:
    """11 dimensions have 40 million orders."""
    x = torch.empty([1, 2, 1, 3, 1, 1, 2, 2, 2, 2, 32], device="meta")
    assert order_in_memory(x, 1) == tuple(range(11))
    order = (9, 2, 4, 0, 8, 3, 1, 7, 6, 5, 10)
    found = order_in_memory(x.permute(order), 1)
    assert found is not None
    assert x.permute(order).permute(found).is_contiguous()
    assert found[-1] == 10
    assert order_in_memory(x.permute(order).transpose(-1, -4), 1) is None
    assert order_in_memory(x[..., ::2].permute(order), 1) is None


def test_norms_with_noncontiguous_rows_are_unchanged() -> None:
    def columns(x: Tensor, w: Tensor) -> Tensor:
        return norm(x.transpose(1, 2), w)

    inputs = problem(torch.float32, 4, 32, 32)
    compiled, graphs = compiled_with_passes(columns)
    torch.testing.assert_close(results(compiled, inputs), results(columns, inputs))
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


def test_norms_before_inplace_views_are_unchanged() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x * 1
        y = norm(h, w)
        h.transpose_(1, 2)
        return y @ h

    x, w = (tensor.detach() for tensor in problem(torch.float32))
    compiled, graphs = compiled_with_passes(fn)
    torch.testing.assert_close(compiled(x, w), fn(x, w))
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


def test_norms_of_tensor_subclasses_are_unchanged() -> None:
    x, w = problem(torch.float32)
    compiled, graphs = compiled_with_passes(norm)
    torch.testing.assert_close(compiled(KnowsTorchAlone(x.detach()), w.detach()).held, norm(x, w))
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


@pytest.mark.parametrize("norm", [norm, SPELLINGS["F.rms_norm"]])
def test_norms_of_nested_tensors_are_unchanged(norm: Norm) -> None:
    _, w = problem(torch.float32)
    x = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)], layout=torch.jagged)
    compiled, graphs = compiled_with_passes(norm)
    torch.testing.assert_close(compiled(x, w).values(), norm(x, w).values())
    assert graphs.of_dynamo[0::2] == graphs.of_dynamo[1::2]


def test_norms_in_checkpoints_are_replaced() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, w).sin()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(body, x, w, use_reentrant=False)

    inputs = problem(torch.float32)
    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, inputs), results(fn, inputs), torch.float32)
    assert norms(graphs.forward) == ["rms_norm"]
    assert norms(graphs.backward) == ["rms_norm", "rms_norm_backward"]  # recomputed


class Block(nn.Module):
    """Computes a norm, a projection, and an addition that fuses with the next norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def stack(norm: Callable[[int], nn.Module] = others.LlamaNorm) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(norm) for _ in range(3)), norm(32))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", [others.LlamaNorm, others.GemmaNorm, nn.RMSNorm, normops.RMSNorm])
def test_additions_fuse_with_norms_across_layers(norm: Callable[[int], nn.Module], dynamic: bool) -> None:
    model = stack(norm)
    x = problem(torch.float32)[0]
    compiled, graphs = compiled_with_passes(model, dynamic=dynamic)
    assert_close(results(compiled, (x,)), results(model, (x,)), torch.float32)
    assert norms(graphs.forward) == ["rms_norm", *["add_rms_norm"] * 3]
    assert norms(graphs.backward) == ["rms_norm_backward"] * 4
    assert not [name for name in graphs.forward + graphs.backward if name.startswith("aten.add.")]


Sum = Callable[[Tensor, Tensor, Tensor], Any]

SUMS: dict[str, tuple[Sum, list[str]]] = {
    "returned": (lambda x, r, w: (F.rms_norm(h := x + r, (32,), w), h), ["add_rms_norm"]),
    "used alone": (lambda x, r, w: F.rms_norm(torch.add(r, x), (32,), w), ["add_rms_norm"]),
    "to itself": (lambda x, r, w: F.rms_norm(x + x, (32,), w), ["add_rms_norm"]),
    "two norms of it": (
        lambda x, r, w: F.rms_norm(h := x + r, (32,), w) * F.rms_norm(h, (32,)),
        ["add_rms_norm", "rms_norm"],
    ),
    "used first": (lambda x, r, w: ((h := x + r).mm(h.T), F.rms_norm(h, (32,), w)), ["add_rms_norm"]),
    "weight from it": (lambda x, r, w: F.rms_norm(h := x + r, (32,), w + h.sum(0)), ["rms_norm"]),
    "weight after a use": (lambda x, r, w: ((h := x + r).sum(), F.rms_norm(h, (32,), w.sin())), ["rms_norm"]),
    "alpha": (lambda x, r, w: F.rms_norm(torch.add(x, r, alpha=2), (32,), w), ["add_rms_norm"]),
    "scaled": (lambda x, r, w: (F.rms_norm(h := x + 0.3 * r, (32,), w), h), ["add_rms_norm"]),
    "scaled first": (lambda x, r, w: F.rms_norm(r * -3 + x, (32,), w), ["add_rms_norm"]),
    "both scaled": (lambda x, r, w: F.rms_norm(x * 0.3 + r * 0.2, (32,), w), ["rms_norm"]),
    "scaled with itself": (lambda x, r, w: F.rms_norm((s := x * 0.3) + s, (32,), w), ["rms_norm"]),
    "scaled, used elsewhere": (
        lambda x, r, w: (F.rms_norm((s := x * 0.3) + r, (32,), w), s.mm(s)),
        ["add_rms_norm"],
    ),
    "scaled elementwise": (lambda x, r, w: F.rms_norm(x + r.sin() * 0.3, (32,), w), ["rms_norm"]),
    "scaled and elementwise": (lambda x, r, w: F.rms_norm(x.sin() + r * 0.3, (32,), w), ["rms_norm"]),
    "scaled by columns": (lambda x, r, w: F.rms_norm(x + r * w, (32,), w), ["rms_norm"]),
    "scaled to infinity": (lambda x, r, w: F.rms_norm(x + r * float("inf"), (32,), w), ["rms_norm"]),
    "scaled, broadcast": (lambda x, r, w: F.rms_norm(x + r[:1] * 0.3, (32,), w), ["rms_norm"]),
    "number": (lambda x, r, w: F.rms_norm(x + 1, (32,), w), ["rms_norm"]),
    "broadcast": (lambda x, r, w: F.rms_norm(x + r[:1], (32,), w), ["rms_norm"]),
    "another dtype": (lambda x, r, w: F.rms_norm(x + r.mm(r.T).mm(r).double(), (32,), w.double()), ["rms_norm"]),
    "transposed": (lambda x, r, w: F.rms_norm(x.T + r.T, (32,), w), ["rms_norm"]),
    "elementwise": (lambda x, r, w: F.rms_norm(x.sin() + r, (32,), w), ["rms_norm"]),
    "elementwise, used elsewhere": (
        lambda x, r, w: (F.rms_norm((s := x.sin()) + r, (32,), w), s.mm(s)),
        ["add_rms_norm"],
    ),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.covering(core=1)
def test_additions_before_norms(case: str) -> None:
    fn, expected = SUMS[case]
    x, w = problem(torch.float32, 32, 32)
    compiled, graphs = compiled_with_passes(fn)
    inputs = (x, x.detach().cos(), w)
    for actual, other in zip(results(compiled, inputs), results(fn, inputs), strict=True):
        torch.testing.assert_close(actual, other, equal_nan=True)
    assert norms(graphs.forward) == expected


def test_sum_multiplied_by_its_norm_is_not_fused() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x + x.flip(0)
        return F.rms_norm(h, (32,)) * h

    x = problem(torch.float32)[0].detach()
    compiled, graphs = compiled_with_passes(fn)
    torch.testing.assert_close(compiled(x), fn(x))
    assert norms(graphs.forward) == ["rms_norm"]


def test_addition_stays_before_write_to_summand() -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        h = x + r
        x.zero_()
        return F.rms_norm(h, (32,), w)

    x, w = (tensor.detach() for tensor in problem(torch.float32))
    expected = fn(x.clone(), x.cos(), w)
    compiled, _ = compiled_with_passes(fn)
    written = x.clone()
    torch.testing.assert_close(compiled(written, x.cos(), w), expected)
    assert not written.any()


@pytest.mark.parametrize("writes", [False, True])
def test_additions_do_not_move_past_writes(writes: bool) -> None:
    """ATen graphs are functional, except for writes to inputs that other passes have inserted."""
    graph, value = torch.fx.Graph(), torch.empty(4, 32, device="meta")
    x, residual, weight = (graph.placeholder(name) for name in ("x", "residual", "weight"))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, residual))
    between = torch.ops.aten.copy_.default if writes else torch.ops.aten.mul.Tensor
    other = graph.call_function(between, (x, residual))
    norm = graph.call_function(torch.ops.normops.rms_norm.default, (total, [32], weight))
    for node in (x, residual, total, other, norm):
        node.meta["val"] = value
    graph.output((norm, other))
    fuse_additions(graph, "once")
    graph.lint()
    assert norms([str(node.target) for node in graph.nodes]) == ["rms_norm" if writes else "add_rms_norm"]


GRADIENTS: dict[str, tuple[Norm, int]] = {
    "residual": (lambda x, w: F.rms_norm(x, (32,), w).sin() + x.mm(x.detach()), 0),
    "residual first": (lambda x, w: x.mm(x.detach()) + F.rms_norm(x, (32,), w).sin(), 0),
    "two norms": (lambda x, w: F.rms_norm(x, (32,), w).sin() + F.rms_norm(x, (32,)).cos(), 0),
    "through a transpose": (lambda x, w: F.rms_norm(x.T, (32,), w).sin() + x.mm(x.detach()), 1),
    "alone": (lambda x, w: F.rms_norm(x, (32,), w).sin(), 0),
    "another shape": (lambda x, w: F.rms_norm(x.expand(2, 32, 32), (32,), w).sin() + x, 1),
    "residual from grad_weight": (lambda x, w: F.rms_norm(x, (32,), w + x.mean(0)).sin(), 1),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_additions_of_gradients_are_fused(case: str) -> None:
    fn, additions = GRADIENTS[case]
    inputs = problem(torch.float32, 32, 32)
    compiled, graphs = compiled_with_passes(fn)
    for actual, other in zip(results(compiled, inputs), results(fn, inputs), strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-5)
    assert len([name for name in graphs.backward if name == "aten.add.Tensor"]) == additions


@pytest.mark.parametrize("arguments", [{"options": normops.inductor_options()}, {"backend": "normops"}])
def test_inductor(arguments: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = stack()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, **arguments)
    for rows in (4, 7):
        x = problem(torch.float32, rows, 2, 32)[0]
        assert_close(results(compiled, (x,)), results(model, (x,)), torch.float32)
    ran = operators_run(lambda: results(compiled, (x,)))
    assert ran == [
        "normops::rms_norm",
        *["normops::add_rms_norm"] * 3,
        *["normops::rms_norm_backward"] * 4,
    ]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert operators_run(lambda: compiled(x)) == ["normops::rms_norm", *["normops::add_rms_norm"] * 3]


def test_backend_accepts_mode_and_options() -> None:
    torch._dynamo.reset()
    model, x = stack(), problem(torch.float32)[0]
    for arguments in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": False}}):
        compiled = torch.compile(model, backend="normops", **arguments)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
            assert len(operators_run(lambda compiled=compiled: compiled(x))) == 4  # type: ignore[misc]
    with pytest.raises(Exception, match="Unrecognized mode=fast"):
        torch.compile(stack(), backend="normops", mode="fast")(x)


def test_options_compare_equal() -> None:
    """torch.compile compiles once for equal options."""
    assert normops.inductor_options() == normops.inductor_options()
    assert len(set(normops.inductor_options().values())) == 2
    assert len({each.uuid() for each in normops.inductor_options().values()}) == 2


def test_cache_key_covers_every_source_of_the_package() -> None:
    """The sources include modules that the passes import, like normops/_operators.py."""
    loaded = [module.__file__ for name, module in sys.modules.items() if name.startswith("normops")]
    sources = {str(path) for path in loaded if str(path).endswith(".py")}
    assert normops._operators.__file__ in sources
    assert sources <= {*passes._SOURCES}


class Noting(CustomGraphPass):
    """A user's pass, which records the operators that it sees."""

    def __init__(self, name: str = "noting") -> None:
        self.name = name
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> str:
        return self.name


PASSES = ("pre_grad_custom_pass", "post_grad_custom_pre_pass")


@pytest.mark.parametrize("place", ["options of the backend", "config", "options", "config, for the backend"])
def test_user_passes_run_first(place: str) -> None:
    """Before autograd, user passes see torch's norm, and after it an addition and normops' norm."""
    others = {name: Noting() for name in PASSES}
    torch._dynamo.reset()
    with inductor_config.patch(others if "config" in place else {}), fresh_cache():
        arguments: dict[str, Any] = {"backend": "normops"}
        if place == "options of the backend":
            arguments["options"] = others
        elif "backend" not in place:
            arguments = {"options": normops.inductor_options(others if place == "options" else None)}
        compiled = torch.compile(lambda x, r, w: F.rms_norm(x + r, (32,), w), fullgraph=True, **arguments)
        x, w = (tensor.detach() for tensor in problem(torch.float32))
        compiled(x, x, w)
        assert operators_run(lambda: compiled(x, x, w)) == ["normops::add_rms_norm"]
    before, after = (others[name].seen for name in PASSES)
    assert len(before) == 2
    assert "rms_norm" in before[1]
    assert "normops" not in before[1]
    assert after == ["aten.add.Tensor", "normops.rms_norm.default"]


def test_options_combine_with_user_passes() -> None:
    ours, theirs = normops.inductor_options(), normops.inductor_options({"post_grad_custom_pre_pass": Noting()})
    assert ours["pre_grad_custom_pass"] == theirs["pre_grad_custom_pass"]
    assert ours["post_grad_custom_pre_pass"] != theirs["post_grad_custom_pre_pass"]
    uuids = {
        normops.inductor_options({"post_grad_custom_pre_pass": other})["post_grad_custom_pre_pass"].uuid()
        for other in (None, Noting(), Noting(), Noting("another"), print)
    }
    assert len(uuids) == 4
    assert None in uuids  # a plain function has no uuid and is not cached
    assert normops.inductor_options(theirs) == theirs  # our passes are added only once
    assert normops.inductor_options({"max_autotune": True})["max_autotune"]


TRAINING = """
norm, options = torch.nn.RMSNorm(16), {}
step = torch.compile(lambda x, residual: [norm(x + norm(residual))], fullgraph=True, options=options)
"""


@pytest.mark.release  # three cold compilations; test_options_combine_with_user_passes tests the cache key
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    without, first, second = (
        train(tmp_path, TRAINING.format(options))
        for options in ("None", "normops.inductor_options()", "normops.inductor_options()")
    )
    assert without[2] == []
    assert first[0]["autograd_cache_miss"] == 1
    assert (second[0]["autograd_cache_hit"], second[1]["fxgraph_cache_hit"]) == (1, 2)  # forward and backward graph
    assert "autograd_cache_miss" not in second[0]
    expected = [*["normops::rms_norm"] * 2, *["normops::rms_norm_backward"] * 2]  # the first includes the addition
    assert first[2] == second[2] == expected
