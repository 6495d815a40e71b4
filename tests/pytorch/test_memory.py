"""Tests which tensors the forward saves, what both passes allocate, and what activation checkpointing recomputes."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from assertions import assert_same_bits
from calls import Calls
from other_process import printed
from torch import Tensor
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_early_stop,
)

import normops
from reference import cases
from reference.memory import memory_changes
from reference.operators import DIFFERENTIABLE, Operator, of_rows

ops = torch.ops.normops


class Problem(NamedTuple):
    input: Tensor
    residual: Tensor
    weight: Tensor


Block = Callable[[Problem], tuple[Tensor, ...]]


def leaves(dtypes: tuple[torch.dtype, ...], device: str, shape: tuple[int, ...] = (6, 3, 16)) -> Problem:
    shapes = (shape, shape, shape[-1:])
    tensors = (cases.values(s, d, seed).to(device) for seed, (s, d) in enumerate(zip(shapes, dtypes, strict=True)))
    return Problem(*(tensor.requires_grad_() for tensor in tensors))


def norm(t: Problem) -> tuple[Tensor, ...]:
    return (normops.rms_norm(t.input, t.input.shape[-1], t.weight, cases.EPS),)


def add_norm(t: Problem) -> tuple[Tensor, ...]:
    return normops.add_rms_norm(t.input, t.residual, t.input.shape[-1], t.weight, cases.EPS)


def both_norms(t: Problem) -> tuple[Tensor, ...]:
    """The last operator saves one of its outputs."""
    return add_norm(t._replace(input=norm(t)[0] * 2))


def norm_of_sum(t: Problem) -> tuple[Tensor, ...]:
    """The last operator saves only its arguments."""
    return norm(t._replace(input=add_norm(t)[0] * 2))


def gradients(outputs: tuple[Tensor, ...], inputs: Problem) -> tuple[Tensor | None, ...]:
    grad_outputs = [cases.values(tuple(y.shape), y.dtype, seed).to(y.device) for seed, y in enumerate(outputs, 5)]
    torch.autograd.backward(outputs, grad_outputs)
    result = tuple(leaf.grad for leaf in inputs)
    for leaf in inputs:
        leaf.grad = None
    return result


over_dtypes = pytest.mark.parametrize("dtypes", cases.MIXED_DTYPES, ids=str)
over_operators = pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)


@over_dtypes
@over_operators
def test_saves_normalized_tensor_and_weight(operator: Operator, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Other tensors that gradients depend on are saved, too; an operator that returns a sum saves only the sum."""
    t = leaves(dtypes, device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        outputs = operator.results(of_rows(operator, 16)(*t))
    beside = [t.residual for name in operator.tensors if not operator.is_optional(name)]
    expected = [*(outputs[1:] or [t.input, *beside]), t.weight]
    assert [s.data_ptr() for s in saved] == [e.data_ptr() for e in expected]
    assert sum(s.untyped_storage().nbytes() for s in saved) == sum(e.nbytes for e in expected)


def allocations(call: Callable[[], tuple[Tensor, ...]]) -> tuple[list[int], tuple[Tensor, ...]]:
    """Returns the sorted sizes, in bytes, of the tensors that a call allocates, and its result."""
    changes, result = memory_changes(call)
    return sorted(change for change in changes if change > 0), result


@over_dtypes
@over_operators
def test_allocates_only_what_it_returns(operator: Operator, dtypes: tuple[torch.dtype, ...]) -> None:
    """Covers the forward and the backward."""
    t = leaves(dtypes, "cpu", (64, 40))
    made, outputs = allocations(lambda: operator.results(of_rows(operator, 40)(*t)))
    assert made == sorted(y.nbytes for y in outputs)
    grad_outputs = [torch.ones_like(y) for y in outputs]
    made, gradients = allocations(lambda: torch.autograd.grad(outputs, t, grad_outputs, allow_unused=True))
    # input and residual of one dtype receive the same tensor
    assert made == sorted({g.data_ptr(): g.nbytes for g in gradients if g is not None}.values())


def test_full_size_weight_is_not_copied() -> None:
    x, dy, w = (cases.values((1024, 1024), torch.bfloat16, seed) for seed in range(3))
    (*others, one, other), _ = allocations(lambda: ops.rms_norm_backward(dy, x, [1024], w, cases.EPS))
    assert one == other == x.nbytes
    assert sum(others) < x.nbytes


PEAKS = """
import sys, torch, normops

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def report(call):
    before = peak()
    result = call()
    print(peak() - before)
    return result

def run(rows, report):
    x, residual, dy = (torch.ones(rows, 4096, dtype=torch.bfloat16, requires_grad=r) for r in (True, True, False))
    weight = torch.ones(4096, requires_grad=True)
    y = report(lambda: normops.rms_norm(x, 4096, weight))
    gradients = report(lambda: torch.autograd.grad(y, (x, weight), dy))
    outputs = report(lambda: normops.add_rms_norm(x, residual, 4096, weight))
    gradients += report(lambda: torch.autograd.grad(outputs, (x, residual, weight), (dy, dy)))
    gated = report(lambda: normops.gated_rms_norm(x, residual, 4096, weight))
    gradients += report(lambda: torch.autograd.grad(gated, (x, residual, weight), dy))

run(1, lambda call: call())
run(int(sys.argv[1]), report)
"""


def test_peak_memory_is_close_to_the_results() -> None:
    """Operators use little more memory than their results, here 0.75 MiB for grad_weight: no float32 tensor."""
    rows = 2048
    tensor = rows * 4096 * 2
    for peak, tensors in zip(map(int, printed(PEAKS, str(rows)).split()), (1, 1, 2, 1, 1, 2), strict=True):
        assert tensor * tensors * 0.9 < peak < tensor * (tensors + 0.25)


BLOCKS = [norm, add_norm, both_norms, norm_of_sum]
MIXED = (torch.bfloat16, torch.bfloat16, torch.float32)


def counted(call: Callable[[], object]) -> Counter[str]:
    with Calls() as calls:
        call()
    return calls.counts


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("use_reentrant", "early_stop"), [(True, False), (False, False), (False, True)])
def test_activation_checkpointing(block: Block, use_reentrant: bool, early_stop: bool, device: str) -> None:
    t = leaves(MIXED, device)
    once = counted(lambda: block(t))
    expected = gradients(block(t), t)
    with set_checkpoint_early_stop(early_stop), Calls() as calls:
        outputs = checkpoint(lambda *tensors: block(Problem(*tensors)), *t, use_reentrant=use_reentrant)
        assert calls.counts == once
        assert_same_bits(gradients(outputs, t), expected)
    counts = calls.counts
    assert counts.pop("rms_norm_backward") == once.total()
    again = counts - once
    # With early stop, the last operator is not recomputed if it saves only its arguments.
    spared = early_stop and block in (norm, norm_of_sum)
    assert again == once - Counter(rms_norm=int(spared))


def derivatives(block: Block, t: Problem) -> tuple[Tensor | None, ...]:
    """The gradients, and the gradients of their sum of squares."""
    outputs = block(t)
    grad_outputs = [y.detach().sin() for y in outputs]
    first = torch.autograd.grad(outputs, t, grad_outputs, create_graph=True, allow_unused=True)
    sum([g.float().square().sum() for g in first if g is not None], torch.tensor(0.0)).backward()
    return (*first, *(leaf.grad for leaf in t))


@pytest.mark.parametrize("block", BLOCKS)
def test_saved_tensors_hooks(block: Block, device: str) -> None:
    """Hooks return tensors in other memory, with another layout."""
    expected = derivatives(block, leaves(MIXED, device))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        actual = derivatives(block, leaves(MIXED, device))
    assert_same_bits(actual, expected)
