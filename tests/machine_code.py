"""Finds the instruction sets that compiled code requires, with objdump."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

VEX = re.compile(r"v[a-z]")  # AVX and later; every such mnemonic begins with a v, and verr, verw, vm* do not occur
AVX512_ONLY = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]")


def instructions_by_function(file: Path) -> dict[str, list[str]]:
    disassembly = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(file)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in disassembly.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = start[1]
        elif line.startswith(" ") and "\t" in line:
            functions[name].append(line.split("\t", 1)[1])
    return functions


def instruction_sets(*files: Path) -> dict[str, set[str]]:
    """Returns, for each namespace, the instruction sets beyond the baseline that its functions use."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for name, instructions in instructions_by_function(file).items():
            room = next((isa for isa in ("avx512", "avx2") if f"normops::cpu::{isa}::" in name), "baseline")
            for instruction in instructions:
                uses = "avx512" if AVX512_ONLY.search(instruction) else "avx2" if VEX.match(instruction) else None
                assert uses is None or room != "baseline", f"{name}: {instruction}"
                found[room] |= set() if uses is None else {uses}
    return dict(found)


def check_wide_instructions(*files: Path) -> None:
    """Asserts that code for every machine holds no AVX, and that the AVX2 kernels hold no AVX-512."""
    # Equality also shows that the names and patterns match: each namespace uses its instruction set.
    assert instruction_sets(*files) == {"baseline": set(), "avx2": {"avx2"}, "avx512": {"avx2", "avx512"}}
