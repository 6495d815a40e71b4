"""Tests the machine code of the CUDA kernels: no spills, no stack, 16-byte loads and stores, short code."""

import json
import os
import re

import cuda_code
import pytest
from cuda_code import Kernel

import normops

# Number of instances of each kernel: for 3 dtypes or 5 pairs of them. General and plain access have 1, 2, 4 or 16 packs
# per thread; group access, for narrow rows, has 1, 2 or 4. Any-width kernels also have instances for float64.
ALL_KERNELS = {
    "rms_norm_kernel": 3 * (4 + 4 + 3),
    "rms_norm_any_width_kernel": 4,
    "add_rms_norm_kernel": 5 * (4 + 4 + 3),
    "add_rms_norm_any_width_kernel": 6,
    "rms_norm_backward_kernel": 5 * (4 + 4 + 3),
    "rms_norm_backward_any_width_kernel": 6,
    # At most 4 packs; the forward with the gate before and after the norm.
    "gated_rms_norm_kernel": 2 * 3 * (3 + 3 + 3),
    "gated_rms_norm_any_width_kernel": 2 * 4,
    "gated_rms_norm_backward_kernel": 3 * (3 + 3 + 3),
    "gated_rms_norm_backward_any_width_kernel": 4,
    # 2 or 4 packs; one plain access supports rows with and without groups.
    "rms_norm_rope_kernel": 3 * (2 + 2),
    "rms_norm_rope_any_width_kernel": 4,
    "rms_norm_rope_backward_kernel": 3 * (2 + 2),
    "rms_norm_rope_backward_any_width_kernel": 4,
    "grad_weight_kernel": 2 * 4,
    "any_kernel": 1,  # in device.cu, which queries its attributes and never launches it
}

COMPILER = "13.0"  # nvcc that compiled the recorded kernels
TOLERATED = (1.0, 1.03)  # registers, instructions; summed over a few kernels, so that one may grow by a fifth


def kernel_name(mangled: str) -> str:
    (name,) = (name for name in ALL_KERNELS if re.search(rf"\d{name}[IE]", mangled))
    return name


@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_no_kernel_spills_registers(arch: str) -> None:
    built = normops.build_info()["cuda_archs"] if cuda_code.OBJECTS.exists() else []
    if os.environ.get("FORCE_CUDA") == "1" and not built:
        pytest.fail("FORCE_CUDA=1, but nothing was built in place")
    if arch not in built:
        pytest.skip(f"not built in place for sm_{arch}")
    report = "".join(path.read_text() for path in sorted(cuda_code.OBJECTS.glob("*.ptxas")))
    entries = re.findall(
        rf"Compiling entry function '(\w+)' for 'sm_{arch}'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        report,
        re.DOTALL,
    )
    names = [kernel_name(mangled) for mangled, *_ in entries]
    assert {kernel: names.count(kernel) for kernel in ALL_KERNELS} == ALL_KERNELS
    assert not [entry for entry in entries if entry[1:] != ("0", "0", "0")]
    assert "warning" not in report


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Returns the kernels of sm_90."""
    if (
        cuda_code.ARCHITECTURE not in normops.build_info()["cuda_archs"]
        or not (cuda_code.OBJECTS / "rms_norm.o").exists()
    ):
        pytest.skip("not built in place for sm_90")
    return cuda_code.kernels()


@pytest.mark.full
def test_rows_are_accessed_16_bytes_at_a_time(kernels: dict[str, Kernel]) -> None:
    of_rows = {name: kernel for name, kernel in kernels.items() if not name.startswith("grad_weight_kernel")}
    assert len(of_rows) == sum(count for name, count in ALL_KERNELS.items() if "rms_norm" in name)
    for name, kernel in of_rows.items():
        writes_rows = not re.search("(norm|backward)_stats", name)
        for opcode in ("LDG", "STG") if writes_rows else ("LDG",):
            assert any(re.match(rf"{opcode}\..*\b128\b", i) for i in kernel.instructions), (name, opcode)


def test_kernels_wait_for_previous_kernel_before_memory_access(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        opcodes = [instruction.split(".")[0] for instruction in kernel.instructions]
        first_access = next(place for place, opcode in enumerate(opcodes) if opcode in ("LDG", "STG"))
        assert opcodes.index("ACQBULK") < first_access, name


def test_code_is_short(kernels: dict[str, Kernel]) -> None:
    """Decoding fetches the code of forwards in every launch; the widest backward takes far longer than its fetch.
    A backward also has code for intermediate rounding, which it skips if nothing is rounded."""
    plain = {name: kernel for name, kernel in kernels.items() if "Plain" in name}
    assert len(plain) > 100
    for name, kernel in plain.items():
        most = 112 if re.search(r"backward_kernel<b?float16, \w+, 16,", name) else 72 if "backward" in name else 64
        assert len(kernel.instructions) * cuda_code.INSTRUCTION_BYTES <= most << 10, name


def test_kernels_of_models_are_not_longer_than_recorded(kernels: dict[str, Kernel]) -> None:
    """Counts instructions in the code, not executions, to detect new divisions and recomputed addresses."""
    version = normops.build_info()["cuda_version"]
    if version is None or not version.startswith(COMPILER):
        pytest.skip(f"counts are recorded for nvcc {COMPILER}, this is {version}")
    recorded, counts = json.loads(cuda_code.RECORDED.read_text()), cuda_code.counts(kernels)
    assert set(counts) == set(recorded)
    risen = {
        name: (count, recorded[name])
        for name, count in counts.items()
        if any(now > factor * before for now, before, factor in zip(count, recorded[name], TOLERATED, strict=True))
    }
    assert not risen, "python tests/gpu/cuda_code.py accepts them"
