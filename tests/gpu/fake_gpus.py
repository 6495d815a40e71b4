"""Loads the operators for CUDA tensors without a GPU, in processes that have loaded no other normops.

fake_gpu_builds.py builds them: the GPUs of cuda_runtime_stub.cpp record their calls and compute nothing; fake_gpus.cpp
gives torch tensors on them, in CPU memory.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KERNELS = "libnormops_kernels.so"
DEVICE = "libfake_gpus.so"

CASES: dict[str, Callable[["Gpus"], None]] = {}


def case(function: Callable[["Gpus"], None]) -> Callable[["Gpus"], None]:
    """Registers a function as a case, which runs in its own process, before any other call."""
    CASES[function.__name__] = function
    return function


def load(folder: Path) -> None:
    torch.ops.load_library(str(folder / DEVICE))
    (operators,) = (folder / "torch").iterdir()
    torch.ops.load_library(str(operators))


class Gpu(ctypes.Structure):
    """Mirrors the struct in cuda_runtime_stub.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("major", "code", "multiprocessors", "shared_bytes", "largest_cluster"),
            *("is_busy", "has_context", "is_slow"),
        )
    )


class Gpus:
    """The GPUs of this process, loaded from the ``folder`` of a build."""

    def __init__(self, folder: Path) -> None:
        load(folder)
        self._runtime = ctypes.CDLL(str(folder / KERNELS))
        self._runtime.stub_gpu.restype = ctypes.POINTER(Gpu)
        self._runtime.stub_calls.restype = ctypes.c_char_p
        self._device = ctypes.CDLL(str(folder / DEVICE))
        self.count: int = self._runtime.stub_devices()

    def __getitem__(self, device: int) -> Any:
        return self._runtime.stub_gpu(device).contents

    def tensor(self, *shape: int, device: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.put(torch.ones(shape, dtype=dtype), device)

    def put(self, tensor: Tensor, device: int = 0) -> Tensor:
        """Copies a tensor to a GPU, with the same strides, without recording calls."""
        calls = self.calls()
        there: Tensor = torch.ops.fake_gpus.to_gpu(tensor, device)
        self.calls()
        for line in calls:
            self._runtime.stub_write(line.encode())
        return there

    def calls(self, *kinds: str) -> list[str]:
        """Returns the calls since the previous query, or those that begin with one of ``kinds``."""
        lines = self._runtime.stub_calls().decode().splitlines()
        return [line for line in lines if line.startswith(kinds or "")]

    def contexts(self) -> list[int]:
        return [device for device in range(self.count) if self[device].has_context]

    def current(self) -> int:
        device: int = self._runtime.stub_current_device()
        return device

    def lookups_of_device(self) -> int:
        """Counts the queries of the current device; each lookup of a device's cached properties makes one."""
        count: int = self._runtime.stub_lookups_of_device()
        return count

    def set_stream(self, device: int, stream: int) -> None:
        self._device.fake_set_stream(device, ctypes.c_int64(stream))

    def begin_capture(self) -> None:
        self._runtime.stub_begin_capture()

    def end_capture(self) -> bool:
        """Returns True if all calls were legal in a capture and the strict capture mode is restored."""
        return bool(self._runtime.stub_end_capture()) and self._runtime.stub_capture_mode() == 0
