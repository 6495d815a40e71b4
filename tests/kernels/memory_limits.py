"""Calls every operator under memory limits, each in its own process, for test_memory_limits.py.

Bisection finds the limits between which the outcome changes: the two sides of each allocation. Prints each outcome
once, or the failure, and how the process ended.
"""

import ctypes
import gc
import os
import re
import resource
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import normops  # noqa: F401  registers the operators
from reference import cases
from reference.cases import Case
from reference.operators import OPERATORS, Operator, OperatorCase, of_argument

THREADS = 4
STEP = 16 << 10


def _calls() -> Iterator[tuple[str, tuple[Operator, str]]]:
    """Yields each operator's calls: into new memory, in place, and, with an in-place overload, into given memory."""
    for operator in OPERATORS:
        for kind in ("new", "given", "in place"):
            if kind != "given" or operator.inplace:
                yield f"{operator}, {kind}", (operator, kind)


CALLS = dict(_calls())


class Problem:
    """A call of an operator with a weight that must be converted and a strided gradient of the weight.

    ``is_strided``: the columns of each row are not contiguous.
    """

    def __init__(self, operator: Operator, kind: str, rows: int, cols: int, is_strided: bool) -> None:
        layout = cases.transposed_columns if is_strided else cases.contiguous
        of_rows = Case(
            (rows, cols), torch.float32, 1, torch.bfloat16, has_residual=True, layout=layout, grad_layout=layout
        )
        case = OperatorCase(operator, of_rows, operator.flags[-1], {})
        self.operator, self.kind = operator, kind
        self.arguments: dict[str, Any] = case.arguments()
        self.inputs = [value for value in self.arguments.values() if isinstance(value, Tensor)]
        self.targets = case.targets()
        if "grad_weight" in self.targets:
            self.targets["grad_weight"] = torch.empty(2 * cols, dtype=torch.bfloat16)[::2]
        if kind == "in place":
            self.targets |= {
                t: self.arguments[of_argument(t)] for t in self.targets if t not in (*operator.sums, "grad_weight")
            }

    def call(self) -> list[Tensor]:
        if self.kind == "new":
            results = (self.operator.function or self.operator.default)(**self.arguments)
            return [result for result in self.operator.results(results) if result is not None]
        if self.kind == "in place" and self.operator.inplace:
            self.operator.inplace(**self.arguments)
            return [self.arguments[name] for name in self.operator.replaced]
        return list(self.operator.results(self.operator.out(**self.arguments, **self.targets)))


PROBLEMS = {
    "the weight is converted together": (16, 32768, False),
    "each thread converts the weight": (64, 12288, False),
    "columns are shared out": (1, (2048 + 8) * 1024, False),
    "copies are made": (16, 20480, True),
}


def use_up_the_heap() -> None:
    """Exhausts malloc's heap, so that an allocation of STEP bytes maps memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    is_mapped = False
    while not is_mapped:
        block = libc.malloc(ctypes.c_size_t(STEP))
        is_mapped = bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)
    libc.free(ctypes.c_void_p(block))


def used() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))


class Trial:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.inputs = [tensor.clone() for tensor in problem.inputs]
        self.expected = [tensor.clone() for tensor in problem.call()]
        self.restore()

    def restore(self) -> None:
        for tensor, value in zip(self.problem.inputs, self.inputs, strict=True):
            tensor.copy_(value)

    def outcome(self, limit: int) -> str:
        """Returns the outcome of a call with ``limit`` more bytes; checks its result, the inputs and the next call."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        use_up_the_heap()
        resource.setrlimit(resource.RLIMIT_AS, (used() + limit, hard))
        try:
            result, what = self.problem.call(), "done"
        except Exception as error:
            result = []
            what = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if not result:
            size = re.match(r"RuntimeError: .*you tried to allocate (\d+) bytes", what)
            what = f"no memory for {size[1]}" if size is not None else what
            pairs = zip(self.problem.inputs, self.inputs, strict=True)
            if not all(torch.equal(tensor, value) for tensor, value in pairs):
                what += ", and inputs changed"
            result = self.problem.call()
        if not all(torch.equal(tensor, value) for tensor, value in zip(result, self.expected, strict=True)):
            what += ", and the result is wrong"
        self.restore()
        return what

    def outcomes(self) -> list[str]:
        """Returns the outcomes in the order of the limits."""

        def between(low: int, at_low: str, high: int, at_high: str) -> list[str]:
            if at_low == at_high or high - low <= STEP:
                return [at_low]
            middle = (low + high) // 2
            at_middle = self.outcome(middle)
            return between(low, at_low, middle, at_middle) + between(middle, at_middle, high, at_high)

        high = 8 * self.inputs[0].nbytes + (64 << 20)
        at_high = self.outcome(high)
        found = [*between(0, self.outcome(0), high, at_high), at_high]
        return [what for i, what in enumerate(found) if i == 0 or what != found[i - 1]]


def run(name: str) -> None:
    torch.set_num_threads(THREADS)
    gc.disable()
    operator, kind = CALLS[name]
    for title, sizes in PROBLEMS.items():
        for what in Trial(Problem(operator, kind, *sizes)).outcomes():
            print(f"{name}: {title}: {what}", flush=True)


if __name__ == "__main__":
    for name in CALLS:
        child = os.fork()  # no threads have been used
        if child == 0:
            run(name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{name}: ended with {os.waitstatus_to_exitcode(status)}", flush=True)
