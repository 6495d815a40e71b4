"""The kernels give the same bits on every instruction set that fuses multiply-adds: AVX2, AVX-512, NEON."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import normops

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "csrc" / "cpu"


def build(compiler: str, folder: Path) -> Path:
    """The kernel layer includes no torch header: a C++ compiler is all it takes."""
    program = folder / compiler
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-static", f"-I{KERNELS}"]
    sources = [TESTS / "kernel_bits.cpp", KERNELS / "isa.cpp", KERNELS / "rms_norm_kernel.cpp"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


def hashes(*command: str, isa: str = "") -> tuple[str, list[str]]:
    output = subprocess.run(
        command, env=os.environ | {"NORMOPS_CPU_ISA": isa}, capture_output=True, text=True, check=True
    ).stdout
    name, *lines = output.splitlines()
    return name, lines


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    return build("g++", tmp_path_factory.mktemp("native"))


def test_avx2_and_avx512(native: Path) -> None:
    best, expected = hashes(str(native))
    assert best == normops.build_info()["cpu_isa"]
    assert len(expected) == len(set(expected)) == 144
    if best != "avx512":
        pytest.skip(f"this machine's best is {best}")
    assert hashes(str(native), isa="avx2") == ("avx2", expected)


def test_neon(native: Path, tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no compiler and emulator for aarch64 (packages g++-aarch64-linux-gnu, qemu-user-static)")
    best, expected = hashes(str(native))
    if best == "baseline":
        pytest.skip("this machine does not fuse multiply-adds")
    assert hashes("qemu-aarch64-static", str(build("aarch64-linux-gnu-g++", tmp_path))) == ("neon", expected)
