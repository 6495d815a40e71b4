"""Selects the kernels for CUDA tensors, which on ROCm are AMD's: compiled CUDA kernels, Triton kernels, or neither."""

import importlib.util
import os
from typing import Literal, get_args

import torch

from normops import _C
from normops._switch import Option, Setting

Backend = Literal["cuda", "triton"]

_registration: _C.Registration | None = None


def current_backend() -> Backend | None:
    """Returns the backend for CUDA tensors; None means a composition of PyTorch operators."""
    if _registration is not None:
        return "triton"
    return "cuda" if _has_cuda() else None


def set_backend(name: str) -> Setting[Backend | None]:
    """Selects the kernels for CUDA tensors, at once; as a ``with`` block, restores the previous ones at the end.

    The selection applies to all threads, in eager mode and in compiled code: graphs contain operators, not kernels. It
    does not affect CPU tensors. Calls and blocks follow each other as those of :func:`override_torch`. The environment
    variable ``NORMOPS_BACKEND`` makes the first selection, at import.

    Args:
        name: ``"cuda"`` selects the compiled CUDA kernels, ``"triton"`` the Triton kernels. ``"auto"`` selects the
            compiled kernels if this build contains them, otherwise the Triton kernels if Triton is installed, otherwise
            a composition of PyTorch operators. Norms over channels (``rms_norm(dim=1)``) run the Triton kernels with
            either, if Triton is installed.

    Returns:
        A context manager and decorator, see :func:`override_torch`.

    Raises:
        ValueError: if ``name`` is none of these.
        RuntimeError: if the backend is not available. The message says how to install it.

    Example:
        >>> import torch, normops
        >>> with normops.set_backend("auto"):
        ...     y = normops.rms_norm(torch.ones(2, 4), 4)
        >>> _ = normops.set_backend("auto")  # until the next call
    """
    return Setting(_option, _resolve(name))


def _resolve(name: str) -> Backend | None:
    if name == "auto":
        return "cuda" if _has_cuda() else "triton" if _has_triton() else None
    if name == "cuda":
        if torch.version.hip is not None:
            raise RuntimeError(
                f"expected a torch built for CUDA for backend 'cuda', but got torch {torch.__version__}, built for "
                f"ROCm {torch.version.hip}: for AMD's GPUs use the kernels in Triton, set_backend('triton')"
            )
        if not _has_cuda():
            raise RuntimeError(
                "expected compiled CUDA kernels for backend 'cuda', but this build of normops has none: "
                "reinstall it with nvcc on PATH and FORCE_CUDA=1"
            )
        return "cuda"
    if name == "triton":
        if not _has_triton():
            raise RuntimeError(
                "expected Triton to be installed for backend 'triton', but it is not: pip install triton, in the "
                "version that belongs to the installed torch"
            )
        return "triton"
    raise ValueError(f"expected backend to be one of {(*get_args(Backend), 'auto')}, but got {name!r}")


def _select(backend: Backend | None) -> None:
    """Keeps kernels registered: other threads would briefly see the fallback."""
    global _registration
    if backend == "triton" and _registration is None:
        _registration = _C.register_triton("CUDA")
    elif backend != "triton" and _registration is not None:
        _registration.close()
        _registration = None


def _has_cuda() -> bool:
    return torch.version.hip is None and bool(_C.build_info()["cuda_archs"])


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# The norm over channels has Triton kernels alone, which therefore run with the compiled kernels, too.
_channels = _C.register_triton_channels("CUDA") if _has_triton() else None
_option = Option(_select, current_backend())
set_backend(os.environ.get("NORMOPS_BACKEND", "auto"))
