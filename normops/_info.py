from pathlib import Path
from typing import TypedDict

from normops import _C
from normops.backends import Backend, current_backend
from normops.override import overrides_torch


class CompiledInfo(TypedDict):
    """The part of :class:`BuildInfo` that the extension returns."""

    version: str
    torch: str
    compiler: str
    cpu_isas: list[str]
    cpu_isa: str
    cuda_archs: list[str]
    cuda_version: str | None


class BuildInfo(CompiledInfo):
    """The result of :func:`build_info`, which describes the keys."""

    library: str
    cuda_backend: Backend | None
    overrides_torch: bool


def build_info() -> BuildInfo:
    """Returns how the extension was built and which kernels are in use.

    Returns:
        A dictionary with the following keys.

        * ``version``: the version of normops.
        * ``torch``: the version of torch that the extension was built with.
        * ``compiler``: the version of the C++ compiler.
        * ``cpu_isas``: the CPU instruction sets that the extension contains kernels for.
        * ``cpu_isa``: the one in use, which is the best that this machine supports, or the one that the variable
          ``NORMOPS_CPU_ISA`` selects.
        * ``cuda_archs``: the compute capabilities that CUDA code was compiled for; empty without CUDA.
        * ``cuda_version``: the version of the CUDA toolkit, or None without CUDA.
        * ``library``: the path of the shared library with the operators, which C++ programs load without Python.
        * ``cuda_backend``: the kernels for CUDA tensors, see :func:`set_backend`. None means a composition of PyTorch
          operators.
        * ``overrides_torch``: True if torch's own ``rms_norm`` runs normops, see :func:`override_torch`.

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
