"""Compares the operators on CUDA tensors, whose kernels run as PTX, with the oracle.

    python tests/gpu/cuda_operators.py FOLDER LIBRARY

raises at the first mismatch. Other tests cover the kernels; this one covers the layers between them and torch.
"""

import ctypes
import math
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import cuda_on_ptx
import fake_gpus
import numpy as np
import torch
from ptx.memory import Memory, Region
from torch import Tensor

from reference import oracle
from reference.cases import CASES, FEW_CASES, SIZES, Case
from reference.operators import (
    ADD_RMS_NORM,
    OPERATORS,
    Operator,
    OperatorCase,
    Variant,
    cases_of,
    other_dtypes,
    variants,
)

ops = torch.ops.normops

SOME_CASES = [
    case
    for case in (*SIZES[::17], *CASES[len(SIZES) :: 7])
    if math.prod(case.shape) < 5_000 and cuda_on_ptx.is_quick(case)
]


def some_cases_of(operator: Operator) -> list[OperatorCase]:
    flags = operator.flags
    few = [
        OperatorCase(operator, case, flags[(number + index) % len(flags)], dtypes)
        for number, case in enumerate(filter(operator.takes, FEW_CASES))
        for index, dtypes in enumerate(({}, *other_dtypes(operator, case.dtype)))
    ]
    every = cases_of(operator)
    return [*few, *(case for case in every if case.case in SOME_CASES), *(every[-2 * len(flags) :] if flags[0] else ())]


def put(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the tensors to a device that is not the current one."""
    return {
        name: torch.ops.fake_gpus.to_gpu(value, 1) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def on_cpu(tensor: Tensor) -> Tensor:
    return torch.ops.fake_gpus.on_cpu(tensor)


def check_results(
    case: OperatorCase, results: tuple[Tensor | None, ...], expected: tuple[oracle.Bounded | None, ...]
) -> None:
    for name, actual, bounded in zip(case.operator.outputs, results, expected, strict=True):
        if bounded is None:
            assert actual is None, f"{name} of {case}"
        else:
            assert actual is not None, f"{name} of {case}"
            assert actual.device.index == 1, f"{name} of {case}"
            oracle.assert_within(on_cpu(actual), bounded, f"{name} of {case}")


def check(case: OperatorCase) -> None:
    operator, given = case.operator, case.arguments()
    if "grad_bias" in operator.outputs:
        given["bias"] = None  # ATen sums grad_output for its gradient
    arguments, expected = put(given), case.expected(given)
    results = operator.call(**arguments)
    check_results(case, results, expected)
    written = operator.results(operator.out(**arguments, **put(case.targets())))
    check_results(case, tuple(None if b is None else w for w, b in zip(written, expected, strict=True)), expected)
    for mask in operator.masks() if operator.has_mask and case.case in FEW_CASES else ():
        masked = operator.call(**arguments, output_mask=mask)
        check_results(case, masked, tuple(b if wanted else None for b, wanted in zip(expected, mask, strict=True)))
    # With other roundings, rms_norm casts to its input's dtype, which differs here.
    if operator is ADD_RMS_NORM and arguments.get("rounding", "once") == "once":
        of_norm = {name: value for name, value in arguments.items() if name not in ("residual", "alpha")}
        normalized = ops.rms_norm(**of_norm | {"input": results[1]})
        assert torch.equal(*(on_cpu(y).to(case.case.dtype) for y in (results[0], normalized))), f"output of {case}"


def check_nans(variant: Variant, dtype: torch.dtype) -> None:
    operator = variant.operator
    for others in ({}, *other_dtypes(operator, dtype)):
        case = variant.at(Case((9, 70), dtype, weight_dtype=torch.float32, has_residual=True), others)
        for arguments in case.with_nans():
            results = operator.results(operator.default(**put(arguments)))
            for name, actual, bounded in zip(operator.outputs, results, case.expected(arguments), strict=True):
                oracle.assert_same_nans(on_cpu(actual), bounded, f"{name} of {case}")


def memory_of_gpus(device: ctypes.CDLL) -> Memory:
    """Returns all memory of the GPUs; the kernels' own tests check which bytes they access."""
    memory = Memory()

    def add(address: int, size: int) -> None:
        if size > 0:
            memory.add(Region(address, size, f"{size} bytes of a GPU", writable=np.arange(size)))

    device.fake_each_block(ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(add))
    return memory


def main(folder: Path, library: Path) -> None:
    torch.set_num_threads(1)
    fake_gpus.load(folder)
    device = ctypes.CDLL(str(folder / fake_gpus.DEVICE))
    gpu = cuda_on_ptx.Gpu(cuda_on_ptx.ptx_of(library, 90), lambda: memory_of_gpus(device))
    ctypes.CDLL(str(folder / fake_gpus.KERNELS)).stub_run_kernels(gpu.run)
    for operator in OPERATORS:
        for case in some_cases_of(operator):
            try:
                check(case)
            finally:
                gpu.check()
    for variant, dtype in product(variants(), (torch.bfloat16, torch.float32)):
        try:
            check_nans(variant, dtype)
        finally:
            gpu.check()


if __name__ == "__main__":
    oracle.sums_rows_by_tree = False
    main(Path(sys.argv[1]), Path(sys.argv[2]))
