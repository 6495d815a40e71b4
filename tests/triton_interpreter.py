"""Runs the Triton kernels on CPU tensors, in Triton's interpreter: TRITON_INTERPRET=1 must be set."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from normops import _C


def serve_cpu() -> _C.Registration:
    """Puts the Triton launchers in the place of the CPU kernels."""
    interpreter._convert_float = _convert_float
    interpreter._patch_lang = _patch_lang
    return _C.register_triton("CPU")


_original_convert_float = interpreter._convert_float
_original_patch_lang = interpreter._patch_lang


def _convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """The interpreter's own truncates to bfloat16, which GPUs do not, and has wrong subnormal numbers from it."""
    if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
        numbers = torch.from_numpy(np.ascontiguousarray(input).view(np.float32))
        return numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    if (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):
        return np.ascontiguousarray(input).view(np.uint16).astype(np.uint32) << 16
    return _original_convert_float(input, input_dtype, output_dtype, rounding_mode)


_LANGUAGE = SimpleNamespace(__globals__={"language": tl, "core": tl.core})


def _patch_lang(_: Any) -> Any:
    """All of the language at once: for each function that a kernel calls, the interpreter would patch what it sees."""
    is_patched = not tl.core.is_builtin(tl.program_id)
    return None if is_patched else _original_patch_lang(_LANGUAGE)
