"""What a call costs when there is nothing to compute: 1 x 64 float32 on one thread."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import normops
from bench.operators import EPS
from bench.timing import Call, Timing, alternate

MODES = ("no_grad", "forward", "forward + backward")
BASE = "F.layer_norm"
TURNS = 101


def measure_overhead(device: str) -> dict[str, dict[str, Timing]]:
    """By mode and name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings = {}
    for mode in MODES:
        with torch.set_grad_enabled(mode != "no_grad"):
            timings[mode] = alternate(_calls(mode, device), device, turns=TURNS, seconds=0)
    torch.set_num_threads(threads)
    return timings


def _calls(mode: str, device: str) -> dict[str, Call]:
    needs_grad = mode != "no_grad"
    input = torch.randn(1, 64, device=device, requires_grad=needs_grad)
    weight = torch.ones(64, device=device, requires_grad=needs_grad)
    grad_output = torch.randn(1, 64, device=device)
    arguments = (input, [64], weight)
    forward: dict[str, Callable[[], Tensor]] = {
        BASE: partial(F.layer_norm, *arguments, None, EPS),
        "torch.ops.normops.rms_norm": partial(torch.ops.normops.rms_norm, *arguments, EPS),
        "normops.rms_norm": partial(normops.rms_norm, *arguments, EPS),
        "F.rms_norm": partial(F.rms_norm, *arguments, EPS),
    }
    if mode != "forward + backward":
        return dict(forward)

    def with_backward(call: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(call(), (input, weight), grad_output)

    return {name: with_backward(call) for name, call in forward.items()}
