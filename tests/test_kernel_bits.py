"""The kernels give the same bits on every instruction set that fuses multiply-adds: AVX2, AVX-512, NEON."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import kernel_programs
import machine_code
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


@pytest.mark.parametrize("compiler", ["g++-11", "clang"])
def test_other_compilers(compiler: str, native: Path, program_folder: Path) -> None:
    """And what they make for wide instruction sets stays apart."""
    if shutil.which(compiler) is None and compiler != "clang":
        pytest.skip(f"no {compiler} on this machine")
    command = kernel_programs.CLANG if compiler == "clang" else (compiler,)
    program = kernel_programs.build(PROGRAM, program_folder, kernels=command)
    for isa in ("", "baseline"):
        assert hashes(str(program), isa=isa) == hashes(str(native), isa=isa)
    if platform.machine() == "x86_64":
        machine_code.check_wide_instructions(*kernel_programs.build_kernels(program_folder, *command))


def test_neon(native: Path, program_folder: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no compiler and emulator for aarch64 (packages g++-aarch64-linux-gnu, qemu-user-static)")
    best, expected = hashes(str(native))
    if best == "baseline":
        pytest.skip("this machine does not fuse multiply-adds")
    assert hashes(
        "qemu-aarch64-static", str(kernel_programs.build(PROGRAM, program_folder, "aarch64-linux-gnu-g++"))
    ) == ("neon", expected)
