"""Traces the CUDA kernels as built in place for sm_90: python -m bench.cuda_traces.

For every configuration: the instructions that a warp executes (of a backward, which is a loop over rows, in an
iteration), and what share of a copy's speed the multiprocessors could ask for. Instructions are counted; the shares are
estimates that rest on assumed latencies (bench/sass), not measurements. --record writes registers and instructions of
all kernels, which a test compares with.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.report import print_tables
from bench.sass.estimate import LAUNCH_GAP, estimate
from bench.sass.machine_code import Kernel, load_kernels
from bench.sass.trace import LOAD_FROM_L1, LOAD_FROM_L2, Launch, Parameters, Trace, trace
from bench.tables import Row, Table

ROOT = Path(__file__).parent.parent
OBJECTS = ROOT / "build" / "ext" / "cuda"
SOURCES = ("rms_norm", "add_rms_norm", "rms_norm_backward", "gated_rms_norm", "gated_rms_norm_backward")
RECORDED = ROOT / "tests" / "cuda_counts.json"
DTYPE_BYTES = {"bfloat16": 2, "float": 4}
HEADER = ("columns", "blocks", "registers", "instructions", "of a copy, by the multiprocessors", "and memory")

# Where tensors are taken to be.
WEIGHT, GRAD_OUTPUT, INPUT, OUTPUT, PARTIALS = 0x7000000, 0x10000000, 0x20000000, 0x40000000, 0x50000000
GATE, GRAD_GATE = 0x30000000, 0x60000000
MANY_ROWS, EPS = 1 << 20, 1e-5


@dataclass(frozen=True)
class Config:
    """A line of kConfigs in csrc/cuda/launch_config.h."""

    packs_of_row: int
    packs: int
    threads: int
    cluster: int

    @property
    def block(self) -> tuple[int, int]:
        """As block_of in csrc/cuda/rms_norm_row.cuh."""
        return self.threads, 128 // self.threads if self.threads <= 32 else 1

    def cols(self, dtype: str) -> int:
        """At most."""
        return self.packs_of_row * 16 // DTYPE_BYTES[dtype]


def configs() -> list[Config]:
    header = (ROOT / "csrc" / "cuda" / "launch_config.h").read_text()
    table = header.split("kConfigs[] = {")[1].split("};")[0]
    return [Config(*map(int, numbers)) for numbers in re.findall(r"\{(\d+), (\d+), (\d+), (\d+)\}", table)]


def gated_configs() -> list[Config]:
    """As gated_config of the same header."""
    halved = [
        replace(config, threads=config.threads // 2, cluster=config.cluster * 2) if config.threads == 512 else config
        for config in configs()
    ]
    return [config for config in halved if config.packs <= 4 and config.cluster <= 16]


def all_kernels() -> dict[str, Kernel]:
    return {name: kernel for source in SOURCES for name, kernel in load_kernels(OBJECTS / f"{source}.o").items()}


def counts(kernels: dict[str, Kernel]) -> dict[str, dict[str, int]]:
    return {
        name: {"registers": kernel.registers, "instructions": len(kernel.instructions)}
        for name, kernel in sorted(kernels.items())
    }


def _parameters(rows: int, cols: int, *tensors: int) -> Parameters:
    """Forward and its input, or Backward, with plain access."""
    parameters: Parameters = [
        (0, rows, 8),
        (8, cols, 8),
        (16, 1 / cols, 8),
        (24, EPS, 8),
        (32, 1, 8),
        (40, WEIGHT, 8),
        (48, 0.0, 4),
    ]
    for number, data in enumerate(tensors):
        parameters += [(56 + 16 * number, data, 8), (64 + 16 * number, cols, 8)]
    return [*parameters, (56 + 16 * len(tensors), PARTIALS, 8)]


def _follow(kernel: Kernel, config: Config, parameters: Parameters) -> Trace:
    # A block of the backward reads the same part of the weight for row after row. One of a forward that shares a row
    # with others finds what another block of its multiprocessor, another part, has read.
    stays = config.cluster == 1 or "backward" in kernel.name
    cycles = LOAD_FROM_L1 if stays else LOAD_FROM_L2
    near = [(WEIGHT, cycles), (PARTIALS, cycles)]
    result = trace(kernel, Launch(config.block, (1, config.cluster), parameters, near, config.cluster))
    if result.ended != "exit":
        raise SystemExit(f"{kernel.name}: ended by {result.ended}")
    return result


def _row(
    dtype: str, config: Config, kernel: Kernel, of_iteration: tuple[int, int, int], traffic: tuple[int, int]
) -> Row:
    instructions, cycles, shared_bytes = of_iteration
    threads, gap = config.block[0] * config.block[1], 0 if "backward" in kernel.name else LAUNCH_GAP
    shared_bytes += kernel.shared_bytes
    found = estimate(instructions, cycles, *traffic, kernel.registers, threads, shared_bytes, gap)
    shares = f"{found.share:.2f}", f"{found.estimate:.2f}"
    return str(config.cols(dtype)), str(config.cluster), str(kernel.registers), str(instructions), *shares


def _forward(dtype: str, config: Config, kernels: dict[str, Kernel]) -> Row:
    kernel = kernels[f"rms_norm_kernel<{dtype}, {config.packs}, Plain>"]
    asked = _asked_by_forward(config)
    result = _follow(kernel, config, _parameters(MANY_ROWS, config.cols(dtype), OUTPUT, INPUT))
    return _row(dtype, config, kernel, (result.instructions, result.cycles, 0), (2 * asked, asked))


def _gated_forward(dtype: str, config: Config, kernels: dict[str, Kernel], norm_first: bool) -> Row:
    kernel = kernels[f"gated_rms_norm_kernel<{dtype}, {config.packs}, {str(norm_first).lower()}, Plain>"]
    asked, cols = _asked_by_forward(config), config.cols(dtype)
    silu = (56 + 3 * 16, 0, 1)
    result = _follow(kernel, config, [*_parameters(MANY_ROWS, cols, OUTPUT, INPUT, GATE)[:-1], silu])
    return _row(dtype, config, kernel, (result.instructions, result.cycles, 0), (3 * asked, 2 * asked))


def _asked_by_forward(config: Config) -> int:
    """Bytes of one input, by a warp."""
    return 512 * config.packs * {1: 4, 2: 2}.get(config.packs, 1)  # rows_in_flight


def _backward(dtype: str, config: Config, kernels: dict[str, Kernel]) -> Row:
    kernel = kernels[f"rms_norm_backward_kernel<{dtype}, {dtype}, {config.packs}, Plain>"]
    cols = config.cols(dtype)

    def parameters(rows: int) -> Parameters:
        return _parameters(rows, cols, GRAD_OUTPUT, INPUT, 0, OUTPUT)

    asked = 512 * config.packs
    return _row(dtype, config, kernel, _iteration(dtype, config, kernel, parameters), (3 * asked, 2 * asked))


def _gated_backward(dtype: str, config: Config, kernels: dict[str, Kernel], norm_first: bool) -> Row:
    kernel = kernels[f"gated_rms_norm_backward_kernel<{dtype}, {config.packs}, Plain>"]
    cols = config.cols(dtype)

    def parameters(rows: int) -> Parameters:
        gate = [(128, GATE, 8), (136, cols, 8), (144, GRAD_GATE, 8), (152, cols, 8), (160, 0, 1), (161, norm_first, 1)]
        return [*_parameters(rows, cols, GRAD_OUTPUT, INPUT, 0, OUTPUT), *gate]

    asked = 512 * config.packs
    return _row(dtype, config, kernel, _iteration(dtype, config, kernel, parameters), (5 * asked, 3 * asked))


def _iteration(
    dtype: str, config: Config, kernel: Kernel, parameters: Callable[[int], Parameters]
) -> tuple[int, int, int]:
    """Instructions, cycles, and the bytes of shared memory of a block of a backward."""
    rows = config.block[1]
    fewer, more = (_follow(kernel, config, parameters(count * rows)) for count in (2, 3))
    has_sums = config.block[1] > 1 or config.packs == 16  # in shared memory
    sums = config.block[0] * config.block[1] * config.packs * 64 // DTYPE_BYTES[dtype] if has_sums else 0
    return more.instructions - fewer.instructions, more.cycles - fewer.cycles, sums


def tables(kernels: dict[str, Kernel]) -> list[Table]:
    made = [
        Table(f"{name}, {dtype}, traced", HEADER, [[row(dtype, config, kernels) for config in configs()]])
        for name, row in (("Forward", _forward), ("Backward with grad_weight, an iteration", _backward))
        for dtype in DTYPE_BYTES
    ]
    made += [
        Table(
            f"{name}, {order}, {dtype}, traced", HEADER, [[row(dtype, c, kernels, is_first) for c in gated_configs()]]
        )
        for name, row in (("Gated forward", _gated_forward), ("Gated backward, an iteration", _gated_backward))
        for order, is_first in (("norm before gate", True), ("gate before norm", False))
        for dtype in DTYPE_BYTES
    ]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cuda_traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help=f"writes {RECORDED.name}, which the test compares with")
    parser.add_argument(
        "--markdown", action="store_true", help="prints the tables for docs/performance/cuda_traces/results.md"
    )
    given = parser.parse_args()
    if not (OBJECTS / f"{SOURCES[0]}.o").exists():
        parser.error("expected a build in place with NORMOPS_CUDA=1 and sm_90 in NORMOPS_CUDA_ARCHS, but found none")
    kernels = all_kernels()
    if given.markdown:
        print("\n".join(table.markdown() for table in tables(kernels)))
    else:
        print_tables(Console(highlight=False), tables(kernels))
    if given.record:
        RECORDED.write_text(json.dumps(counts(kernels), indent=1) + "\n")


if __name__ == "__main__":
    main()
