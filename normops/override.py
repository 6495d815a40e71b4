"""Makes torch's own rms_norm run normops."""

import sys
from contextlib import AbstractContextManager

import torch

from normops import _C
from normops._switch import chosen, lock

_registration: _C.Registration | None = None


def overrides_torch() -> bool:
    """Returns whether torch's own rms_norm runs normops."""
    return _registration is not None


def set_override_torch(enabled: bool) -> None:
    """Makes torch's own ``rms_norm`` run normops, or undoes that, until the next call.

    Use :func:`override_torch` to restore the previous state at the end of a ``with`` block.

    Args:
        enabled: True runs normops, False runs torch's own kernels.

    Example:
        >>> import normops
        >>> normops.set_override_torch(True)
        >>> normops.build_info()["overrides_torch"]
        True
        >>> normops.set_override_torch(False)
    """
    _switch(enabled)


def override_torch(enabled: bool = True) -> AbstractContextManager[None]:
    """Makes torch's own ``rms_norm`` run normops inside a ``with`` block.

    The override applies to :func:`torch.nn.functional.rms_norm`, and so to :class:`torch.nn.RMSNorm`, in all threads of
    the process. torch's own kernels still run for calls that normops does not support:

    * devices other than CPU and CUDA;
    * dtypes other than float16, bfloat16, float32 and float64, and layouts that are not strided;
    * an ``eps`` of NaN;
    * calls under :func:`torch.vmap`.

    Outputs have the strides of torch's outputs. On the CPU, torch computes inputs in :data:`torch.channels_last` and
    keeps their memory format. Outputs for other inputs are contiguous.

    Entering and leaving the block calls :func:`torch.compiler.reset`, so that functions are compiled again. Inductor's
    caches distinguish graphs by whether torch was overridden.

    Args:
        enabled: False runs torch's own kernels inside the block.

    Returns:
        A context manager, which restores the previous state at the end.

    Example:
        >>> import torch, normops
        >>> with normops.override_torch():
        ...     y = torch.nn.RMSNorm(64)(torch.randn(8, 64))
        >>> normops.build_info()["overrides_torch"]
        False
    """
    return chosen(_switch, enabled)


def _switch(enabled: bool) -> bool:
    global _registration
    with lock:
        before = overrides_torch()
        if enabled == before:
            return before
        if _registration is None:
            _registration = _C.override_torch()
        else:
            _registration.close()
            _registration = None
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        return before
