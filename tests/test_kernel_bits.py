"""The kernels give the same bits on every instruction set that fuses multiply-adds: AVX2, AVX-512, NEON."""

import os
import shutil
import subprocess
from pathlib import Path

import kernel_programs
import pytest

import normops

PROGRAM = kernel_programs.TESTS / "kernel_bits.cpp"


def hashes(*command: str, isa: str = "") -> tuple[str, list[str]]:
    output = subprocess.run(
        command, env=os.environ | {"NORMOPS_CPU_ISA": isa}, capture_output=True, text=True, check=True
    ).stdout
    name, *lines = output.splitlines()
    return name, lines


@pytest.fixture(scope="module")
def native(program_folder: Path) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    return kernel_programs.build(PROGRAM, program_folder)


def test_avx2_and_avx512(native: Path) -> None:
    best, expected = hashes(str(native))
    assert best == normops.build_info()["cpu_isa"]
    assert len(expected) == len(set(expected)) == 216
    if best != "avx512":
        pytest.skip(f"this machine's best is {best}")
    assert hashes(str(native), isa="avx2") == ("avx2", expected)


def test_neon(native: Path, program_folder: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no compiler and emulator for aarch64 (packages g++-aarch64-linux-gnu, qemu-user-static)")
    best, expected = hashes(str(native))
    if best == "baseline":
        pytest.skip("this machine does not fuse multiply-adds")
    assert hashes(
        "qemu-aarch64-static", str(kernel_programs.build(PROGRAM, program_folder, "aarch64-linux-gnu-g++"))
    ) == ("neon", expected)
