"""Builds C++ programs that run the CPU kernels without torch: the kernel layer includes no torch header."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc" / "cpu"
FLAGS = ("-std=c++20", "-O3", "-Wall", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{TESTS}")

# clang 17 as a Python package, which has no library to ask for the machine's instruction set: for kernels alone.
CLANG = (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-fno-sanitize=all")


def build_kernels(folder: Path, *compiler: str) -> list[Path]:
    """Compiles the kernels as setup.py does, once for each folder and compiler, as that takes the time."""
    targets = []
    for source in sorted(CSRC.glob("*_kernel.cpp")):
        target = folder / f"{source.stem}-{Path(compiler[-1]).name if len(compiler) == 1 else 'clang'}.o"
        if not target.exists():
            subprocess.run([*compiler, *FLAGS, "-c", str(source), "-o", str(target)], check=True)
        targets.append(target)
    return targets


def build(source: Path, folder: Path, compiler: str = "g++", kernels: tuple[str, ...] = ()) -> Path:
    """Compiles ``source``, and the kernels perhaps with another compiler, into a program in ``folder``."""
    objects = build_kernels(folder, *(kernels or (compiler,)))
    program = folder / f"{source.stem}-{objects[0].stem.split('-', 1)[1]}"
    files = [str(source), str(CSRC / "isa.cpp"), *map(str, objects)]
    subprocess.run([compiler, *FLAGS, "-static", *files, "-o", str(program)], check=True)
    return program
