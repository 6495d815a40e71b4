"""Counts the instructions of each CPU kernel under valgrind: make bench-instructions.

Unlike times, counts repeat on any machine, so a test compares them with the recorded ones. They depend on the compiler;
the recorded ones are those of GCC 12. Valgrind does not run AVX-512, which is therefore not counted.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import kernel_programs
from rich.console import Console

from bench.report import print_tables
from bench.tables import Table

PROGRAM = Path(__file__).with_suffix(".cpp")
RECORDED = kernel_programs.TESTS / "instruction_counts.json"
ISAS = ("avx2",)

Counts = dict[str, dict[str, dict[str, float]]]
"""By instruction set, kernel with shape, and dtype: instructions per element."""


def why_not() -> str | None:
    """Why instructions cannot be counted here, or None."""
    missing = [name for name in ("valgrind", "g++") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def count_instructions(folder: Path) -> Counts:
    """Builds and runs the program in ``folder``."""
    program = kernel_programs.build(PROGRAM, folder)
    return {isa: _count(program, isa) for isa in ISAS}


def _count(program: Path, isa: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as dumps:
        command = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={dumps}/dump", str(program))
        printed = subprocess.run(
            command, env=os.environ | {"NORMOPS_CPU_ISA": isa}, capture_output=True, text=True, check=True
        ).stdout
        instructions = dict(filter(None, map(_read_dump, Path(dumps).iterdir())))
    counts: dict[str, dict[str, float]] = defaultdict(dict)
    for line in printed.splitlines():
        label, elements = line.split(": ")
        kernel, dtype = label.rsplit(" ", 1)
        counts[kernel][dtype] = round(instructions[label] / int(elements), 4)
    return dict(counts)


def _read_dump(path: Path) -> tuple[str, int] | None:
    text = path.read_text()
    label = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
    total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
    return (label[1], int(total[1])) if label and total else None


def recorded() -> Counts:
    counts: Counts = json.loads(RECORDED.read_text())
    return counts


def ratios(counts: Counts, base: Counts) -> Counts:
    return {
        isa: {
            kernel: {dtype: count / base[isa][kernel][dtype] for dtype, count in by_dtype.items()}
            for kernel, by_dtype in by_kernel.items()
        }
        for isa, by_kernel in counts.items()
    }


def tables(counts: Counts, over: Counts | None) -> list[Table]:
    def row(isa: str, kernel: str) -> tuple[str, ...]:
        multiples = {dtype: f" ({ratio:.2f}x)" for dtype, ratio in over[isa][kernel].items()} if over else {}
        return kernel, *(f"{count:.3f}{multiples.get(dtype, '')}" for dtype, count in counts[isa][kernel].items())

    return [
        Table(
            f"Instructions per element, {isa}" + (", in brackets as a multiple of the recorded" if over else ""),
            ("", *next(iter(by_kernel.values()))),
            [[row(isa, kernel) for kernel in by_kernel]],
        )
        for isa, by_kernel in counts.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make bench-instructions ARGS=", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help=f"writes {RECORDED.name}, which the test compares with")
    given = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder, console.status("compiling, counting"):
        counts = count_instructions(Path(folder))
    print_tables(console, tables(counts, None if given.record else ratios(counts, recorded())))
    if given.record:
        RECORDED.write_text(json.dumps(counts, indent=1) + "\n")
        console.print(f"wrote {RECORDED}")


if __name__ == "__main__":
    main()
