"""normops under torch's own rms_norm."""

import sys

import torch

from normops import _C
from normops._switch import Switch

_registration: _C.Registration | None = None


def overrides_torch() -> bool:
    """Whether torch's own rms_norm runs normops."""
    return _registration is not None


def set_override_torch(enabled: bool) -> None:
    """Lets torch's own ``rms_norm`` run normops, or no longer, from this call on: see :class:`override_torch`.

    Example:
        >>> import normops
        >>> normops.set_override_torch(True)
        >>> normops.build_info()["overrides_torch"]
        True
        >>> normops.set_override_torch(False)
    """
    override_torch(enabled)


class override_torch(Switch):  # noqa: N801  as torch's
    """Lets torch's own ``rms_norm`` run normops for the time of a ``with`` block.

    That is ``torch.nn.functional.rms_norm``, and with it ``torch.nn.RMSNorm``, of the whole process: programs stay as
    they are. What normops has no kernels for is computed by torch as ever: another device than CPU and CUDA, another
    dtype than float16, bfloat16, float32 and float64, a layout that is not strided, an eps that is NaN; and so is what
    runs under ``torch.vmap``. Outputs have the strides of torch's. On the CPU, torch itself computes inputs in
    ``torch.channels_last`` and keeps their memory format. Outputs for other inputs are contiguous.

    Code that torch.compile has compiled notices: a switch calls ``torch.compiler.reset()``, and graphs in Inductor's
    caches, which hold one operator or the other, are found with the switch as it was.

    As ``torch.set_grad_enabled`` it acts when it is called, without a block from then on, as
    :func:`set_override_torch` does.

    Args:
        enabled: False: back to torch's own.

    Example:
        >>> import torch, normops
        >>> with normops.override_torch():
        ...     y = torch.nn.RMSNorm(64)(torch.randn(8, 64))
        >>> normops.build_info()["overrides_torch"]
        False
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(_switch, enabled)


def _switch(enabled: bool) -> bool:
    global _registration
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
