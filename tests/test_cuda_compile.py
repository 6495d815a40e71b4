"""What nvcc made of the CUDA kernels: no spilled registers, no stack, and 16 bytes to a load and a store."""

import json
import os
import re

import pytest

import normops
from bench import cuda_traces
from bench.sass.machine_code import Kernel

# How many of each: for four dtypes or six pairs of them, and for 1, 2, 4 or 16 packs to a thread; for those without
# float64 with plain access, too, and with that of groups where rows are narrow enough: 1, 2 or 4 packs.
ALL_KERNELS = {
    "rms_norm_kernel": (4 + 3) * 4 + 3 * 3,
    "rms_norm_any_width_kernel": 4,
    "add_rms_norm_kernel": (6 + 5) * 4 + 5 * 3,
    "add_rms_norm_any_width_kernel": 6,
    "rms_norm_backward_kernel": (6 + 5) * 4 + 5 * 3,
    "rms_norm_backward_any_width_kernel": 6,
    # With at most 4 packs, and the forward in either order.
    "gated_rms_norm_kernel": 2 * (4 + 2 * 3) * 3,
    "gated_rms_norm_any_width_kernel": 2 * 4,
    "gated_rms_norm_backward_kernel": (4 + 2 * 3) * 3,
    "gated_rms_norm_backward_any_width_kernel": 4,
    "grad_weight_kernel": 2 * 4,
    "any_kernel": 1,  # of device.cu, which is asked about and never run
}

COMPILER = "13.0"  # the recorded counts are those of this nvcc
TOLERATED = {"instructions": 1.10, "registers": 1.0}


def kernel_name(mangled: str) -> str:
    (name,) = (name for name in ALL_KERNELS if re.search(rf"\d{name}[IE]", mangled))
    return name


@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_no_kernel_spills_registers(arch: str) -> None:
    if not cuda_traces.OBJECTS.exists() or arch not in normops.build_info()["cuda_archs"]:
        if os.environ.get("NORMOPS_CUDA") == "1":
            pytest.fail(f"NORMOPS_CUDA=1, but nothing was built in place for sm_{arch}")
        pytest.skip(f"not built in place for sm_{arch}")
    report = "".join(path.read_text() for path in sorted(cuda_traces.OBJECTS.glob("*.ptxas")))
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
    if "90" not in normops.build_info()["cuda_archs"] or not (cuda_traces.OBJECTS / "rms_norm.o").exists():
        pytest.skip("not built in place for sm_90")
    return cuda_traces.all_kernels()


def test_rows_are_accessed_16_bytes_at_a_time(kernels: dict[str, Kernel]) -> None:
    of_rows = {name: kernel for name, kernel in kernels.items() if not name.startswith("grad_weight_kernel")}
    assert len(of_rows) == sum(count for name, count in ALL_KERNELS.items() if "rms_norm" in name)
    for name, kernel in of_rows.items():
        for opcode in ("LDG", "STG"):
            assert any(i.opcode == opcode and "128" in i.modifiers for i in kernel.instructions), (name, opcode)


def test_forwards_start_early_and_wait_before_they_access_memory(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        opcodes = [instruction.opcode for instruction in kernel.instructions]
        if "backward" in name or name.startswith("grad_weight_kernel"):
            assert "ACQBULK" not in opcodes, name
        else:
            first_access = next(place for place, opcode in enumerate(opcodes) if opcode in ("LDG", "STG"))
            assert opcodes.index("ACQBULK") < first_access, name


def test_no_kernel_is_longer_than_recorded(kernels: dict[str, Kernel]) -> None:
    """What is in the code, not how often it is executed: python -m bench.cuda_traces shows that."""
    version = normops.build_info()["cuda_version"]
    if version is None or not version.startswith(COMPILER):
        pytest.skip(f"counts are recorded for nvcc {COMPILER}, this is {version}")
    recorded, counts = json.loads(cuda_traces.RECORDED.read_text()), cuda_traces.counts(kernels)
    assert set(counts) == set(recorded)
    risen = {
        f"{name}: {what}": (count, recorded[name][what])
        for name, numbers in counts.items()
        for what, count in numbers.items()
        if count > TOLERATED[what] * recorded[name][what]
    }
    assert not risen, "python -m bench.cuda_traces --record accepts them"
