"""The kernels take no more instructions than they did; unlike times, that can be asserted on a shared machine."""

import subprocess
from pathlib import Path

import pytest

from bench import instructions

TOLERATED = 1.10
COMPILER = "12."  # the recorded counts are those of this GCC


@pytest.mark.release  # speed, not what is computed
def test_no_kernel_takes_more_instructions_than_recorded(program_folder: Path) -> None:
    if reason := instructions.why_not():
        pytest.skip(reason)
    version = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    if not version.startswith(COMPILER):
        pytest.skip(f"counts are recorded for GCC {COMPILER}, this is {version}")
    counts, recorded = instructions.count_instructions(program_folder), instructions.recorded()
    assert {isa: set(kernels) for isa, kernels in counts.items()} == {isa: set(k) for isa, k in recorded.items()}
    risen = {
        f"{isa} {kernel} {dtype}": f"{ratio:.2f}x"
        for isa, by_kernel in instructions.ratios(counts, recorded).items()
        for kernel, by_dtype in by_kernel.items()
        for dtype, ratio in by_dtype.items()
        if ratio > TOLERATED
    }
    assert not risen, "make bench-instructions shows all counts, ARGS=--record accepts them"
