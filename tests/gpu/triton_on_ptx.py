"""Runs the Triton kernels on CPU tensors, by interpreting the PTX that Triton compiles for a GPU.

Triton's own JIT specializes, compiles and launches them; neither a GPU nor ptxas is needed.
"""

import os
import struct
from pathlib import Path
from typing import Any

import torch
import triton
from ptx.machine import Launch, Machine
from ptx.memory import memory_of
from ptx.program import Kernel, kernels_of
from ptx.shared import WARP
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from normops import _C

# Parameters that the kernels in normops/triton write, and whose initial content they must not read. Kernels without
# parameters in WRITTEN write SUMS.
WRITTEN = {"y", "residual_out", "dx", "dgate", "partials"}
SUMS = {"square_sum", "dot"}
FORMATS = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
# Separate from Triton's own cache: these entries lack the machine code that a GPU needs.
CACHE = Path(__file__).parents[2] / "build" / "triton_on_ptx"
SCRATCH_BYTES = 16  # two scratch pointers that Triton passes after the parameters; these kernels do not use them


class Function:
    """A loaded kernel."""

    def __init__(self, kernel: Kernel, shared_bytes: int) -> None:
        self.kernel, self.shared_bytes = kernel, shared_bytes


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self._signature, self._metadata = source.signature, metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: Function, *rest: Any) -> None:
        arguments = rest[-len(self._signature) :]
        given = {name for name, kind in self._signature.items() if kind != "constexpr"}
        written = WRITTEN & given or SUMS
        params, tensors = b"", []
        for (name, kind), value in zip(self._signature.items(), arguments, strict=True):
            if kind == "constexpr":
                continue
            code = "Q" if kind[0] == "*" else FORMATS[kind]
            if kind[0] == "*":
                tensors.append((name, value, name in written))
                value = value.data_ptr()
            params += struct.pack("<" + "x" * (-len(params) % struct.calcsize(code)) + code, value)
        params += bytes(-len(params) % 8 + SCRATCH_BYTES)
        launch = Launch(
            function.kernel,
            (x, y, z),
            (WARP * self._metadata.num_warps, 1, 1),
            params,
            memory_of(tensors),
            dynamic_shared=function.shared_bytes,
            starts_early=bool(self._metadata.launch_pdl),
        )
        Machine(launch).run()


class Utils:
    def __init__(self) -> None:
        self.ptx = ""

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[Any, ...]:
        """Returns the module, the function, its registers and spills, and the most threads of a block."""
        kernel = kernels_of(self.ptx)[name]
        return kernel, Function(kernel, shared_bytes), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 3, "warpSize": WARP}


class Driver:
    launcher_cls = Launcher

    def __init__(self, arch: int) -> None:
        self.utils, self._arch = Utils(), arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, WARP)


def serve_cpu(arch: int | None = None) -> _C.Registration:
    """Replaces the CPU kernels with the Triton launchers. ``arch`` defaults to TRITON_ARCH, or 90."""
    driver = Driver(arch or int(os.environ.get("TRITON_ARCH", "90")))
    triton.runtime.driver.set_active(driver)
    CUDABackend.make_cubin = lambda *arguments, **keywords: b"none"

    def before_load(module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        path = next(Path(path) for file, path in files.items() if file.endswith(".ptx"))
        driver.utils.ptx = path.read_text()

    triton.knobs.cache.dir = str(CACHE)
    triton.knobs.runtime.kernel_load_start_hook = before_load
    torch.set_num_threads(1)
    return _C.register_triton("CPU")
