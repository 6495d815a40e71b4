"""Times the backward operators with every output mask, on every supported instruction set: python -m bench.masks.

The time relative to all outputs is in brackets. A mask with fewer outputs should not take longer. If it does, a loop
was compiled badly, which has happened for a single instruction set, dtype and mask.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch

import normops
from bench import environment
from bench.operators import random_call
from bench.problems import dtype_name
from bench.tables import Row, Table, format_seconds
from bench.timing import alternate, host_timer
from reference import operators as reference

Shapes = Sequence[tuple[int, ...]]
SHAPES = ((8, 1, 4096), (512, 1, 4096), (512, 32, 64))  # tokens, heads, columns
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPERATORS = [operator for operator in reference.OPERATORS if operator.has_mask and not operator.sums]


def _variants(operator: reference.Operator) -> Iterator[tuple[str, reference.Flags, list[str]]]:
    """Yields labels, flags and tensors: for all flags but roundings, with no optional tensor and with each one."""
    optional = [name for name in operator.inputs if operator.is_optional(name) and name != "weight"]
    given = [name for name in operator.inputs if name not in optional]
    for flags in operator.flags:
        if flags["rounding"] == "once":
            words = [f"{name}={value}" for name, value in flags.items() if value and name != "rounding"]
            for names in (given, *([*given, name] for name in optional)):
                yield " ".join((operator.name, *words, *names[len(given) :])), flags, names


def rows(dtypes: Sequence[torch.dtype], shapes: Shapes, seconds: float) -> list[Row]:
    """Returns a row for each mask, with the time on this process's instruction set in the last column."""
    found: list[Row] = []
    for dtype, shape, operator in product(dtypes, shapes, OPERATORS):
        masks = [mask for mask in operator.masks() if any(mask)]
        for label, flags, names in _variants(operator):
            call = random_call(operator, flags, names, shape, dtype)
            timers = {mask: host_timer(partial(call, output_mask=mask), "cpu") for mask in masks}
            timings = alternate(timers, turns=11, seconds=seconds)
            for mask, timing in timings.items():
                wanted = ", ".join(
                    output for output, is_wanted in zip(operator.outputs, mask, strict=True) if is_wanted
                )
                cell = f"{format_seconds(timing.median)} ({timing.median / timings[masks[0]].median:.2f}x)"
                found.append((dtype_name(dtype), "x".join(map(str, shape)), label, wanted, cell))
    return found


def _measure(seconds: float) -> list[Row]:
    torch.set_num_threads(1)
    environment.keep_freed_memory()
    return rows(DTYPES, SHAPES, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="for all masks of a row (default: %(default)s)")
    options = parser.parse_args()
    for name, value in environment.describe("bench.masks").items():
        print(f"{name}: {value}")
    info = normops.build_info()
    isas = info["cpu_isas"][1 : info["cpu_isas"].index(info["cpu_isa"]) + 1]
    of_isas = []
    for isa in isas:
        os.environ["NORMOPS_CPU_ISA"] = isa  # a new process reads it when it imports normops
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            of_isas.append(pool.submit(_measure, options.seconds).result())
    merged = [(*of_mask[0][:-1], *(row[-1] for row in of_mask)) for of_mask in zip(*of_isas, strict=True)]
    header = ("dtype", "tokens x heads x cols", "operator", "outputs", *isas)
    print(Table("Backwards, one thread", header, [merged]).markdown())


if __name__ == "__main__":
    main()
