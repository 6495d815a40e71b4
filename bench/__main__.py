"""Times normops beside PyTorch's own RMSNorm, as ratios of medians of alternating repeats: ``python -m bench``.

Two tables: the cost of a call when there is nothing to compute (1 x 64 float32), as a multiple of the native, fused
``F.layer_norm``'s; and forward + backward as a model runs it, with fresh outputs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import normops

Call = Callable[[], object]
Norm = Callable[[Tensor, Tensor], Tensor]
EPS = 1e-5


def alternate(calls: dict[str, Call], *, repeats: int, calls_each: int = 1) -> dict[str, float]:
    """Median seconds per call. The calls take turns, so that a machine that drifts slows all of them alike."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(calls_each):
                call()
            seconds[name].append((time.perf_counter() - start) / calls_each)
    return {name: statistics.median(times) for name, times in seconds.items()}


def ours(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.normops.rms_norm(x, [x.shape[-1]], w, EPS)


def torch_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, [x.shape[-1]], w, EPS)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, [x.shape[-1]], w, None, EPS)


def forward_backward(norm: Norm, x: Tensor, w: Tensor, dy: Tensor) -> Call:
    return lambda: torch.autograd.grad(norm(x, w), (x, w), dy)


def overhead() -> None:
    torch.set_num_threads(1)
    x, w, dy = torch.randn(1, 64), torch.ones(64), torch.randn(1, 64)
    shape = [64]
    rms_norm = torch.ops.normops.rms_norm
    print("Microseconds per call, 1 x 64 float32, 1 thread; in brackets as a multiple of F.layer_norm")
    print(f"{'':20}{'F.layer_norm':>14}{'normops':>18}{'F.rms_norm':>18}")
    for mode in ("no_grad", "forward", "forward + backward"):
        needs_grad = mode != "no_grad"
        a, b = x.clone().requires_grad_(needs_grad), w.clone().requires_grad_(needs_grad)
        calls: dict[str, Call] = {
            "F.layer_norm": partial(F.layer_norm, a, shape, b, None, EPS),
            "normops": partial(rms_norm, a, shape, b, EPS),
            "F.rms_norm": partial(F.rms_norm, a, shape, b, EPS),
        }
        if mode == "forward + backward":
            calls = {
                name: forward_backward(norm, a, b, dy)
                for name, norm in (("F.layer_norm", layer_norm), ("normops", ours), ("F.rms_norm", torch_rms_norm))
            }
        with torch.set_grad_enabled(needs_grad):
            medians = alternate(calls, repeats=101, calls_each=300)
        base = medians["F.layer_norm"]
        print(
            f"{mode:20}{base * 1e6:14.2f}"
            + "".join(
                f"{medians[name] * 1e6:10.2f} ({medians[name] / base:.2f}x)" for name in ("normops", "F.rms_norm")
            )
        )


def check(norms: dict[str, Norm], x: Tensor, w: Tensor, dy: Tensor) -> None:
    """A wrong result is not timed: each peer against the float64 definition, as far as its own dtype tells."""
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(torch_rms_norm(wide[0], wide[1]), wide, dy.double())
    tolerance = 0.05 if x.dtype == torch.bfloat16 else 1e-4
    for name, norm in norms.items():
        for actual, reference in zip(torch.autograd.grad(norm(x, w), (x, w), dy), expected, strict=True):
            error = ((actual.double() - reference).norm() / reference.norm()).item()
            assert error < tolerance, f"{name}: relative error {error}"


def speed(threads: int, repeats: int) -> None:
    torch.set_num_threads(threads)
    norms: dict[str, Norm] = {
        "normops": ours,
        "F.rms_norm": torch_rms_norm,
        "compiled F.rms_norm": torch.compile(torch_rms_norm, fullgraph=True),
    }
    rows_of_table = []
    shapes = [(512, 4096), (4096, 4096)]
    dtypes = [torch.float32, torch.bfloat16]
    for rows, cols in tqdm(shapes, desc="shapes", leave=False):
        for dtype in dtypes:
            x = torch.randn(rows, cols).to(dtype).requires_grad_()
            w = torch.randn(cols).to(dtype).requires_grad_()
            dy = torch.randn(rows, cols).to(dtype)
            check(norms, x, w, dy)
            target = torch.empty_like(dy)
            calls: dict[str, Call] = {"copy": partial(target.copy_, dy)}
            calls |= {name: forward_backward(norm, x, w, dy) for name, norm in norms.items()}
            rows_of_table.append((f"{rows} x {cols} {str(dtype)[6:]}", alternate(calls, repeats=repeats)))
    print(f"\nForward + backward with fresh outputs, {threads} threads: milliseconds (in brackets: over normops')")
    print(f"{'':20}{'copy':>9}{'normops':>9}{'F.rms_norm':>19}{'compiled F.rms_norm':>21}")
    for name, medians in rows_of_table:
        ours_time = medians["normops"]
        print(
            f"{name:20}{medians['copy'] * 1e3:9.2f}{ours_time * 1e3:9.2f}"
            + "".join(f"{medians[peer] * 1e3:12.2f} ({medians[peer] / ours_time:.1f}x)" for peer in list(norms)[1:])
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for forward + backward")
    parser.add_argument("--repeats", type=int, default=21, help="timed turns of each call")
    arguments = parser.parse_args()
    info = normops.build_info()
    print(
        f"normops {info['version']} ({info['cpu_isa']}), torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    overhead()
    speed(arguments.threads, arguments.repeats)


if __name__ == "__main__":
    main()
