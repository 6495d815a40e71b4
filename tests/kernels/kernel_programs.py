"""Builds C++ programs that run the CPU kernels without torch: the kernel layer includes no torch header."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kept_builds import kept

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY = ROOT / "normops" / "libnormops_kernels.so"
CSRC = ROOT / "csrc" / "cpu"
# -g0: the packaged clang adds debugging information by default.
FLAGS = ("-std=c++20", "-O3", "-g0", "-Wall", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{HERE}")


@dataclass(frozen=True)
class Kernels:
    """The compiler of kernels, and the linker of the programs that run them."""

    name: str
    compiler: tuple[str, ...] = ("g++",)
    linker: str = "g++"
    flags: tuple[str, ...] = ()  # for both
    isa: Path = CSRC / "isa.cpp"


NATIVE = Kernels("native")  # the kernels of the tested build
# Kernels that are only compared with the build need not be fast: -O0 takes a third of the compile time. Kernels that
# run longer use -O1, which takes half.
# clang 17 as a Python package lacks the library that detects the instruction set: it compiles only the kernels.
CLANG = Kernels(
    "clang", (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-fno-sanitize=all"), flags=("-O0",)
)
GCC_11 = Kernels("g++-11", ("g++-11",), "g++-11", ("-O0",))
NEON = Kernels("neon", ("aarch64-linux-gnu-g++",), "aarch64-linux-gnu-g++")
# Requires AVX2.
EMULATED_AVX512 = Kernels(
    "emulated-avx512",
    flags=("-O1", "-Wno-psabi", '-DNORMOPS_EMULATION="emulated_avx512.h"'),
    isa=HERE / "emulated_isa.cpp",
)
# The code for architectures other than x86-64 and aarch64.
GENERIC = Kernels("generic", flags=("-O1", '-DNORMOPS_EMULATION="generic_isa.h"'), isa=HERE / "emulated_isa.cpp")


def build_kernels(kernels: Kernels) -> list[Path]:
    """Compiles the kernels like setup.py, once for all programs, because this takes most of the time."""
    sources = sorted(CSRC.glob("*_kernel.cpp"))
    command = (*kernels.compiler, *FLAGS, *kernels.flags)
    version = subprocess.run([*kernels.compiler, "--version"], capture_output=True, text=True, check=True).stdout

    def build(folder: Path) -> None:
        for source in sources:
            subprocess.run([*command, "-c", str(source), "-o", str(folder / f"{source.stem}.o")], check=True)

    included = (path for folder in (CSRC.parent, CSRC, HERE) for path in folder.glob("*.[hi]*"))
    folder = kept(f"kernels-{kernels.name}", build, (*sources, *included), *command, version)
    return sorted(folder.iterdir())


def build(source: Path, folder: Path, kernels: Kernels = NATIVE, *flags: str) -> Path:
    """Compiles ``source`` with ``flags``, and the kernels if necessary, into a program in ``folder``."""
    program = folder / f"{source.stem}-{kernels.name}"
    if kernels is NATIVE:
        objects = [str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
    else:
        objects = ["-static", str(kernels.isa), *map(str, build_kernels(kernels))]
    subprocess.run(
        [kernels.linker, *FLAGS, *kernels.flags, *flags, str(source), *objects, "-o", str(program)], check=True
    )
    return program
