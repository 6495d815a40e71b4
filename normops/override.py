"""Runs normops under torch's own rms_norm."""

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
    """Makes torch's own ``rms_norm`` run normops, or undoes that: see :func:`override_torch`.

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

    This concerns ``torch.nn.functional.rms_norm``, and with it ``torch.nn.RMSNorm``, in all threads of the process.
    torch computes the calls that normops has no kernels for: devices other than CPU and CUDA, dtypes other than
    float16, bfloat16, float32 and float64, layouts that are not strided, an ``eps`` of NaN, and calls under
    ``torch.vmap``.
    Outputs have the strides of torch's. On the CPU, torch computes inputs in ``torch.channels_last`` and keeps their
    memory format. Outputs for other inputs are contiguous.

    Entering and leaving the block calls ``torch.compiler.reset()``, so that compiled functions are compiled again.
    Inductor's caches distinguish graphs by whether torch was overridden.

    Args:
        enabled: False runs torch's own kernels inside the block.

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
