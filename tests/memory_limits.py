"""Calls every operator under limits of memory, each in a process of its own, for test_memory_limits.py.

The limits are found by bisection between those where what happens differs: on both sides of each allocation. Prints
what happened, once each, or what is wrong, and how the process ended.
"""

import ctypes
import gc
import os
import re
import resource
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import normops

ops = torch.ops.normops
THREADS = 4
STEP = 16 << 10
EPS = 1e-5


class Problem(NamedTuple):
    input: Tensor
    other: Tensor
    """A residual, or the gate."""
    grad_output: Tensor
    weight: Tensor
    out: Tensor
    residual_out: Tensor
    grad_weight: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self[:4]

    @property
    def cols(self) -> int:
        return self.weight.shape[0]


def call_rms_norm(p: Problem) -> object:
    return normops.rms_norm(p.input, p.cols, p.weight, EPS)


def call_rms_norm_out(p: Problem) -> object:
    return ops.rms_norm.out(p.input, [p.cols], p.weight, EPS, out=p.out)


def call_rms_norm_inplace(p: Problem) -> object:
    return normops.rms_norm_(p.input, p.cols, p.weight, EPS)


def call_rms_norm_backward(p: Problem) -> object:
    return ops.rms_norm_backward(p.grad_output, p.input, [p.cols], p.weight, EPS, grad_residual=p.other)


def call_rms_norm_backward_out(p: Problem) -> object:
    """grad_input takes the place of grad_output."""
    gradients = {"grad_input": p.grad_output, "grad_weight": p.grad_weight}
    return ops.rms_norm_backward.out(
        p.grad_output, p.input, [p.cols], p.weight, EPS, grad_residual=p.other, **gradients
    )


def call_add_rms_norm(p: Problem) -> object:
    return normops.add_rms_norm(p.input, p.other, p.cols, p.weight, EPS)


def call_add_rms_norm_out(p: Problem) -> object:
    outputs = {"out": p.out, "residual_out": p.residual_out}
    return ops.add_rms_norm.out(p.input, p.other, [p.cols], p.weight, EPS, **outputs)


def call_add_rms_norm_inplace(p: Problem) -> object:
    normops.add_rms_norm_(p.input, p.other, p.cols, p.weight, EPS)
    return p.input, p.other


def call_gated_rms_norm(p: Problem) -> object:
    return normops.gated_rms_norm(p.input, p.other, p.cols, p.weight, EPS, norm_before_gate=False)


def call_gated_rms_norm_out(p: Problem) -> object:
    """Into the input."""
    return ops.gated_rms_norm.out(p.input, p.other, [p.cols], p.weight, EPS, norm_before_gate=False, out=p.input)


def call_gated_rms_norm_backward(p: Problem) -> object:
    return ops.gated_rms_norm_backward(p.grad_output, p.input, p.other, [p.cols], p.weight, EPS)


def call_gated_rms_norm_backward_out(p: Problem) -> object:
    """The gradients take the places of the tensors that they belong to."""
    gradients = {"grad_input": p.input, "grad_gate": p.other, "grad_weight": p.grad_weight}
    return ops.gated_rms_norm_backward.out(p.grad_output, p.input, p.other, [p.cols], p.weight, EPS, **gradients)


def call_rms_norm_rope(p: Problem) -> object:
    return normops.rms_norm_rope(p.input, p.other, p.other, p.cols, p.weight, EPS)


def call_rms_norm_rope_inplace(p: Problem) -> object:
    return normops.rms_norm_rope_(p.input, p.other, p.other, p.cols, p.weight, EPS, interleaved=True)


def call_rms_norm_rope_backward(p: Problem) -> object:
    return ops.rms_norm_rope_backward(p.grad_output, p.input, p.other, p.other, [p.cols], p.weight, EPS)


def call_rms_norm_rope_backward_out(p: Problem) -> object:
    """grad_input takes the place of the input."""
    gradients = {"grad_input": p.input, "grad_weight": p.grad_weight}
    return ops.rms_norm_rope_backward.out(
        p.grad_output, p.input, p.other, p.other, [p.cols], p.weight, EPS, **gradients
    )


def call_rms_norm_in_two_steps(p: Problem) -> object:
    square_sum = normops.rms_norm_stats(p.input, p.cols)
    return normops.rms_norm_from_stats(p.input, square_sum, p.cols, p.cols, p.weight, EPS)


def call_rms_norm_backward_in_two_steps(p: Problem) -> object:
    sums = ops.rms_norm_backward_stats(p.grad_output, p.input, [p.cols], p.weight, EPS)
    return ops.rms_norm_backward_from_stats(p.grad_output, p.input, *sums, p.cols, [p.cols], p.weight, EPS)


CALLS: dict[str, Callable[[Problem], object]] = {
    name.removeprefix("call_"): call for name, call in globals().items() if name.startswith("call_")
}


def make_problem(rows: int, cols: int, is_strided: bool) -> Problem:
    """A weight that is converted, its gradient strided; strided: columns that do not lie beside each other."""
    generator = torch.Generator().manual_seed(1)

    def make() -> Tensor:
        tensor = torch.randn(rows, cols, generator=generator)
        return tensor.t().contiguous().t() if is_strided else tensor

    weight = torch.randn(cols, generator=generator).bfloat16()
    grad_weight = torch.empty(2 * cols, dtype=torch.bfloat16)[::2]
    return Problem(make(), make(), make(), weight, make(), make(), grad_weight)


PROBLEMS = {
    "the weight is converted together": (16, 32768, False),
    "each thread converts the weight": (64, 12288, False),
    "columns are shared out": (1, (2048 + 8) * 1024, False),
    "copies are made": (16, 20480, True),
}


def use_up_the_heap() -> None:
    """What malloc has left is less than what it maps memory for."""
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


def flat(result: object) -> list[Tensor]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


class Trial:
    def __init__(self, call: Callable[[Problem], object], problem: Problem) -> None:
        self.call, self.problem = call, problem
        self.inputs = [tensor.clone() for tensor in problem.inputs]
        self.expected = [tensor.clone() for tensor in flat(call(problem))]
        self.restore()

    def restore(self) -> None:
        for tensor, value in zip(self.problem.inputs, self.inputs, strict=True):
            tensor.copy_(value)

    def outcome(self, limit: int) -> str:
        """Of a call that may take so much more memory; checks what there is after it, and the next call."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        use_up_the_heap()
        resource.setrlimit(resource.RLIMIT_AS, (used() + limit, hard))
        try:
            result, what = self.call(self.problem), "done"
        except Exception as error:
            result = None
            what = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if result is None:
            size = re.match(r"RuntimeError: .*you tried to allocate (\d+) bytes", what)
            what = f"no memory for {size[1]}" if size is not None else what
            pairs = zip(self.problem.inputs, self.inputs, strict=True)
            if not all(torch.equal(tensor, value) for tensor, value in pairs):
                what += ", and inputs changed"
            result = self.call(self.problem)
        if not all(torch.equal(tensor, value) for tensor, value in zip(flat(result), self.expected, strict=True)):
            what += ", and the result is wrong"
        self.restore()
        return what

    def outcomes(self) -> list[str]:
        """In the order of the limits."""

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
    for kind, problem in PROBLEMS.items():
        for what in Trial(CALLS[name], make_problem(*problem)).outcomes():
            print(f"{name}: {kind}: {what}", flush=True)


if __name__ == "__main__":
    for name in CALLS:
        child = os.fork()  # no threads have been used
        if child == 0:
            run(name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{name}: ended with {os.waitstatus_to_exitcode(status)}", flush=True)
