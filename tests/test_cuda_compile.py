"""What nvcc made of the CUDA kernels: no spilled registers, no stack, 16 bytes to a load and a store, short code."""

import json
import os
import re

import cuda_code
import pytest
from cuda_code import Kernel

import normops

# How many of each: for three dtypes or five pairs of them, and for 1, 2, 4 or 16 packs to a thread, with general access
# and plain access, and with that of groups where rows are narrow enough: 1, 2 or 4 packs. Those of any width are for
# float64, too.
ALL_KERNELS = {
    "rms_norm_kernel": 3 * (4 + 4 + 3),
    "rms_norm_any_width_kernel": 4,
    "add_rms_norm_kernel": 5 * (4 + 4 + 3),
    "add_rms_norm_any_width_kernel": 6,
    "rms_norm_backward_kernel": 5 * (4 + 4 + 3),
    "rms_norm_backward_any_width_kernel": 6,
    # With at most 4 packs, and the forward in either order.
    "gated_rms_norm_kernel": 2 * 3 * (3 + 3 + 3),
    "gated_rms_norm_any_width_kernel": 2 * 4,
    "gated_rms_norm_backward_kernel": 3 * (3 + 3 + 3),
    "gated_rms_norm_backward_any_width_kernel": 4,
    # With 2 or 4 packs, and plain access with groups or without in one.
    "rms_norm_rope_kernel": 3 * (2 + 2),
    "rms_norm_rope_any_width_kernel": 4,
    "rms_norm_rope_backward_kernel": 3 * (2 + 2),
    "rms_norm_rope_backward_any_width_kernel": 4,
    "grad_weight_kernel": 2 * 4,
    "any_kernel": 1,  # of device.cu, which is asked about and never run
}

COMPILER = "13.0"  # the recorded counts are those of this nvcc
TOLERATED = (1.0, 1.03)  # registers, instructions; of a few kernels together, so that one may grow by a fifth


def kernel_name(mangled: str) -> str:
    (name,) = (name for name in ALL_KERNELS if re.search(rf"\d{name}[IE]", mangled))
    return name


@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_no_kernel_spills_registers(arch: str) -> None:
    if not cuda_code.OBJECTS.exists() or arch not in normops.build_info()["cuda_archs"]:
        if os.environ.get("FORCE_CUDA") == "1":
            pytest.fail(f"FORCE_CUDA=1, but nothing was built in place for sm_{arch}")
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
    """Of sm_90."""
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


def test_kernels_start_early_and_wait_before_they_access_memory(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        opcodes = [instruction.split(".")[0] for instruction in kernel.instructions]
        first_access = next(place for place, opcode in enumerate(opcodes) if opcode in ("LDG", "STG"))
        assert opcodes.index("ACQBULK") < first_access, name


def test_code_is_short(kernels: dict[str, Kernel]) -> None:
    """What decoding runs, all of it forwards, has to be fetched each time; the widest backward takes far longer than
    its code. A backward has code that rounds on the way besides, which is jumped over where nothing is rounded."""
    plain = {name: kernel for name, kernel in kernels.items() if "Plain" in name}
    assert len(plain) > 100
    for name, kernel in plain.items():
        most = 112 if re.search(r"backward_kernel<b?float16, \w+, 16,", name) else 72 if "backward" in name else 64
        assert len(kernel.instructions) * cuda_code.INSTRUCTION_BYTES <= most << 10, name


def test_kernels_that_models_run_are_no_longer_than_recorded(kernels: dict[str, Kernel]) -> None:
    """What is in the code, not how often it is executed: divisions or addresses computed anew come in unnoticed."""
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
    assert not risen, "python tests/cuda_code.py accepts them"
