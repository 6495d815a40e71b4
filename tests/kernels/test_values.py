"""Every operator is within the oracle's bounds of its definition, over every shape, dtype, layout and flag."""

import math
import struct
from itertools import cycle

import numpy as np
import pytest
import torch
from assertions import assert_same_bits, assert_within, same_bits
from sampling import few, marked, pairwise

from reference import cases, oracle
from reference.cases import HALVES, Case, moved, on
from reference.operators import (
    OPERATOR_CASES,
    OPERATORS,
    OperatorCase,
    Variant,
    other_dtypes,
    variants,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ops = torch.ops.normops


IN_CORE = [case for case in OPERATOR_CASES if case.case.dtype in (torch.float32, torch.bfloat16)]
OTHERS = [case for case in OPERATOR_CASES if case.case.dtype not in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    "case",
    [
        *few(IN_CORE, chosen=pytest.mark.triton),
        *few(OTHERS, chosen=pytest.mark.triton_release, others=pytest.mark.full),
    ],
    ids=str,
)
def test_within_bounds(case: OperatorCase, device: str) -> None:
    """The functions have the same bits, and .out with targets of every layout that an output can have."""
    operator, arguments, targets = case.operator, case.arguments(device), case.targets(device)
    results = operator.call(**arguments)
    assert_within(results, case.expected())
    for name, result in zip(operator.outputs, results, strict=True):
        assert result is None or (result.dtype == operator.dtype_of(name, arguments) and result.is_contiguous())
    if operator.function is not None:
        assert_same_bits(operator.results(operator.function(**arguments)), results)
    written = operator.results(operator.out(**arguments, **targets))
    for target, result, given in zip(written, results, targets.values(), strict=True):
        assert target is given
        assert result is None or same_bits(target, result)


MASKED = [operator for operator in OPERATORS if operator.has_mask]


@pytest.mark.parametrize(
    "like",
    [Case((5, 77), torch.bfloat16), Case((4, 5, 77), torch.bfloat16, has_residual=True, group_dims=1)],
    ids=str,
)
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("variant", variants(MASKED), ids=str)
@pytest.mark.triton_release
def test_masked_gradients_are_left_out(variant: Variant, has_weight: bool, like: Case, device: str) -> None:
    operator = variant.operator
    weight_dtype = torch.float32 if has_weight else None
    others = (*other_dtypes(operator, torch.bfloat16), {})
    case = variant.at(like._replace(weight_dtype=weight_dtype), others[0])
    every = case.results(device)
    for mask in operator.masks():
        before, targets = case.targets(device), case.targets(device)
        operator.out(**case.arguments(device), output_mask=mask, **targets)
        wanted = [gradient if is_wanted else None for is_wanted, gradient in zip(mask, every, strict=True)]
        assert_same_bits(case.results(device, output_mask=mask), wanted, mask)
        expected = [b if w is None else w for w, b in zip(wanted, before.values(), strict=True)]
        assert_same_bits(targets.values(), expected, mask)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_grad_weight_of_float64_is_rounded_once(dtype: torch.dtype, device: str, runs_cpu_kernels: bool) -> None:
    """It is not rounded to float32 first: no neighbouring value is nearer to the float64 sum."""
    if device == "cpu" and not runs_cpu_kernels:
        pytest.skip("torch converts what Triton has summed")
    wide = torch.float64
    for seed in range(0, 30, 2):
        x, dy = (cases.values((3, 9000), wide, seed + i, 1.0).to(device) for i in (0, 1))
        exact, rounded = (
            torch.ops.normops.rms_norm_backward(dy, x, [9000], torch.ones(9000, dtype=d, device=device))[1]
            for d in (wide, dtype)
        )
        bits = rounded.view(torch.int16)
        near = torch.stack([(bits + i).view(dtype).to(wide) for i in (-1, 0, 1)])
        distances = (near - exact).abs()
        assert (distances[1] <= distances.amin(0) + 1e-15 * exact.abs()).all(), seed


def test_small_terms_are_not_lost_in_a_large_sum(device: str, runs_cpu_kernels: bool) -> None:
    """A small term that is added to the large term by itself is lost, as in chunks of sqrt(rows) rows."""
    if not runs_cpu_kernels:
        pytest.skip("only the CPU kernels sum along a tree")
    rows, cols = 256 * 256, 16
    dy = torch.full((256, 256, cols), 2.0**-24)
    dy[:, 0] = 1.0
    chunks = torch.zeros(256, cols)
    for terms in dy.unbind(1):
        chunks += terms
    arguments = dy.view(rows, cols), torch.ones(rows, cols), (cols,), torch.ones(cols), 0.0
    expected = oracle.rms_norm_backward(*arguments).grad_weight
    assert expected is not None
    assert oracle.violation(sum(chunks.unbind(), torch.zeros(cols)), expected) is not None
    oracle.assert_within(torch.ops.normops.rms_norm_backward(*arguments)[1], expected)


SPECIALS = [(variant, where) for variant in variants() for where in ("input", *variant.operator.tensors)]


@pairwise
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("variant", "where"), SPECIALS, ids=str)
@pytest.mark.triton_release
def test_specials_affect_only_their_row_and_grad_weight(
    variant: Variant, where: str, dtype: torch.dtype, special: float, device: str
) -> None:
    case = variant.at(Case((9, 70), dtype, weight_dtype=torch.float32, has_residual=True))
    arguments = case.arguments()
    row = arguments[where].view(9, -1)[4]
    row[min(66, len(row) - 1)] = special
    results = variant.operator.call(**moved(device, arguments))
    others = torch.arange(9) != 4
    assert_within(results, case.expected(arguments), accepts_infinite_bounds=True)
    for name, result in zip(variant.operator.outputs, results, strict=True):
        if name != "grad_weight":
            assert result[others].isfinite().all()
        elif where in ("input", "grad_output"):
            assert not result.isfinite().all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("variant", variants(), ids=str)
@pytest.mark.triton_release
def test_zero_rows_give_zeros_and_finite_gradients(variant: Variant, dtype: torch.dtype, device: str) -> None:
    case = variant.at(Case((3, 50), dtype, weight_dtype=dtype, eps=1e-6))
    zeros = torch.zeros(3, 50, dtype=dtype, device=device)
    added = {name: zeros for name in ("residual",) if name in variant.operator.tensors}
    for name, result in zip(variant.operator.outputs, case.results(device, input=zeros, **added), strict=True):
        if result is not None:
            assert (result.isfinite() if name == "grad_input" else result == 0).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [3, 64, 1000])
@pytest.mark.triton_release
def test_negative_eps_decides_by_the_sum_under_the_root(cols: int, dtype: torch.dtype, device: str) -> None:
    """With a negative eps, the sum under the root may be positive, negative or 0."""
    x = torch.tensor([1.0, 0.25, 0.5]).to(device, dtype).unsqueeze(1).expand(3, cols)
    y = ops.rms_norm(x, [cols], None, -0.25)
    grad, *_ = ops.rms_norm_backward(torch.ones_like(x), x, [cols], None, -0.25)
    torch.testing.assert_close(y[0], torch.full_like(y[0], 1 / math.sqrt(0.75)))
    assert grad[0].isfinite().all()
    assert y[1].isnan().all()
    assert grad[1].isnan().all()
    assert y[2].isposinf().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.triton_release
def test_halves_convert_exactly_and_numbers_round_to_nearest_even(dtype: torch.dtype, device: str) -> None:
    """A row of ones normalizes to ones, so the output is the weight, which torch's own conversion rounds, too."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = halves.float().view(torch.int32)
    ties = exact + (0x1000 if dtype == torch.float16 else 0x8000)
    numbers = torch.cat([bits, exact, ties, ties - 1, ties + 1]).view(torch.float32)
    for weight, output_dtype in ((halves, torch.float32), (numbers, dtype)):
        weight = weight[weight.isfinite()]
        ones = torch.ones(weight.numel(), dtype=output_dtype, device=device)
        output = ops.rms_norm(ones, (weight.numel(),), on(device, weight), 0.0)
        assert same_bits(output.cpu(), weight.to(output_dtype))


@pytest.mark.parametrize("dtype", [*HALVES, *marked(pytest.mark.full, (torch.float32, torch.float64))], ids=str)
@pytest.mark.parametrize("variant", variants(), ids=str)
@pytest.mark.triton_release
def test_nan_of_any_payload_stays_nan(
    variant: Variant, dtype: torch.dtype, device: str, runs_cpu_kernels: bool
) -> None:
    """Rounding must not carry a payload into the exponent, for any source and dtype of the NaN."""
    operator, shapes = variant.operator, [(9, 70), (9, 2100)] if runs_cpu_kernels else [(9, 70)]
    of_others = cycle([{}, *other_dtypes(operator, dtype)])
    for index, (weight_dtype, dtypes) in enumerate(zip(cases.DTYPES, of_others, strict=False)):
        shape = shapes[index // 2 % len(shapes)]
        case = variant.at(Case(shape, dtype, weight_dtype=weight_dtype, has_residual=True), dtypes)
        for arguments in case.with_nans():
            results = operator.call(**moved(device, arguments))
            with np.errstate(invalid="ignore"):
                expected = case.expected(arguments)
            for name, result, bounded in zip(operator.outputs, results, expected, strict=True):
                oracle.assert_same_nans(result.cpu(), bounded, f"{name} of {case}")


@pytest.mark.parametrize("name", ["weight_offset", "alpha"])
@pytest.mark.triton
def test_number_arguments_may_be_nan_of_any_payload(name: str, device: str) -> None:
    x = torch.ones(2, 70, dtype=torch.bfloat16, device=device)
    (number,) = struct.unpack("<d", b"\xff" * 7 + b"\x7f")
    output, _ = ops.add_rms_norm(x, x, (70,), x[0], **{name: number})
    assert output.isnan().all()
