"""normops.patch(model, by="measurement"): what it takes, what it refuses, and what it leaves untouched."""

import random
from collections.abc import Callable
from typing import Any

import norms_of_others as others
import numpy as np
import pytest
import torch
from alike import SIZE, assert_is_what_it_was
from torch import Tensor, nn

import normops

REMEDY = "; write normops.rms_norm into its forward"


class OfFunctionNorm(nn.Module):
    """A norm whose forward is a function of the module and its input, which has no known source."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.eps, self.function, self.calls = 1e-6, function, [0]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Norm(OfFunctionNorm):
    def __init__(self, name: str) -> None:
        super().__init__(NEAR_MISSES[name])


def mean(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def norm(m: Any, x: Tensor) -> Tensor:
    return m.weight * x * torch.rsqrt(mean(x) + m.eps)


def counted(m: Any, x: Tensor) -> Tensor:
    m.calls[0] += 1
    return norm(m, x) * (1.0 if m.calls[0] < 100 else 1.01)


def written(m: Any, x: Tensor) -> Tensor:
    m.last = x
    return norm(m, x)


NEAR_MISSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda m, x: m.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + m.eps),
    "eps outside": lambda m, x: m.weight * x / (mean(x).sqrt() + m.eps),
    "no weight gradient": lambda m, x: m.weight.detach() * x * torch.rsqrt(mean(x) + m.eps),
    "detached": lambda m, x: m.weight * x * torch.rsqrt(mean(x.detach()) + m.eps),
    "clamped": lambda m, x: norm(m, x).clamp(-20, 20),
    "clamped input": lambda m, x: norm(m, x.clamp(-1e4, 1e4)),
    "clamped mean": lambda m, x: m.weight * x * torch.rsqrt(mean(x).clamp_min(m.eps)),
    "no NaN": lambda m, x: norm(m, x.nan_to_num()),
    "by rows": lambda m, x: norm(m, x) if x.shape[0] < 200 else norm(m, x) * 1.01,
    "one row": lambda m, x: norm(m, x) * (1.01 if x.numel() == SIZE else 1.0),
    "by dimensions": lambda m, x: norm(m, x) if x.dim() < 4 else x,
    "by dtype of dimensions": lambda m, x: norm(m, x.float()).to(x.dtype if x.dim() == 3 else torch.float32),
    "across rows": lambda m, x: norm(m, x - x.mean(0, keepdim=True)),
    "training": lambda m, x: norm(m, x) * (1.01 if m.training else 1.0),
    "gradients": lambda m, x: norm(m, x) * (1.01 if torch.is_grad_enabled() else 1.0),
    "dropout": lambda m, x: nn.functional.dropout(norm(m, x), 0.01, training=True),
    "calls": counted,
    "writes": written,
    "in place": lambda m, x: x.mul_(2.0),
    "columns": lambda m, x: torch.cat((norm(m, x)[..., :-1], x[..., -1:]), -1),
    "mean removed": lambda m, x: norm(m, x - x.mean(-1, keepdim=True)),
    "factor": lambda m, x: 1.001 * norm(m, x),
    "unchanged": lambda m, x: x,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused(name: str) -> None:
    module = Norm(name)
    report = normops.patch(module, by="measurement")
    (reason,) = report.skipped.values()
    assert reason.endswith(REMEDY)
    assert type(module) is Norm
    assert module.calls == [0]


TAKEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": norm,
    "einsum": lambda m, x: m.weight * x * (torch.einsum("...i,...i->...", x, x)[..., None] / SIZE + m.eps) ** -0.5,
    "norm": lambda m, x: m.weight * x / (x.float().norm(2, -1, keepdim=True) ** 2 / SIZE + m.eps).sqrt(),
}


@pytest.mark.parametrize("name", TAKEN)
def test_norms_of_unknown_source_are_taken(name: str) -> None:
    patched, original = OfFunctionNorm(TAKEN[name]), OfFunctionNorm(TAKEN[name])
    (reason,) = normops.patch(patched).skipped.values()
    assert 'trial inputs; its source is unknown; patch(model, by="measurement") takes it' in reason
    (text,) = normops.patch(patched, by="measurement").patched.values()
    assert text.startswith("OfFunctionNorm: weight, eps: eps")
    assert text.endswith("measured")
    assert_is_what_it_was(patched, original, some=True)


def test_eps_is_read_at_every_call() -> None:
    patched, original, x = OfFunctionNorm(norm), OfFunctionNorm(norm), torch.randn(3, SIZE)
    assert normops.patch(patched, by="measurement").patched
    for eps in (1e-6, 1.0, 1e2):
        patched.eps = original.eps = eps
        torch.testing.assert_close(patched(x), original(x))


def test_measurement_changes_nothing() -> None:
    module = OfFunctionNorm(lambda m, x: norm(m, x + 0.0 * torch.rand(()) * random.random() * np.random.rand()))
    module.weight.grad = torch.full((SIZE,), 3.0)
    weight, version = module.weight.detach().clone(), module.weight._version
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        normops.patch(module)
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]
    assert torch.equal(module.weight, weight)
    assert module.weight._version == version
    assert torch.equal(module.weight.grad, torch.full((SIZE,), 3.0))
    assert type(module) is OfFunctionNorm


def test_class_that_calls_f_normalize_is_in_the_report() -> None:
    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(x, dim=-1)

    assert normops.patch(Unit()).skipped == {"": f"Unit: computes something else than an RMSNorm{REMEDY}"}


def test_unbacked_sizes_do_not_fail() -> None:
    module, x = others.LlamaNorm(SIZE), torch.randn(4, 6, SIZE)
    assert normops.patch(module).patched

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        count = mask.nonzero().shape[0]
        torch._check(count <= x.shape[1])
        return module(x.narrow(1, 0, count))  # its strides do not tell whether it is contiguous

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
        for count in (3, 6, 1):
            mask = torch.arange(6) < count
            torch.testing.assert_close(compiled(x, mask), fn(x, mask))


@pytest.mark.parametrize("shape", [(1, 4), (1, 1), (2, 1), (2, 2), (0, 2)])
def test_strides_of_dimensions_of_size_1(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, SIZE)
    unusual = [
        x.as_strided(x.shape, (stride if shape[0] == 1 else x.stride(0), stride if shape[1] == 1 else SIZE, 1))
        for stride in (1, 7, 3 * SIZE)
    ]
    for make in (others.LlamaNorm, others.GemmaNorm, others.torch_norm, others.T5Norm, others.GroupedNorm):
        original, patched = others.patched_pair(lambda make=make: make(SIZE), torch.float32)  # type: ignore[misc]
        for each in (x, *unusual, x.movedim(1, 0), x.movedim(0, 1).contiguous().movedim(0, 1)):
            # Without gradients, an empty result has the usual strides.
            for with_gradients in (True, False) if x.numel() else (True,):
                with torch.set_grad_enabled(with_gradients):
                    assert patched(each).stride() == original(each).stride(), (make.__name__, each.shape, each.stride())
