"""Compares torch.vmap with the rules of normops to PyTorch's loop over samples: python -m bench.vmap.

vmap falls back to the loop for an operator without a rule: here the same operators, registered under other names.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import normops  # noqa: F401  registers the operators
from bench import environment
from bench.tables import Row, Table, format_seconds
from bench.timing import alternate, host_timer

SHAPES = ((512, 1, 64), (64, 16, 256), (16, 128, 1024), (8, 512, 4096))  # samples, rows of each, columns
HEADER = ("samples x rows x cols", "operator", "weight", "rule", "loop", "loop over rule")

_library = torch.library.Library("normops_bench", "DEF")  # its registrations last as long as this object


def _without_rules() -> torch._ops._OpNamespace:
    for name in ("rms_norm", "rms_norm_backward"):
        op = getattr(torch.ops.normops, name).default
        _library.define(str(op._schema).removeprefix("normops::"))
        _library.impl(name, op, "CompositeExplicitAutograd")
    return torch.ops.normops_bench


def _calls(ops: Any, cols: int) -> dict[str, Callable[..., Any]]:
    return {
        "rms_norm": lambda dy, x, w: ops.rms_norm(x, [cols], w),
        "rms_norm_backward": lambda dy, x, w: ops.rms_norm_backward(dy, x, [cols], w),
    }


def _rows(shape: tuple[int, int, int], ops: Any, seconds: float) -> list[Row]:
    samples, _, cols = shape
    dy, x = torch.randn(shape), torch.randn(shape)
    rows = []
    for weight, dim, w in (("shared", None, torch.randn(cols)), ("of each sample", 0, torch.randn(samples, cols))):
        for operator, rule in _calls(torch.ops.normops, cols).items():
            mapped = {"rule": rule, "loop": _calls(ops, cols)[operator]}
            calls = {name: partial(torch.vmap(op, (0, 0, dim)), dy, x, w) for name, op in mapped.items()}
            timers = {name: host_timer(call, "cpu") for name, call in calls.items()}
            timings = alternate(timers, turns=21, seconds=seconds)
            ratio = timings["loop"].median / timings["rule"].median
            times = (format_seconds(timings[name].median) for name in calls)
            rows.append(("x".join(map(str, shape)), operator, weight, *times, f"{ratio:.2f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row of the table (default: %(default)s)")
    options = parser.parse_args()
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    ops = _without_rules()
    groups = [_rows(shape, ops, options.seconds) for shape in SHAPES]
    for name, value in environment.describe("bench.vmap").items():
        print(f"{name}: {value}")
    print(Table("vmap, float32", HEADER, groups).markdown())


if __name__ == "__main__":
    main()
