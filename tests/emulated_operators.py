"""The operators on CUDA tensors over the emulation: are they what the oracle says of what torch was given?

    python tests/emulated_operators.py FOLDER

raises at the first that is not. The kernels have tests of their own; here it is what lies between them and torch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_gpus
import torch
from add_cases import targets_of
from gated_cases import GATED_CASES, GATINGS, GatedCase
from torch import Tensor

from reference import oracle
from reference.cases import CASES, FEW_CASES, HALVES, SIZES, Case

ops = torch.ops.normops

SOME_CASES = (*FEW_CASES, *SIZES[::17], *CASES[len(SIZES) :: 7])


def put(*tensors: Tensor | None) -> Iterator[Any]:
    """On a device that is not the current one."""
    return (None if tensor is None else torch.ops.fake_gpus.to_gpu(tensor, 1) for tensor in tensors)


def check(actual: Tensor | None, expected: oracle.Bounded | None, name: str) -> None:
    if actual is None or expected is None:
        assert actual is None, name
        assert expected is None, name
        return
    assert actual.device.index == 1, name
    oracle.assert_within(torch.ops.fake_gpus.on_cpu(actual), expected, name)


def check_rms_norm(case: Case) -> None:
    shape, eps, keywords = case.normalized_shape, case.eps, {"weight_offset": case.weight_offset}
    input, grad, weight, residual = case.input(), case.grad_output(), case.weight(), case.grad_residual()
    x, g, w, r = put(input, grad, weight, residual)
    expected = oracle.rms_norm(input, shape, weight, eps, case.weight_offset)
    check(ops.rms_norm(x, shape, w, eps, **keywords), expected, f"output of {case}")
    (out,) = put(targets_of(case, case.dtype, case.dtype, "cpu")["out"])
    check(ops.rms_norm.out(x, shape, w, eps, **keywords, out=out), expected, f"out of {case}")

    backward = oracle.rms_norm_backward(grad, input, shape, weight, eps, case.weight_offset, residual)
    for mask in ([True, True], [True, False], [False, True]):
        got = ops.rms_norm_backward(g, x, shape, w, eps, **keywords, grad_residual=r, output_mask=mask)
        check(got[0], backward.grad_input if mask[0] else None, f"grad_input of {case}")
        check(got[1], backward.grad_weight if mask[1] else None, f"grad_weight of {case}")


def check_add_rms_norm(case: Case, residual_dtype: torch.dtype) -> None:
    shape, eps, keywords = case.normalized_shape, case.eps, {"weight_offset": case.weight_offset}
    input, residual, weight = case.input(), case.grad_layout(case.shape, residual_dtype, 4), case.weight()
    x, r, w = put(input, residual, weight)
    compute = torch.float64 if case.dtype == torch.float64 else torch.float32
    total = (input.to(compute) + residual.to(compute)).to(residual_dtype)
    targets = targets_of(case, case.dtype, residual_dtype, "cpu")
    for y, h in (
        ops.add_rms_norm(x, r, shape, w, eps, **keywords),
        ops.add_rms_norm.out(
            x, r, shape, w, eps, **keywords, **dict(zip(targets, put(*targets.values()), strict=True))
        ),
    ):
        assert torch.equal(torch.ops.fake_gpus.on_cpu(h), total), f"sum of {case}"
        normalized = ops.rms_norm(h, shape, w, eps, **keywords)
        if residual_dtype == case.dtype:
            assert torch.equal(*(torch.ops.fake_gpus.on_cpu(tensor) for tensor in (y, normalized))), f"output of {case}"
        else:
            assert torch.equal(*(torch.ops.fake_gpus.on_cpu(tensor).to(case.dtype) for tensor in (y, normalized)))


def check_gated_rms_norm(gated: GatedCase) -> None:
    case = gated.case
    shape, eps, keywords = case.normalized_shape, case.eps, gated.keywords
    input, grad, gate, weight = case.input(), case.grad_output(), gated.gate(), case.weight()
    x, g, z, w = put(input, grad, gate, weight)
    given = (input, gate, shape, weight, eps, case.weight_offset)
    check(
        ops.gated_rms_norm(x, z, shape, w, eps, **keywords), oracle.gated_rms_norm(*given, **gated.gating), str(gated)
    )
    expected = oracle.gated_rms_norm_backward(grad, *given, **gated.gating)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        got = ops.gated_rms_norm_backward(g, x, z, shape, w, eps, **keywords, output_mask=mask)
        for wanted, gradient, bounded in zip(mask, got, expected, strict=True):
            check(gradient, bounded if wanted else None, f"gradients of {gated}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    fake_gpus.load(folder)
    for index, case in enumerate(SOME_CASES):
        check_rms_norm(case)
        check_add_rms_norm(case, torch.float32 if case.dtype in HALVES and index % 2 else case.dtype)
    some = [gated for gated in GATED_CASES if gated.case in SOME_CASES]
    for gated in (*some[::2], *GATED_CASES[-2 * len(GATINGS) :]):
        check_gated_rms_norm(gated)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
