"""The operators on CUDA tensors without a GPU: what was built in place, over GPUs that write down what they are asked.

Of the build, the CUDA runtime alone is another one, cuda_runtime_stub.cpp; fake_gpus.cpp gives torch CUDA tensors whose
memory is the CPU's. Nothing computes.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).parent
BUILT = TESTS.parent / "build" / "ext"
CXX = ("g++", "-std=c++20", "-g0", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden")
CALLS = "libnormops_kernels.so"
DEVICE = "libfake_gpus.so"

CASES: dict[str, Callable[["Gpus"], None]] = {}


def case(function: Callable[["Gpus"], None]) -> Callable[["Gpus"], None]:
    """Names a function as a case, which runs in a process of its own where nothing was called before."""
    CASES[function.__name__] = function
    return function


def build(folder: Path, operators: Path, toolkit: list[str]) -> None:
    """Links what nvcc compiled into ``folder``, beside ``operators`` as they are."""
    stub = folder / "stub.o"
    subprocess.run([*CXX, "-O1", *toolkit, "-c", str(TESTS / "cuda_runtime_stub.cpp"), "-o", str(stub)], check=True)
    objects = [str(path) for name in ("cuda/*.o", "kernels/*.o", "glibc.o") for path in sorted(BUILT.glob(name))]
    link = ["g++", "-shared", "-Wl,-soname,libnormops_kernels.so", "-Wl,--no-undefined"]
    subprocess.run([*link, *objects, str(stub), "-o", str(folder / CALLS)], check=True)
    torch_folder = Path(torch.__file__).parent
    includes = [f"-isystem{torch_folder}/include{api}" for api in ("", "/torch/csrc/api/include")]
    libraries = [f"-L{folder}", "-lnormops_kernels", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [*CXX, "-O0", "-DAT_PER_OPERATOR_HEADERS", *includes, "-shared", str(TESTS / "fake_gpus.cpp")]
    subprocess.run([*command, *libraries, "-Wl,-rpath,$ORIGIN", "-o", str(folder / DEVICE)], check=True)
    (folder / "torch").mkdir()
    shutil.copy(operators, folder / "torch")


class Gpu(ctypes.Structure):
    """As in cuda_runtime_stub.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("major", "code", "multiprocessors", "shared_bytes", "largest_cluster", "is_busy", "has_context")
    )


class Gpus:
    """The GPUs of this process, made in what ``build`` left in ``folder``."""

    def __init__(self, folder: Path) -> None:
        torch.ops.load_library(str(folder / DEVICE))
        (operators,) = (folder / "torch").iterdir()
        torch.ops.load_library(str(operators))
        self._runtime = ctypes.CDLL(str(folder / CALLS))
        self._runtime.stub_gpu.restype = ctypes.POINTER(Gpu)
        self._runtime.stub_calls.restype = ctypes.c_char_p
        self._device = ctypes.CDLL(str(folder / DEVICE))
        self.count: int = self._runtime.stub_devices()

    def __getitem__(self, device: int) -> Any:
        return self._runtime.stub_gpu(device).contents

    def tensor(self, *shape: int, device: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.put(torch.ones(shape, dtype=dtype), device)

    def put(self, tensor: Tensor, device: int = 0) -> Tensor:
        """A copy on a GPU, with the same strides; not among the calls."""
        calls = self.calls()
        there: Tensor = torch.ops.fake_gpus.to_gpu(tensor, device)
        self.calls()
        for line in calls:
            self._runtime.stub_write(line.encode())
        return there

    def calls(self, *kinds: str) -> list[str]:
        """What was called since it was asked last, or what of it begins with one of ``kinds``."""
        lines = self._runtime.stub_calls().decode().splitlines()
        return [line for line in lines if line.startswith(kinds or "")]

    def contexts(self) -> list[int]:
        return [device for device in range(self.count) if self[device].has_context]

    def current(self) -> int:
        device: int = self._runtime.stub_current_device()
        return device

    def set_stream(self, device: int, stream: int) -> None:
        self._device.fake_set_stream(device, ctypes.c_int64(stream))

    def begin_capture(self) -> None:
        self._runtime.stub_begin_capture()

    def end_capture(self) -> bool:
        """Whether everything in between was legal in a capture, and leaves what follows as strictly watched."""
        return bool(self._runtime.stub_end_capture()) and self._runtime.stub_capture_mode() == 0
