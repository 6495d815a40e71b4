"""Loads Hugging Face's kernels-community/rmsnorm if NORMOPS_BENCH_RMSNORM is set.

The variable is a folder with the package ``rmsnorm``, or ``hub``: then the package ``kernels`` downloads it.
"""

import importlib
import os
import sys
from functools import cache
from types import ModuleType

from torch import Tensor

from bench.operators import EPS

VARIABLE = "NORMOPS_BENCH_RMSNORM"


@cache
def load() -> ModuleType:
    place = os.environ[VARIABLE]
    if place == "hub":
        kernel: ModuleType = importlib.import_module("kernels").get_kernel("kernels-community/rmsnorm")
        return kernel
    sys.path.insert(0, place)
    importlib.import_module("rmsnorm.layers")
    return importlib.import_module("rmsnorm")


@cache
def missing() -> str | None:
    """Returns why the kernel is unavailable, or None."""
    if not os.environ.get(VARIABLE):
        return f"{VARIABLE} is neither a folder with rmsnorm nor hub"
    try:
        load()
    except Exception as error:  # loading, building and downloading raise different errors
        return f"{VARIABLE}={os.environ[VARIABLE]}: {str(error).partition(chr(10))[0]}"
    return None


def rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    output: Tensor = load().layers.RMSNormFunction.apply(input, weight, EPS)
    return output
