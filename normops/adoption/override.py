"""normops under torch's own rms_norm."""

import sys

import torch

from normops import _C
from normops._cache_tags import add_tag, remove_tag
from normops._switch import Switch

_registration: _C.Registration | None = None
_CACHE_KEY_TAG = "normops.override_torch"


def overrides_torch() -> bool:
    """Whether torch's own rms_norm runs normops."""
    return _registration is not None


class override_torch(Switch):  # noqa: N801  called as a function
    """Lets torch's own ``rms_norm`` run normops, from this call on, or for the time of a ``with`` block.

    That is ``torch.nn.functional.rms_norm``, and with it ``torch.nn.RMSNorm``, of the whole process: programs stay as
    they are. ``python -m normops run program.py`` does it for those that are not yours to change. What normops has no
    kernels for is computed by torch as ever: another device than CPU and CUDA, another dtype than float16, bfloat16,
    float32 and float64, a layout that is not strided, an eps that is NaN; and so is what runs under ``torch.vmap``.

    Code that torch.compile has compiled notices: a switch calls ``torch.compiler.reset()``, and graphs in Inductor's
    caches, which hold one operator or the other, are found with the switch as it was.

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
        self._enabled = enabled
        super().__init__(_switch, enabled)

    def __repr__(self) -> str:
        """The call, as it is written."""
        return f"override_torch({'' if self._enabled else False})"


def _switch(enabled: bool) -> bool:
    global _registration
    before = overrides_torch()
    if enabled == before:
        return before
    if _registration is None:
        _registration = _C.override_torch()
        add_tag(_CACHE_KEY_TAG)
    else:
        _registration.close()
        _registration = None
        remove_tag(_CACHE_KEY_TAG)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return before
