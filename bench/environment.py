"""Describes the machine and the software of a measurement."""

import importlib
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PEERS = ("onnx", "onnxruntime", "triton", "liger-kernel", "quack-kernels", "flash-linear-attention", "mamba-ssm")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_KEPT = 31 << 20
"""The largest tensor, in bytes, whose freed memory glibc keeps, after it has freed one of that size."""


def describe(module: str = "bench") -> dict[str, str]:
    import normops

    build = normops.build_info()
    threads = torch.get_num_threads()
    machine = describe_machine()
    nvcc = f", nvcc {build['cuda_version']}" if build["cuda_version"] else ""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        **machine,
        "load": f"{os.getloadavg()[0]:.1f} before the run",
        "caches": ", ".join(f"{name} {size >> 10} KiB" for name, size in cpu_caches().items()) or "unknown",
        "normops": f"{build['version']}, kernels {build['cpu_isa']}, compiler {build['compiler']}{nvcc}",
        "torch": f"{machine['torch']}, {threads} {'thread' if threads == 1 else 'threads'}",
    }


def describe_machine() -> dict[str, str]:
    """Describes the machine without importing normops, which may not be built."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {memory / (1 << 30):.0f} GiB",
        "torch": torch.__version__,
        "peers": _peers(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.release()}",
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties()
        machine["GPU"] = (
            f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, L2 {gpu.L2_cache_size >> 20} MiB, "
            f"{gpu.total_memory / (1 << 30):.0f} GiB, driver {_driver()}, CUDA {torch.version.cuda}"
        )
        machine["F.rms_norm"] = cuda_rms_norm_kernels(torch.cuda.get_device_capability())
    return machine


def cuda_rms_norm_kernels(capability: tuple[int, int]) -> str:
    """Describes the kernels that F.rms_norm runs on a CUDA device.

    From 2.13 on, torch replaces ATen's by quack's on SM90 and SM100, if nvidia-cutlass-dsl and apache-tvm-ffi are
    installed in versions that it knows.
    """
    if capability[0] not in (9, 10) or importlib.util.find_spec("torch._native") is None:
        return "ATen"
    registry = importlib.import_module("torch._native.registry")
    if "_fused_rms_norm" not in registry.get_dsl_operations("cutedsl"):
        return "ATen"
    return "quack in torch._native; ATen for odd widths of 16 bits, float64 and other dtypes of the weight"


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory of up to LARGEST_KEPT bytes, as in a process that has run for a while.

    Otherwise, the system maps and zeroes the results of some calls that return a few MiB, page by page. The sizes and
    addresses of other freed memory decide which calls pay for that.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def cpu_caches() -> dict[str, int]:
    """Returns the bytes of each data cache of the first core, the smallest first."""
    sizes = {}
    for folder in sorted(CACHES.glob("index*")):
        kind, level, size = ((folder / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            sizes[f"L{level}"] = int(size[:-1]) * UNITS[size[-1]] if size[-1] in UNITS else int(size)
    return sizes


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()  # aarch64's cpuinfo names no model


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return printed.partition("\n")[0]


def _peers() -> str:
    found = {(each.name or "").lower().replace("_", "-"): each.version for each in metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in PEERS if name in found) or "only torch's"
