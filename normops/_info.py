from pathlib import Path
from typing import TypedDict

from normops import _C
from normops.backends import Backend, current_backend
from normops.override import overrides_torch


class CompiledInfo(TypedDict):
    """What the extension knows of itself."""

    version: str
    """The version of normops."""
    torch: str
    """The version of torch that the extension was built with."""
    compiler: str
    """The version of the C++ compiler."""
    cpu_isas: list[str]
    """The CPU instruction sets that the extension holds kernels for."""
    cpu_isa: str
    """The one in use: the best that this machine runs, or what the environment variable NORMOPS_CPU_ISA names."""
    cuda_archs: list[str]
    """The compute capabilities that CUDA code was compiled for; empty without CUDA."""
    cuda_version: str | None
    """The version of the CUDA toolkit, or None without CUDA."""


class BuildInfo(CompiledInfo):
    """What :func:`build_info` returns."""

    library: str
    """The file that holds the operators, without Python: for C++ programs to load."""
    cuda_backend: Backend | None
    """What serves CUDA tensors, see :class:`use_backend`; None: a composition of PyTorch operators."""
    overrides_torch: bool
    """Whether torch's own rms_norm runs normops, see :class:`override_torch`."""


def build_info() -> BuildInfo:
    """Tells how the extension was built and which kernels are in use.

    Example:
        >>> import normops
        >>> info = normops.build_info()
        >>> info["cpu_isa"] in info["cpu_isas"]
        True
    """
    library = Path(_C.__file__).with_name("libnormops.so")
    return {
        **_C.build_info(),
        "library": str(library),
        "cuda_backend": current_backend(),
        "overrides_torch": overrides_torch(),
    }
