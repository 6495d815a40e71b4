"""Forward and backward are within the oracle's bounds of the definition, over every shape, dtype and layout."""

import math

import pytest
import torch

import normops
from reference import cases, oracle
from reference.cases import CASES, Case, on

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ops = torch.ops.normops


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, device: str) -> None:
    input, weight = case.input(), case.weight()
    arguments = (on(device, input), case.normalized_shape, on(device, weight), case.eps)
    output = ops.rms_norm(*arguments, weight_offset=case.weight_offset)
    assert output.dtype == input.dtype
    assert output.is_contiguous()
    oracle.assert_within(output, oracle.rms_norm(input, case.normalized_shape, weight, case.eps, case.weight_offset))
    direct = normops.rms_norm(*arguments, weight_offset=case.weight_offset)  # type: ignore[arg-type]
    assert torch.equal(direct.view(torch.uint8), output.view(torch.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, device: str) -> None:
    grad_output, input, weight, grad_residual = case.grad_output(), case.input(), case.weight(), case.grad_residual()
    grad_input, grad_weight = ops.rms_norm_backward(
        on(device, grad_output),
        on(device, input),
        case.normalized_shape,
        on(device, weight),
        case.eps,
        weight_offset=case.weight_offset,
        grad_residual=on(device, grad_residual),
    )
    expected = oracle.rms_norm_backward(
        grad_output, input, case.normalized_shape, weight, case.eps, case.weight_offset, grad_residual
    )
    assert grad_input.dtype == input.dtype
    assert grad_input.is_contiguous()
    oracle.assert_within(grad_input, expected.grad_input, "grad_input")
    if weight is None:
        assert grad_weight is None
    else:
        assert grad_weight.dtype == weight.dtype
        assert grad_weight.is_contiguous()
        assert expected.grad_weight is not None
        oracle.assert_within(grad_weight, expected.grad_weight, "grad_weight")


@pytest.mark.parametrize("output_mask", [(True, False), (False, True), (False, False)])
def test_masked_gradients_are_left_out(output_mask: tuple[bool, bool], device: str) -> None:
    case = Case((5, 77), torch.bfloat16, weight_dtype=torch.float32)
    arguments = (
        on(device, case.grad_output()),
        on(device, case.input()),
        case.normalized_shape,
        on(device, case.weight()),
    )
    both = ops.rms_norm_backward(*arguments, case.eps)
    masked = ops.rms_norm_backward(*arguments, case.eps, output_mask=output_mask)
    for wanted, gradient, reference in zip(output_mask, masked, both, strict=True):
        if wanted:
            assert torch.equal(gradient, reference)
        else:
            assert gradient is None


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["input", "grad_output"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_specials_poison_their_row_and_grad_weight_alone(
    special: float, where: str, dtype: torch.dtype, device: str
) -> None:
    case = Case((9, 70), dtype, weight_dtype=torch.float32)
    tensors = {"input": case.input(), "grad_output": case.grad_output()}
    tensors[where][4, 66] = special
    weight = case.weight()
    input, grad_output = on(device, tensors["input"]), on(device, tensors["grad_output"])
    output = ops.rms_norm(input, case.normalized_shape, on(device, weight), case.eps)
    grad_input, grad_weight = ops.rms_norm_backward(
        grad_output, input, case.normalized_shape, on(device, weight), case.eps
    )
    expected = oracle.rms_norm_backward(
        tensors["grad_output"], tensors["input"], case.normalized_shape, weight, case.eps
    )
    oracle.assert_within(output, oracle.rms_norm(tensors["input"], case.normalized_shape, weight, case.eps))
    oracle.assert_within(grad_input, expected.grad_input, "grad_input")
    assert expected.grad_weight is not None
    oracle.assert_within(grad_weight, expected.grad_weight, "grad_weight")
    others = [row for row in range(9) if row != 4]
    assert output[others].isfinite().all()
    assert grad_input[others].isfinite().all()
    assert not grad_weight.isfinite().all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_zero_rows_give_zeros_and_finite_gradients(dtype: torch.dtype, device: str) -> None:
    input = torch.zeros(3, 50, dtype=dtype, device=device)
    grad_output = on(device, cases.values((3, 50), dtype))
    weight = torch.ones(50, dtype=dtype, device=device)
    assert (ops.rms_norm(input, (50,), weight, 1e-6) == 0).all()
    grad_input, grad_weight = ops.rms_norm_backward(grad_output, input, (50,), weight, 1e-6)
    assert grad_input.isfinite().all()
    assert (grad_weight == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_converts_exactly(dtype: torch.dtype, device: str) -> None:
    """A row of ones normalizes to ones, so that the weight comes out: every half as a weight, and as an output."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, 1)
    finite = patterns[patterns.isfinite()].reshape(-1, 1)
    ones = torch.ones(1, finite.numel(), dtype=torch.float32, device=device)
    converted = ops.rms_norm(ones, (finite.numel(),), on(device, finite.reshape(-1)), 0.0)
    assert torch.equal(converted.cpu().reshape(-1, 1), finite.to(torch.float32))
    back = ops.rms_norm(ones.to(dtype), (finite.numel(),), on(device, finite.reshape(-1).float()), 0.0)
    assert torch.equal(back.cpu().reshape(-1, 1).view(torch.int16), finite.view(torch.int16))
    assert ops.rms_norm(on(device, patterns[patterns.isnan()].reshape(-1, 1)), (1,), None, 0.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_halves_is_to_nearest_even(dtype: torch.dtype, device: str) -> None:
    """float32 weights, scaled by exactly 1, come out as torch's own conversion rounds them."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    ties = halves.float().view(torch.int32) + (0x1000 if dtype == torch.float16 else 0x8000)
    numbers = torch.cat([bits, ties, ties - 1, ties + 1]).view(torch.float32)
    numbers = numbers[numbers.isfinite()]
    ones = torch.ones(numbers.numel(), dtype=dtype, device=device)
    output = ops.rms_norm(ones, (numbers.numel(),), on(device, numbers), 0.0)
    assert torch.equal(output.cpu(), numbers.to(dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("where", ["weight", "input", "grad_output"])
def test_a_nan_of_any_payload_stays_one(where: str, dtype: torch.dtype, device: str) -> None:
    """Rounding must not carry a payload into the exponent, wherever the NaN comes from and whatever it is stored in."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    payloads = bits.view(torch.float32)
    # The payloads are float32's; what they meet has `dtype`.
    weight_dtype, row_dtype = (torch.float32, dtype) if where == "weight" else (dtype, torch.float32)
    t = {name: torch.ones(4, dtype=row_dtype, device=device) for name in ("input", "grad_output")}
    t["weight"] = torch.ones(4, dtype=weight_dtype, device=device)
    for index in range(4):
        t[where] = torch.where(torch.arange(4) == index, payloads, torch.ones(4)).to(device)
        output = ops.rms_norm(t["input"], (4,), t["weight"], 0.0)
        grad_input, grad_weight = ops.rms_norm_backward(t["grad_output"], t["input"], (4,), t["weight"], 0.0)
        if where != "grad_output":
            assert output[index].isnan()
        assert grad_input.isnan().all()
        if where != "weight":
            assert grad_weight[index].isnan()
