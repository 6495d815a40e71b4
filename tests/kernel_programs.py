"""Builds C++ programs that run the CPU kernels without torch: the kernel layer includes no torch header."""

import subprocess
from pathlib import Path

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "csrc" / "cpu"


def build(source: Path, folder: Path, compiler: str = "g++") -> Path:
    """Compiles ``source`` and the kernels as setup.py does, into a program in ``folder``.

    The kernels, which take the time, are compiled once for each folder and compiler.
    """
    command = (compiler, "-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", f"-I{KERNELS}", f"-I{TESTS}")
    objects = []
    for kernel_source in (KERNELS / "isa.cpp", *sorted(KERNELS.glob("*_kernel.cpp"))):
        target = folder / f"{kernel_source.stem}-{compiler}.o"
        if not target.exists():
            subprocess.run([*command, "-c", str(kernel_source), "-o", str(target)], check=True)
        objects.append(str(target))
    program = folder / f"{source.stem}-{compiler}"
    subprocess.run([*command, "-static", str(source), *objects, "-o", str(program)], check=True)
    return program
