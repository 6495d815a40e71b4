"""Fused RMSNorm for PyTorch: one operator for the forward pass, one for the backward pass, in every execution mode.

* Norms: ``rms_norm``, ``add_rms_norm``, ``gated_rms_norm``, ``rms_norm_rope``; in-place ``rms_norm_``,
  ``add_rms_norm_``, ``rms_norm_rope_``. Modules: ``RMSNorm``, ``GatedRMSNorm``.
* Existing models: ``patch``, ``is_patched``, ``unpatch``; ``override_torch``.
* Memory: ``recompute_norms``. Backends: ``set_backend``; ``build_info``.

:mod:`normops.sharding` has norms of rows that ranks share. The norms are operators of ``torch.ops.normops``, which also
contains their backwards and ``.out`` overloads.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from normops import _binding as _binding  # first: finds normops._C
from normops._after_import import after_import as _after_import
from normops._after_import import import_or_warn as _import_or_warn
from normops._info import build_info
from normops._private_torch import explain as _explain
from normops._private_torch import warn_if_newer as _warn_if_newer
from normops.backends import set_backend
from normops.functional import (
    add_rms_norm,
    add_rms_norm_,
    gated_rms_norm,
    rms_norm,
    rms_norm_,
    rms_norm_rope,
    rms_norm_rope_,
)
from normops.modules import GatedRMSNorm, RMSNorm
from normops.override import override_torch

if _TYPE_CHECKING:
    from normops.adoption import is_patched, patch, unpatch
    from normops.recompute import recompute_norms

_warn_if_newer(_torch.__version__)
_import_or_warn("normops.compile_cache", "its part of torch.compile's cache keys")
_import_or_warn("normops.vmap", "torch.vmap")
_after_import("torch.distributed.tensor", "normops.sharding", "DTensor")
_after_import("torch.nested._internal.ops", "normops.nested", "nested tensors")

__version__ = build_info()["version"]

# Imported on first use: these depend on private parts of torch, and would take most of the import time.
_LAZY = {
    "is_patched": "normops.adoption",
    "patch": "normops.adoption",
    "recompute_norms": "normops.recompute",
    "unpatch": "normops.adoption",
}

__all__ = [
    "GatedRMSNorm",
    "RMSNorm",
    "add_rms_norm",
    "add_rms_norm_",
    "build_info",
    "gated_rms_norm",
    "is_patched",
    "override_torch",
    "patch",
    "recompute_norms",
    "rms_norm",
    "rms_norm_",
    "rms_norm_rope",
    "rms_norm_rope_",
    "set_backend",
    "unpatch",
]


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _explain(f"normops.{name}"):
        value = getattr(_import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
