from pathlib import Path
from typing import TypedDict

from normops import _C
from normops.backends import Backend, current_backend
from normops.override import overrides_torch


class CompiledInfo(TypedDict):
    """The part of :class:`BuildInfo` that the extension returns."""

    version: str
    """The version of normops."""
    torch: str
    """The version of torch that the extension was built with."""
    compiler: str
    """The version of the C++ compiler."""
    cpu_isas: list[str]
    """The CPU instruction sets that the extension contains kernels for."""
    cpu_isa: str
    """The one in use: the best that this machine supports, or the one that the variable NORMOPS_CPU_ISA selects."""
    cuda_archs: list[str]
    """The compute capabilities that CUDA code was compiled for; empty without CUDA."""
    cuda_version: str | None
    """The version of the CUDA toolkit, or None without CUDA."""


class BuildInfo(CompiledInfo):
    """The result of :func:`build_info`: a dictionary with these keys."""

    library: str
    """The path of the shared library with the operators, which C++ programs load without Python."""
    cuda_backend: Backend | None
    """The kernels for CUDA tensors, see :func:`set_backend`; None: a composition of PyTorch operators."""
    overrides_torch: bool
    """True if torch's own ``rms_norm`` runs normops, see :func:`override_torch`."""


def build_info() -> BuildInfo:
    """Returns how the extension was built and which kernels are in use.

    Returns:
        A dictionary with the keys of :class:`BuildInfo`.

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
