"""Tests the build: separate instruction sets with run-time dispatch, build_info, errors of a wrong environment."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import machine_code
import pytest
import torch
from other_process import printed, python

import normops

ROOT = Path(__file__).parents[2]
X86 = platform.machine() == "x86_64"
KERNELS = Path(normops.__file__).parent / "libnormops_kernels.so"
LOOPS = {"process_tiles": 328, "sum_tile": 80, "write_group": 110}
"""The maximum number of instances of each loop in all kernels."""


def machine_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.split(":")[1].split() for line in lines if line.startswith(("flags", "Features"))), []))


def test_build_info() -> None:
    info = normops.build_info()
    assert info["version"] == normops.__version__
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["cpu_isa"] in info["cpu_isas"]
    assert (info["cuda_version"] is None) == (not info["cuda_archs"])
    assert Path(info["library"]).name == "libnormops.so"
    assert info["cpu_isas"] == (["composite", "avx2", "avx512"] if X86 else info["cpu_isas"])


@pytest.mark.skipif(not X86, reason="x86's instruction sets")
def test_best_instruction_set_is_chosen() -> None:
    flags = machine_flags()
    expected = "composite"
    if {"avx2", "fma", "f16c"} <= flags:
        expected = "avx2"
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
            expected = "avx512"
    chosen = printed("import normops; print(normops.build_info()['cpu_isa'])", NORMOPS_CPU_ISA="")
    assert chosen.strip() == expected


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm on this machine")
def test_functions_of_registers_are_inlined() -> None:
    """GCC 12 clears the upper part of an AVX-512 register that a function returns if it is not inlined."""
    symbols = subprocess.run(("nm", "--demangle", str(KERNELS)), capture_output=True, text=True, check=True).stdout
    functions = [line for line in symbols.splitlines() if "::process_tiles<" in line or "Block<" in line]
    assert functions  # guards against renamed functions
    assert not [line for line in functions if "Block<" in line]


@pytest.mark.skipif(not X86 or shutil.which("nm") is None, reason="counts x86 code with nm")
def test_kernel_instances_are_bounded() -> None:
    """Compile time grows with the instances of a loop: one for each combination of cases without a run-time branch.
    Raising a limit needs a reason and a measurement of its cost."""
    command = ("nm", "--demangle", "--print-size", str(KERNELS))
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^\w+ (\w{16}) [tTW] (.*normops::cpu::.*)$", symbols, re.MULTILINE)
    assert sum(int(size, 16) for size, _ in functions) < 5_200_000
    names = {name.split(" [clone")[0] for _, name in functions}
    counts = {loop: sum(f"::{loop}<" in name for name in names) for loop in LOOPS}
    assert counts == {loop: min(counts[loop], most) for loop, most in LOOPS.items()}


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=() if isa == "composite" else pytest.mark.full)
        for isa in normops.build_info()["cpu_isas"]
    ],
)
def test_values_on_each_instruction_set(isa: str) -> None:
    """Repeats the oracle test on kernels that this machine would not choose, and on the composite fallback."""
    if isa == normops.build_info()["cpu_isa"]:
        pytest.skip("tested by test_values itself")
    probe = python("-c", "import normops", NORMOPS_CPU_ISA=isa)
    if "that this machine runs" in probe.stderr:
        pytest.skip(f"this machine does not run {isa}")
    # Each value of every parameter; test_cpu_kernels.py compares the bits of all kernels.
    tests = ("-m", "triton and not full and not release", "tests/kernels/test_values.py")
    result = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, cwd=ROOT, NORMOPS_CPU_ISA=isa)
    assert result.returncode == 0, result.stdout


def test_unknown_instruction_set_raises_import_error() -> None:
    result = python("-c", "import normops", NORMOPS_CPU_ISA="sse9")
    assert result.returncode != 0
    assert re.search(
        r"ImportError: expected NORMOPS_CPU_ISA to be an instruction set that this machine runs \([a-z0-9, ]+\), "
        "but got sse9",
        result.stderr,
    )


@pytest.mark.skipif(not X86 or shutil.which("objdump") is None, reason="reads x86 code with objdump")
def test_wide_instructions_stay_in_their_namespace() -> None:
    machine_code.check_wide_instructions(KERNELS)
    assert machine_code.instruction_sets(Path(normops.build_info()["library"])) == {"baseline": set()}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_requested_cuda_architectures_are_built() -> None:
    info = normops.build_info()
    if not info["cuda_archs"]:
        assert os.environ.get("FORCE_CUDA") != "1"
        pytest.skip("built without CUDA")
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if archs:
        named = ["80", "90", "100", "120"] if archs == "all" else archs.replace("+PTX", "").replace(".", "").split(";")
        assert info["cuda_archs"] == named
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert f"release {info['cuda_version']}," in release
