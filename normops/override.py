"""Makes torch's own rms_norm run normops."""

import sys

import torch

from normops import _C
from normops._switch import Option, Setting

_registration: _C.Registration | None = None


def overrides_torch() -> bool:
    """Returns whether torch's own rms_norm runs normops."""
    return _registration is not None


def override_torch(enabled: bool = True) -> Setting[bool]:
    """Makes torch's own ``rms_norm`` run normops, at once; as a ``with`` block, restores the previous state at the end.

    The override applies to :func:`torch.nn.functional.rms_norm`, and so to :class:`torch.nn.RMSNorm`, in all threads of
    the process. torch's own kernels still run for calls that normops does not support:

    * devices other than CPU and CUDA;
    * dtypes other than float16, bfloat16, float32 and float64, and layouts that are not strided;
    * an ``eps`` of NaN;
    * calls under :func:`torch.vmap`.

    Outputs have the strides of torch's outputs. On the CPU, torch computes inputs in :data:`torch.channels_last` and
    keeps their memory format. Outputs for other inputs are contiguous.

    The state belongs to the process, and the latest of the calls and open blocks decides it. A call lasts until the
    next one; inside a block, at most until the block ends. Blocks of several threads or tasks may end in any order.

    A change of the state calls :func:`torch.compiler.reset`, so that functions are compiled again. Inductor's caches
    distinguish graphs by whether torch was overridden.

    Args:
        enabled: False runs torch's own kernels.

    Returns:
        A context manager, which may be entered several times, and a decorator. It need not be used.

    Example:
        >>> import torch, normops
        >>> with normops.override_torch():
        ...     y = torch.nn.RMSNorm(64)(torch.randn(8, 64))
        >>> normops.build_info()["overrides_torch"]
        False
        >>> _ = normops.override_torch()  # until the next call
        >>> normops.build_info()["overrides_torch"]
        True
        >>> _ = normops.override_torch(False)
    """
    return Setting(_option, enabled)


def _switch(enabled: bool) -> None:
    global _registration
    if enabled == overrides_torch():
        return
    if _registration is None:
        _registration = _C.override_torch()
    else:
        _registration.close()
        _registration = None
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


_option = Option(_switch, False)
