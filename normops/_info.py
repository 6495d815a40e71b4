from typing import TypedDict

from normops import _C


class BuildInfo(TypedDict):
    """What :func:`build_info` returns."""

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


def build_info() -> BuildInfo:
    """Tells how the extension was built and which CPU kernels are in use.

    Example:
        >>> import normops
        >>> info = normops.build_info()
        >>> info["cpu_isa"] in info["cpu_isas"]
        True
    """
    return _C.build_info()
