"""Several threads at once, which run at the same time where Python has no GIL."""

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
    """What each returns that is run some times over, by a thread of its own: all begin together."""
    barrier = Barrier(len(functions))

    def run(function: Callable[[], Any]) -> list[Any]:
        barrier.wait()
        return [function() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(chain.from_iterable(threads.map(run, functions)))


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Where there is a GIL, it goes from one to another more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.triton
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_operators(operator: Operator, device: str) -> None:
    case = OperatorCase(operator, Case((5, 36), torch.bfloat16, 1, torch.bfloat16), operator.flags[-1], {})
    found = at_once(*[lambda: case.results(device)] * THREADS)
    for results in found:
        assert_same_bits(results, case.results(device))


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_gradients_by_what_threads_share(operator: Operator) -> None:
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
def test_a_list_that_others_change() -> None:
    x, shape = torch.randn(8, 8), [8]
    expected = [normops.rms_norm(x, dims) for dims in ([8], [8, 8])]

    def change() -> None:
        for _ in range(2000):
            shape.append(8)
            shape.pop()

    def call() -> None:
        for _ in range(500):
            with suppress(RuntimeError):  # of more dimensions than there are
                y = normops.rms_norm(x, shape)
                assert any(torch.equal(y, each) for each in expected)

    at_once(change, change, call, call)


@pytest.mark.usefixtures("quick_turns")
def test_patching() -> None:
    """Models of their own, and one of all, which runs meanwhile."""

    def make() -> nn.Module:
        return nn.Sequential(others.LlamaNorm(16), nn.RMSNorm(16), others.GroupedNorm(16))

    x, of_all = torch.randn(3, 16), make()
    y = of_all(x)
    assert set(at_once(*[lambda: str(normops.patch(make()))] * THREADS)) == {str(normops.patch(make()))}
    for made in at_once(*[lambda: normops.patch(of_all)] * THREADS, lambda: of_all(x)):
        if isinstance(made, Tensor):
            torch.testing.assert_close(made, y)
        else:
            assert made.patched.keys() | made.already.keys() == {"0", "1", "2"}
    assert ("ignore", None, Warning, None, 0) not in warnings.filters  # that of the time when a norm is recognised


def test_switches() -> None:
    before = normops.build_info()

    def switch() -> None:
        for enabled, backend in ((True, "triton"), (False, "auto")):
            normops.set_override_torch(enabled)
            normops.set_backend(backend)

    at_once(*[switch] * THREADS)
    assert normops.build_info() == before


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_importing_normops_needs_no_gil() -> None:
    is_enabled = "sys._is_gil_enabled()"
    code = f"import sys, torch; before = {is_enabled}; import normops; assert {is_enabled} == before"
    assert python("-W", "error", "-c", code).returncode == 0
