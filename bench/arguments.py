"""Parses the command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.operators import MEMORIES, OPERATORS, Operator
from bench.peers import NORMOPS, PEERS, Peer
from bench.problems import FILL, SHAPES, Problem, Size, parse_shapes

DTYPES = ("float32", "bfloat16", "float16", "float64")
OVERHEAD = "overhead"
PROCESSES = 7
DEFAULT_SHAPES = {"cpu": ("512x4096", "4096x4096"), "cuda": (FILL, "decode")}


@dataclass(frozen=True)
class Arguments:
    device: str
    overhead: bool
    operators: list[Operator]
    sizes: list[Size]
    peers: list[Peer]
    memories: tuple[str, ...]
    processes: int | None
    """The number of processes that interleave single calls of all operators; None measures each problem separately."""
    threads: int
    turns: int
    seconds: float
    save: Path | None

    def problems(self) -> dict[Size, list[Problem]]:
        return {
            size: [
                Problem(operator, size, memory)
                for operator in self.operators
                for memory in self.memories
                if memory in operator.memories
            ]
            for size in self.sizes
        }


def parse_arguments(description: str | None) -> Arguments:
    parser = _parser(description)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU")
    if given.interleave is not None and given.interleave < 2:
        parser.error(f"argument --interleave: expected at least 2 processes, but got {given.interleave}")
    if given.interleave and (given.device != "cpu" or given.memory == "preallocated"):
        parser.error("argument --interleave: requires --device cpu and fresh outputs")
    try:
        sizes = [
            Size(rows, cols, dtype, given.device)
            for dtype in (getattr(torch, name) for name in given.dtype or DTYPES[:2])
            for shapes in given.shapes or DEFAULT_SHAPES[given.device]
            for rows, cols in parse_shapes(shapes, dtype.itemsize)
        ]
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    names = given.op or ["all"]
    return Arguments(
        device=given.device,
        overhead=OVERHEAD in names or "all" in names,
        operators=[operator for operator in OPERATORS if operator.name in names or "all" in names],
        sizes=list(dict.fromkeys(sizes)),
        peers=[peer for peer in PEERS if peer is NORMOPS or not given.peers or peer.name in given.peers],
        memories=("fresh",) if given.interleave else MEMORIES if given.memory == "both" else (given.memory,),
        processes=given.interleave,
        threads=given.threads,
        turns=given.turns,
        seconds=given.seconds,
        save=given.save,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    operators = [OVERHEAD, *(operator.name for operator in OPERATORS), "all"]
    peers = [peer.name for peer in PEERS if peer is not NORMOPS]

    def add_names(flag: str, text: str, choices: Sequence[str] | None = None) -> None:
        parser.add_argument(flag, nargs="+", action="extend", choices=choices, help=text, metavar="NAME")

    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_names("--op", f"{', '.join(operators)} (default)", operators)
    add_names("--dtype", f"{', '.join(DTYPES)}; default: float32 bfloat16", DTYPES)
    defaults = "; ".join(f"{' '.join(shapes)} on {device}" for device, shapes in DEFAULT_SHAPES.items())
    add_names("--shapes", f"{', '.join(SHAPES)}, all, {FILL} (512 MiB of each width), ROWSxCOLS; default: {defaults}")
    add_names("--peers", f"with normops and the copy: {', '.join(peers)}; default: all that are installed", peers)
    parser.add_argument("--memory", choices=(*MEMORIES, "both"), default="both", help="of the outputs; default: both")
    parser.add_argument(
        "--interleave",
        type=int,
        nargs="?",
        const=PROCESSES,
        metavar="PROCESSES",
        help="alternates single calls of all operators, in several processes, so that fresh outputs alternate in "
        f"memory as in a model; {PROCESSES} processes if no number is given",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="minimum number for each call; default: 15")
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="S", help="minimum time for each problem; default: 0.3"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="writes results.json, results.md and charts")
    return parser
