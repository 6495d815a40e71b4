"""Tests that CPU kernels give the same bits on all targets with fused multiply-adds, and stay in their buffers."""

import os
import platform
import shutil
import signal
import subprocess
from pathlib import Path

import kernel_programs
import machine_code
import pytest

import normops

PROGRAM = kernel_programs.HERE / "kernel_bits.cpp"
BOUNDS = kernel_programs.HERE / "cpu_bounds.cpp"
ISAS = normops.build_info()["cpu_isas"][1:]  # those with kernels; a machine runs them up to its best


def run(*command: str, isa: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NORMOPS_CPU_ISA": isa}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check)


def hashes(*command: str, isa: str = "") -> tuple[str, list[str]]:
    name, *lines = run(*command, isa=isa).stdout.splitlines()
    return name, lines


@pytest.fixture(scope="module")
def native(program_folder: Path) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    if normops.build_info()["cpu_isa"] == "composite":
        pytest.skip("this machine runs no kernels")
    return kernel_programs.build(PROGRAM, program_folder)


def test_avx2_and_avx512_have_same_bits(native: Path) -> None:
    best, expected = hashes(str(native))
    assert best == normops.build_info()["cpu_isa"]
    assert len(expected) == len(set(expected)) == 320
    if best != "avx512":
        pytest.skip(f"this machine's best is {best}")
    assert hashes(str(native), isa="avx2") == ("avx2", expected)


@pytest.mark.release  # compiles all kernels for it
def test_emulated_avx512_has_same_bits(native: Path, program_folder: Path) -> None:
    """Runs the AVX-512 code in emulation on a machine without AVX-512."""
    best, expected = hashes(str(native))
    if best != "avx2":
        pytest.skip(f"this machine's best is {best}")
    emulated = kernel_programs.build(PROGRAM, program_folder, kernel_programs.EMULATED_AVX512)
    assert hashes(str(emulated)) == ("emulated", expected)


@pytest.mark.release  # compiles all kernels for it
def test_generic_code_has_same_bits(native: Path, program_folder: Path) -> None:
    """Runs the code of architectures without specific kernels."""
    program = kernel_programs.build(PROGRAM, program_folder, kernel_programs.GENERIC)
    assert hashes(str(program)) == ("emulated", hashes(str(native))[1])


@pytest.mark.release  # compiles all kernels with each
@pytest.mark.parametrize("kernels", [kernel_programs.GCC_11, kernel_programs.CLANG], ids=lambda kernels: kernels.name)
def test_other_compilers_have_same_bits(kernels: kernel_programs.Kernels, native: Path, program_folder: Path) -> None:
    """Their code for wide instruction sets also stays in its namespaces."""
    if shutil.which(kernels.compiler[0]) is None:
        pytest.skip(f"no {kernels.compiler[0]} on this machine")
    program = kernel_programs.build(PROGRAM, program_folder, kernels)
    assert hashes(str(program)) == hashes(str(native))
    if platform.machine() == "x86_64":
        machine_code.check_wide_instructions(*kernel_programs.build_kernels(kernels))


@pytest.mark.release  # compiles all kernels for another architecture, and emulates it
def test_neon_has_same_bits(native: Path, program_folder: Path) -> None:
    if shutil.which(kernel_programs.NEON.linker) is None or shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no compiler and emulator for aarch64 (packages g++-aarch64-linux-gnu, qemu-user-static)")
    program = kernel_programs.build(PROGRAM, program_folder, kernel_programs.NEON)
    assert hashes("qemu-aarch64-static", str(program)) == ("neon", hashes(str(native))[1])


def test_sum_tree_does_not_depend_on_parts(native: Path, program_folder: Path) -> None:
    """Any number of parts adds up along the same binary tree."""
    program = kernel_programs.build(kernel_programs.HERE / "leaves.cpp", program_folder)
    assert run(str(program)).stdout == ""


@pytest.mark.parametrize("kernels", [kernel_programs.NATIVE, kernel_programs.EMULATED_AVX512], ids=lambda k: k.name)
@pytest.mark.full
def test_kernels_stay_within_buffers(kernels: kernel_programs.Kernels, native: Path, program_folder: Path) -> None:
    """Each buffer ends or begins at a guard page."""
    best, _ = hashes(str(native))
    isas = ISAS[: ISAS.index(best) + 1] if kernels is kernel_programs.NATIVE else ["emulated"]
    if kernels is not kernel_programs.NATIVE and best != "avx2":
        pytest.skip(f"this machine's best is {best}")
    program = kernel_programs.build(BOUNDS, program_folder, kernels)
    for isa in isas:
        assert hashes(str(program), isa=isa) == (isa, [])
        assert run(str(program), "short", isa=isa, check=False).returncode == -signal.SIGSEGV


@pytest.mark.release  # runs many times slower under the detector
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind on this machine")
def test_threads_do_not_race(program_folder: Path) -> None:
    """Runs the unmodified kernels under helgrind; results of several threads have the bits of one thread."""
    source = kernel_programs.HERE / "cpu_threads.cpp"
    flags = (f"-I{kernel_programs.HERE / 'threads'}", "-pthread")
    program = kernel_programs.build(source, program_folder, kernel_programs.NATIVE, *flags)
    detector = ("valgrind", "--tool=helgrind", "--error-exitcode=9", "--quiet", str(program))
    isa = "avx2" if normops.build_info()["cpu_isa"] == "avx512" else ""  # valgrind does not run AVX-512
    assert hashes(*detector, isa=isa)[1] == []
    racy = run(*detector, "racy", isa=isa, check=False)
    assert racy.returncode == 9
    assert "Possible data race" in racy.stderr
