"""Which kernels serve CUDA tensors, which on ROCm are AMD's: the compiled ones, those in Triton, or neither."""

import importlib.util
import os
from typing import Literal, get_args

import torch

from normops import _C
from normops._switch import Switch

Backend = Literal["cuda", "triton"]

_registration: _C.Registration | None = None


def current_backend() -> Backend | None:
    """What serves CUDA tensors; None: a composition of PyTorch operators."""
    if _registration is not None:
        return "triton"
    return "cuda" if _has_cuda() else None


def set_backend(name: str) -> None:
    """Chooses the kernels that serve CUDA tensors from this call on: see :class:`use_backend`.

    Example:
        >>> import normops
        >>> normops.set_backend("auto")
    """
    use_backend(name)


class use_backend(Switch):  # noqa: N801  as torch's
    """Chooses the kernels that serve CUDA tensors for the time of a ``with`` block.

    As ``torch.set_grad_enabled`` it acts when it is called, without a block from then on, as :func:`set_backend` does.
    It holds for all threads, in eager mode and in compiled code: graphs hold operators, not kernels. The environment
    variable ``NORMOPS_BACKEND`` chooses at import. CPU tensors are not concerned.

    Args:
        name: ``"cuda"``, the compiled CUDA kernels; ``"triton"``; or ``"auto"``, the compiled ones if this build has
            them, else those in Triton if it is installed, else a composition of PyTorch operators.

    Raises:
        ValueError: for any other name.
        RuntimeError: if the backend is not there; the message says how to get it.

    Example:
        >>> import normops
        >>> with normops.use_backend("auto"):
        ...     y = normops.rms_norm(torch.ones(2, 4), 4)
    """

    def __init__(self, name: str) -> None:
        super().__init__(_select, _resolve(name))


def _resolve(name: str) -> Backend | None:
    if name == "auto":
        return "cuda" if _has_cuda() else "triton" if _has_triton() else None
    if name == "cuda":
        if torch.version.hip is not None:
            raise RuntimeError(
                f"expected a torch built for CUDA for backend 'cuda', but got torch {torch.__version__}, built for "
                f"ROCm {torch.version.hip}: on AMD's GPUs the kernels in Triton serve, set_backend('triton')"
            )
        if not _has_cuda():
            raise RuntimeError(
                "expected compiled CUDA kernels for backend 'cuda', but this build of normops has none: "
                "reinstall it with nvcc on PATH and NORMOPS_CUDA=1"
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


def _select(backend: Backend | None) -> Backend | None:
    """A registration that serves already stays: between two, calls of other threads would meet what is below."""
    global _registration
    before = current_backend()
    if backend == "triton" and _registration is None:
        _registration = _C.register_triton("CUDA")
    elif backend != "triton" and _registration is not None:
        _registration.close()
        _registration = None
    return before


def _has_cuda() -> bool:
    return torch.version.hip is None and bool(_C.build_info()["cuda_archs"])


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


set_backend(os.environ.get("NORMOPS_BACKEND", "auto"))
