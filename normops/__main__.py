"""Checks this installation: run ``python -m normops`` after installing, and paste its output into a bug report.

Prints how normops was built and which kernels run. Runs each operator forward and backward on every available device,
compares it with its definition in float64, and times it. The exit code is 0 if all results are right, else 1.
"""

import platform
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import normops

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""The versions of Python that normops was tested with."""

ROWS, COLS = 64, 4096
EPS = 1e-5
# The largest accepted error. The unit is half the dtype's epsilon times the largest magnitude of the result. A gradient
# that is a sum over rows also multiplies it by the root of their number. One rounding has an error of up to one unit.
# Arithmetic in float32 adds errors that only float32 results show.
ALLOWED = {torch.float32: 8, torch.bfloat16: 2}


class Check(NamedTuple):
    """An operator, its definition, and the number of its input tensors that have rows."""

    name: str
    inputs: int
    run: Callable[..., Sequence[Tensor]]
    define: Callable[..., Sequence[Tensor]]


def _norm(h: Tensor, weight: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight


def _tables(like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tables that replace cosines and sines: their numbers are exact in every dtype."""
    columns = torch.arange(COLS, device=like.device)
    return ((columns % 5 - 2) / 2).to(like.dtype), ((columns % 3 - 1) / 2).to(like.dtype)


def _rotated(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = h.chunk(2, -1)
    return h * cos + torch.cat((-second, first), -1) * sin


def _of_channels(x: Tensor) -> Tensor:
    """Views the same memory as one sample whose positions are the rows."""
    return x.view(1, COLS, -1)


CHECKS = (
    Check("rms_norm", 1, lambda x, w: [normops.rms_norm(x, COLS, w, EPS)], lambda x, w: [_norm(x, w)]),
    Check(
        "add_rms_norm",
        2,
        lambda x, residual, w: normops.add_rms_norm(x, residual, COLS, w, EPS),
        lambda x, residual, w: [_norm(x + residual, w), x + residual],
    ),
    Check(
        "gated_rms_norm",
        2,
        lambda x, gate, w: [normops.gated_rms_norm(x, gate, COLS, w, EPS)],
        lambda x, gate, w: [_norm(x, w) * gate * gate.sigmoid()],
    ),
    Check(
        "rms_norm_rope",
        1,
        lambda x, w: [normops.rms_norm_rope(x, *_tables(x), COLS, w, EPS)],
        lambda x, w: [_rotated(_norm(x, w), *_tables(x))],
    ),
    Check(
        "channel_rms_norm",
        1,
        lambda x, w: [normops.rms_norm(_of_channels(x), COLS, w, EPS, dim=1, activation="silu").view_as(x)],
        lambda x, w: [torch.nn.functional.silu(_norm(_of_channels(x).mT, w)).mT.reshape(x.shape)],
    ),
)


def devices() -> list[str]:
    """Returns the names of all devices that torch sees."""
    found = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    other = torch.accelerator.current_accelerator(check_available=True)
    return found + ([str(other)] if other is not None and other.type != "cuda" else [])


def kernels_of(device: str) -> str:
    """Returns the name of the kernels that run on a device."""
    isa = normops.build_info()["cpu_isa"]
    if device == "cpu" and isa != "composite":
        return f"C++, {isa}"
    backend = normops.build_info()["cuda_backend"] if device.startswith("cuda") else None
    return {"cuda": "CUDA C++", "triton": "Triton"}.get(backend or "", "PyTorch operators")


def _tensors(check: Check, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the arguments, and gradients of the results. The sum of any two of their numbers is exact."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(-64, 65, (ROWS, COLS), generator=generator) / 32 for _ in range(check.inputs)]
    grads = [torch.randint(-64, 65, (ROWS, COLS), generator=generator) / 32 for _ in range(check.inputs)]
    weight = 1 + torch.randint(-64, 65, (COLS,), generator=generator) / 128
    return [t.to(device, dtype).requires_grad_() for t in [*rows, weight]], [t.to(device, dtype) for t in grads]


Run = Callable[..., Sequence[Tensor]]


def _all_results(run: Run, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    outputs = run(*tensors)
    return [*outputs, *torch.autograd.grad(outputs, tensors, grads[: len(outputs)])]


def largest_error(check: Check, dtype: torch.dtype, device: str) -> float:
    """Returns the largest error of all outputs and gradients, in the units of ALLOWED."""
    tensors, grads = _tensors(check, dtype, device)
    results = _all_results(check.run, tensors, grads)
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    expected = _all_results(check.define, exact, [g.cpu().double() for g in grads])
    worst = 0.0
    for result, right in zip(results, expected, strict=True):
        terms = ROWS**0.5 if right.dim() == 1 else 1.0  # the weight's gradient: a sum over rows
        unit = torch.finfo(dtype).eps / 2 * right.abs().max() * terms
        error = ((result.detach().cpu().double() - right).abs().max() / unit).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _microseconds(call: Callable[[], object], device: str) -> float:
    """Returns the median time of a call, synchronization included."""
    times: list[float] = []
    stop = time.perf_counter() + 0.2
    while time.perf_counter() < stop or len(times) < 5:
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _row(check: Check, dtype: torch.dtype, device: str) -> tuple[list[str], bool]:
    name = [device, check.name, str(dtype).removeprefix("torch."), kernels_of(device)]
    try:
        error = largest_error(check, dtype, device)
        tensors, grads = _tensors(check, dtype, device)
        forward = _microseconds(lambda: check.run(*(t.detach() for t in tensors)), device)
        both = _microseconds(lambda: _all_results(check.run, tensors, grads), device)
    except Exception as failure:  # the report also shows which operators work
        return [*name, f"failed: {type(failure).__name__}: {failure}"], False
    is_right = error <= ALLOWED[dtype]
    return [*name, f"{forward:.0f} us", f"{both:.0f} us", f"{error:.2g}", "ok" if is_right else "WRONG"], is_right


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows if len(row) > i + 1) for i in range(max(map(len, rows)) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, [*widths[: len(row) - 1], 0], strict=False)]
        yield "  " + "  ".join(cells).rstrip()


def _shown(value: object) -> str:
    return ", ".join(value) or "none" if isinstance(value, list) else "none" if value is None else str(value)


def python() -> str:
    """Returns the version of Python, with the tested versions if it is newer than these."""
    version = platform.python_version()
    is_later = int(version.split(".")[1]) > int(PYTHONS[-1].split(".")[1])
    return f"{version} (tried: {PYTHONS[0]} to {PYTHONS[-1]})" if is_later else version


def main() -> int:
    """Prints the report and returns the exit code."""
    info = {"python": python(), "torch installed": torch.__version__, **normops.build_info()}
    print("\n".join(_lines([[name, _shown(value)] for name, value in info.items()])))
    header = ["device", "operator", "dtype", "kernels", "forward", "and backward", "error", ""]
    results = [_row(check, dtype, device) for device in devices() for check in CHECKS for dtype in ALLOWED]
    print(f"\n  {ROWS} x {COLS}, compared with the definition in float64; error in half units of the last place")
    print("\n".join(_lines([header, *(row for row, _ in results)])))
    wrong = sum(not is_right for _, is_right in results)
    print(f"\n  {'all right' if not wrong else f'{wrong} of {len(results)} WRONG: please report all of the above'}")
    return int(wrong > 0)


if __name__ == "__main__":
    ArgumentParser(prog="python -m normops", description="Checks this installation.").parse_args()
    sys.exit(main())
