"""Several threads use normops at once; they run in parallel if Python has no GIL."""

import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from threading import Barrier
from typing import Any

import norms_of_others as others
import pytest
import torch
from assertions import assert_same_bits
from other_process import python
from torch import Tensor, nn

import normops
from reference import cases
from reference.cases import Case
from reference.operators import DIFFERENTIABLE, OPERATORS, Operator, OperatorCase, of_rows

THREADS, ROUNDS = 4, 5


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Runs each function several times in its own thread; all threads start together. Returns all results."""
    barrier = Barrier(len(functions))

    def run(function: Callable[[], Any]) -> list[Any]:
        barrier.wait()
        return [function() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(chain.from_iterable(threads.map(run, functions)))


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Makes threads switch more often if there is a GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.triton
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_threads_get_the_same_results(operator: Operator, device: str) -> None:
    case = OperatorCase(operator, Case((5, 36), torch.bfloat16, 1, torch.bfloat16), operator.flags[-1], {})
    found = at_once(*[lambda: case.results(device)] * THREADS)
    for results in found:
        assert_same_bits(results, case.results(device))


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_threads_differentiate_by_a_shared_weight(operator: Operator) -> None:
    norm = of_rows(operator, 16)
    x, other, weight = (cases.values(shape, torch.float32, 3 + i) for i, shape in enumerate(((5, 16), (5, 16), (16,))))
    weight.requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        y, *_ = operator.results(norm(leaf, other, weight))
        return torch.autograd.grad(y.square().sum(), (leaf, weight))

    for found in at_once(*[gradients] * THREADS):
        assert_same_bits(found, gradients())


@pytest.mark.usefixtures("quick_turns")
def test_shape_list_may_change_during_a_call() -> None:
    x, shape = torch.randn(8, 8), [8]
    expected = [normops.rms_norm(x, dims) for dims in ([8], [8, 8])]

    def change() -> None:
        for _ in range(2000):
            shape.append(8)
            shape.pop()

    def call() -> None:
        for _ in range(500):
            with suppress(RuntimeError):  # the shape may have more dimensions than the input
                y = normops.rms_norm(x, shape)
                assert any(torch.equal(y, each) for each in expected)

    at_once(change, change, call, call)


@pytest.mark.usefixtures("quick_turns")
def test_threads_may_patch_at_once() -> None:
    """Each thread patches its own model, and all patch a shared model while it runs."""

    def make() -> nn.Module:
        return nn.Sequential(others.LlamaNorm(16), nn.RMSNorm(16), others.GroupedNorm(16))

    x, of_all = torch.randn(3, 16), make()
    y = of_all(x)
    assert set(at_once(*[lambda: str(others.patch(make()))] * THREADS)) == {str(others.patch(make()))}
    for made in at_once(*[lambda: others.patch(of_all)] * THREADS, lambda: of_all(x)):
        if isinstance(made, Tensor):
            torch.testing.assert_close(made, y)
        else:
            assert made.patched.keys() | made.already.keys() == {"0", "1", "2"}, made
    assert ("ignore", None, Warning, None, 0) not in warnings.filters  # recognition adds it temporarily


def test_threads_may_switch_at_once() -> None:
    before = normops.build_info()

    def switch() -> None:
        for enabled, backend in ((True, "triton"), (False, "auto")):
            normops.override_torch(enabled)
            normops.set_backend(backend)

    at_once(*[switch] * THREADS)
    assert normops.build_info() == before


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_importing_normops_does_not_enable_the_gil() -> None:
    is_enabled = "sys._is_gil_enabled()"
    code = f"import sys, torch; before = {is_enabled}; import normops; assert {is_enabled} == before"
    assert python("-W", "error", "-c", code).returncode == 0
