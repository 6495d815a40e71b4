"""Measures the host's overhead of a call with little to compute, on one thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import normops
from bench.operators import EPS
from bench.problems import Size
from bench.timing import Call, Timing, alternate, host_timer

ops = torch.ops.normops

MODES = ("no_grad", "forward", "forward + backward")
BASE = "F.layer_norm"
TURNS = 101

# On a GPU, kernels of this size still take less time than their launch.
COLS = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Overhead:
    size: Size
    timings: Mapping[str, Mapping[str, Timing]]
    """By mode and name."""


def measure_overhead(device: str) -> Overhead:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    size = Size(1, COLS[device], torch.float32, device)
    timings = {}
    for mode in MODES:
        with torch.set_grad_enabled(mode != "no_grad"):
            timers = {name: host_timer(call, device) for name, call in _calls(mode, size).items()}
            timings[mode] = alternate(timers, turns=TURNS, seconds=0)
    torch.set_num_threads(threads)
    return Overhead(size, timings)


def _calls(mode: str, size: Size) -> dict[str, Call]:
    needs_grad = mode != "no_grad"
    input = torch.randn(size.rows, size.cols, device=size.device, requires_grad=needs_grad)
    weight = torch.ones(size.cols, device=size.device, requires_grad=needs_grad)
    grad_output = torch.randn(size.rows, size.cols, device=size.device)
    residual = torch.randn_like(input, requires_grad=needs_grad)
    arguments = ([size.cols], weight, EPS)
    module, patched = (torch.nn.RMSNorm(size.cols, EPS, device=size.device) for _ in range(2))
    normops.patch(patched, strict=True)
    forward: dict[str, Callable[[], Tensor]] = {
        BASE: partial(F.layer_norm, input, [size.cols], weight, None, EPS),
        "torch.ops.normops.rms_norm": partial(ops.rms_norm, input, *arguments),
        "normops.rms_norm": partial(normops.rms_norm, input, *arguments),
        "F.rms_norm": partial(F.rms_norm, input, *arguments),
        "torch.ops.normops.add_rms_norm": lambda: ops.add_rms_norm(input, residual, *arguments)[0],
        "normops.add_rms_norm": lambda: normops.add_rms_norm(input, residual, *arguments)[0],
        "torch.nn.Identity": partial(torch.nn.Identity(), input),
        "torch.nn.RMSNorm": partial(module, input),
        "torch.nn.RMSNorm, patched": partial(patched, input),
    }
    if mode == "no_grad":
        out, residual_out = torch.empty_like(input), torch.empty_like(input)
        return forward | {
            "torch.ops.normops.rms_norm.out": partial(ops.rms_norm.out, input, *arguments, out=out),
            "torch.ops.normops.add_rms_norm.out": partial(
                ops.add_rms_norm.out, input, residual, *arguments, out=out, residual_out=residual_out
            ),
        }
    if mode == "forward":
        return dict(forward)

    def with_backward(call: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(call(), (input, weight), grad_output)

    return {name: with_backward(call) for name, call in forward.items() if not name.startswith("torch.nn.")}
