"""What nvcc made of the CUDA kernels: no spilled registers, no stack, and 16 bytes to a load and a store."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import normops

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "build" / "ext" / "cuda"
SOURCES = ROOT / "csrc" / "cuda"

# By source, how many of each kernel: for four dtypes or six pairs of them, and for 1, 2, 4 or 16 packs to a thread.
KERNELS = {
    "rms_norm.cu": {"rms_norm_kernel": 4 * 4, "rms_norm_any_width_kernel": 4},
    "add_rms_norm.cu": {"add_rms_norm_kernel": 6 * 4, "add_rms_norm_any_width_kernel": 6},
    "rms_norm_backward.cu": {
        "rms_norm_backward_kernel": 6 * 4,
        "rms_norm_backward_any_width_kernel": 6,
        "grad_weight_kernel": 2 * 4,
    },
}
ALL_KERNELS = {name: count for of_source in KERNELS.values() for name, count in of_source.items()}
ALL_KERNELS["any_kernel"] = 1  # of device.cu, which is asked about and never run


def kernel_name(mangled: str) -> str:
    (name,) = (name for name in ALL_KERNELS if re.search(rf"\d{name}[IE]", mangled))
    return name


@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_no_kernel_spills_registers(arch: str) -> None:
    if not REPORTS.exists() or arch not in normops.build_info()["cuda_archs"]:
        if os.environ.get("NORMOPS_CUDA") == "1":
            pytest.fail(f"NORMOPS_CUDA=1, but nothing was built in place for sm_{arch}")
        pytest.skip(f"not built in place for sm_{arch}")
    report = "".join(path.read_text() for path in sorted(REPORTS.glob("*.ptxas")))
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


@pytest.mark.parametrize("source", KERNELS)
def test_rows_are_accessed_16_bytes_at_a_time(source: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    target = tmp_path / "kernels.ptx"
    flags = ["-O3", "-std=c++20", "-fmad=false", "--expt-relaxed-constexpr", "-arch=compute_90", "-ptx"]
    subprocess.run([nvcc, *flags, str(SOURCES / source), "-o", str(target)], check=True)
    kernels = re.split(r"^(?:\.visible )?\.entry ", target.read_text(), flags=re.MULTILINE)[1:]
    rows_kernels = [kernel for kernel in kernels if "grad_weight_kernel" not in kernel.split("(")[0]]
    assert len(rows_kernels) == sum(n for name, n in KERNELS[source].items() if name != "grad_weight_kernel")
    for kernel in rows_kernels:
        name = kernel.split("(")[0]
        assert re.search(r"\bld\.global(\.nc)?\.(v4\.[buf]32|v2\.[buf]64)", kernel), name
        assert re.search(r"\bst\.global\.(v4\.[buf]32|v2\.[buf]64)", kernel), name
