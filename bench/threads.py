"""Times the operators and a copy with 1, 2, 4, ... threads: python -m bench.threads.

"Over copy" is the time relative to y.copy_(x), in the same turns with the same number of threads. It is constant if an
operator scales like a copy. The last table is computed, not measured: the efficiency that a backward's division of rows
allows. It is the average work of a thread over the maximum.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from bench import environment
from bench.operators import EPS, heads_of
from bench.problems import dtype_name, parse_shapes
from bench.tables import Row, Table, format_seconds
from bench.timing import Timing, alternate, host_timer
from normops import _C
from reference import operators as reference

SHAPES = ("64x4096", "1024x4096", "64x65536", "16384x128")
COPY = "copy"
COMPUTED_THREADS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192)
# [rows, columns, groups]: norms, 32 heads with a weight each, 64 samples with a scale each.
COMPUTED_SHAPES = (
    (64, 4096, 1),
    (512, 4096, 1),
    (4096, 4096, 1),
    (64, 65536, 1),
    (512, 16384, 1),
    (2048, 8192, 1),
    (16384, 128, 1),
    (131072, 128, 32),
    (65536, 1152, 64),
)

# Labels, operators, and the results that are not requested.
OPERATORS: tuple[tuple[str, reference.Operator, tuple[str, ...]], ...] = (
    ("rms_norm", reference.RMS_NORM, ()),
    ("rms_norm_backward", reference.RMS_NORM_BACKWARD, ("grad_bias",)),
    ("rms_norm_backward, no grad_weight", reference.RMS_NORM_BACKWARD, ("grad_weight", "grad_bias")),
    ("add_rms_norm", reference.ADD_RMS_NORM, ()),
    ("gated_rms_norm", reference.GATED_RMS_NORM, ()),
    ("gated_rms_norm_backward", reference.GATED_RMS_NORM_BACKWARD, ()),
    ("rms_norm_rope", reference.RMS_NORM_ROPE, ()),
    ("rms_norm_rope_backward", reference.RMS_NORM_ROPE_BACKWARD, ()),
)

Timings = dict[int, dict[str, Timing]]
"""By the number of threads, and by the label of the call."""


def counts_up_to(most: int) -> list[int]:
    """Returns 1, 2, 4, ..., and ``most``."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def _calls(rows: int, cols: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    shape = rows // heads_of(rows), heads_of(rows), cols
    source = torch.randn(shape).to(dtype)
    yield COPY, partial(torch.empty_like(source).copy_, source)
    for label, operator, unwanted in OPERATORS:
        flags = operator.flags[0]
        names = [name for name in operator.inputs if not operator.is_optional(name)]
        inputs = {name: torch.randn(operator.shape_of(name, shape, flags)).to(dtype) for name in names}
        inputs["weight"] = torch.randn(cols).to(dtype)
        call = partial(operator.default, **inputs, **flags, normalized_shape=(cols,), eps=EPS)
        if operator.has_mask:
            call = partial(call, output_mask=[name not in unwanted for name in operator.outputs])
        yield label, call


def measure(rows: int, cols: int, dtype: torch.dtype, threads: Sequence[int], seconds: float) -> Timings:
    calls = dict(_calls(rows, cols, dtype))
    timings: Timings = {}
    for count in threads:
        torch.set_num_threads(count)
        timers = {label: host_timer(call, "cpu") for label, call in calls.items()}
        timings[count] = alternate(timers, turns=11, seconds=seconds)
    return timings


def table(title: str, timings: Timings) -> Table:
    """Returns a table of the time of each call, with the time relative to a copy in brackets."""

    def cell(label: str, of_count: dict[str, Timing]) -> str:
        median = of_count[label].median
        over_copy = "" if label == COPY else f" ({median / of_count[COPY].median:.2f})"
        return format_seconds(median) + over_copy

    labels = next(iter(timings.values()))
    rows = [(label, *(cell(label, of_count) for of_count in timings.values())) for label in labels]
    header = ("1 thread" if count == 1 else f"{count} threads" for count in timings)
    return Table(title, ("over copy in brackets", *header), [rows])


def efficiency(rows: int, cols: int, groups: int, sums_rows: bool, threads: int) -> float:
    """Returns the average work of a thread over the maximum."""
    parts = _C.elements_of_parts(rows, cols, groups, sums_rows, threads)
    return sum(parts) / threads / max(parts)


def computed_table() -> Table:
    def row(rows: int, cols: int, groups: int, sums_rows: bool) -> Row:
        name = (
            f"{rows}x{cols}" + (f", {groups} groups" if groups > 1 else "") + ("" if sums_rows else ", no grad_weight")
        )
        return name, *(f"{efficiency(rows, cols, groups, sums_rows, count):.2f}" for count in COMPUTED_THREADS)

    groups = [[row(*shape, sums_rows) for sums_rows in (True, False)] for shape in COMPUTED_SHAPES]
    return Table("Backward: computed efficiency", ("rows x cols", *map(str, COMPUTED_THREADS)), groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="ROWSxCOLS (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="maximum (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum time for a shape and a number of threads")
    parser.add_argument("--save", type=Path, help="folder for threads.md")
    options = parser.parse_args()
    environment.keep_freed_memory()
    tables, counts = [], counts_up_to(options.threads)
    for dtype in (getattr(torch, name) for name in options.dtype):
        for rows, cols in (shape for name in options.shapes for shape in parse_shapes(name, dtype.itemsize)):
            title = f"{rows}x{cols} {dtype_name(dtype)}"
            tables.append(table(title, measure(rows, cols, dtype, counts, options.seconds)))
    lines = [f"{name}: {value}" for name, value in environment.describe("bench.threads").items()]
    text = "\n".join([*(f"* {line}" for line in lines), "", *(each.markdown() for each in [*tables, computed_table()])])
    print(text)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "threads.md").write_text(text)


if __name__ == "__main__":
    main()
