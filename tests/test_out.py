"""Writing into the caller's memory: .out overloads, aliasing, ggml's report."""

from functools import partial

import pytest
import torch
from torch import Tensor

from reference import cases, oracle
from reference.cases import CASES, EPS, Case, on

ops = torch.ops.normops

# ggml's rms_norm_back returned -3.9976 for the first element when the output shared a buffer with an input (ggml#1491).
GGML_INPUT = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
GGML_EPS = 1e-4


def check_ggml(grad_input: Tensor) -> None:
    oracle.assert_within(
        grad_input, oracle.rms_norm_backward(GGML_INPUT, GGML_INPUT, (4,), None, GGML_EPS).grad_input, "grad_input"
    )
    torch.testing.assert_close(grad_input.cpu(), torch.tensor([[0.000799, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_ggml_report_through_autograd(mode: str, device: str) -> None:
    torch._dynamo.reset()

    def norm(x: Tensor) -> Tensor:
        return ops.rms_norm(x, [4], None, GGML_EPS)

    call = norm if mode == "eager" else torch.compile(norm, fullgraph=True)
    x = GGML_INPUT.to(device, copy=True).requires_grad_()
    call(x).backward(GGML_INPUT.to(device))
    assert x.grad is not None
    check_ggml(x.grad)


@pytest.mark.parametrize("over", ["grad_output", "input", "both", "neither"])
def test_ggml_report_through_out(over: str, device: str) -> None:
    x = GGML_INPUT.to(device).clone()
    dy = x if over == "both" else GGML_INPUT.to(device).clone()
    grad_input = {"grad_output": dy, "input": x, "both": x, "neither": torch.empty_like(x)}[over]
    unused = torch.empty(4, device=device)
    result = ops.rms_norm_backward.out(dy, x, [4], None, GGML_EPS, grad_input=grad_input, grad_weight=unused)
    assert result[0] is grad_input
    check_ggml(grad_input)


OUT_CASES = [case for case in CASES if case.dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("case", OUT_CASES, ids=str)
def test_out_is_the_functional_result(case: Case, device: str) -> None:
    """The targets take every layout that an output can have."""
    grad_output, input = on(device, case.grad_output()), on(device, case.input())
    weight, grad_residual = on(device, case.weight()), on(device, case.grad_residual())
    shape, keywords = case.normalized_shape, {"weight_offset": case.weight_offset}
    layout = cases.contiguous if case.layout in (cases.expanded, cases.expanded_scalar) else case.layout
    out = on(device, layout(case.shape, case.dtype, 5))
    assert ops.rms_norm.out(input, shape, weight, case.eps, **keywords, out=out) is out
    assert out is not None
    assert torch.equal(out, ops.rms_norm(input, shape, weight, case.eps, **keywords))

    grad_input = on(device, layout(case.shape, case.dtype, 6))
    grad_weight = torch.full_like(weight, torch.nan) if weight is not None else torch.empty(0, device=device)
    ops.rms_norm_backward.out(
        grad_output,
        input,
        shape,
        weight,
        case.eps,
        **keywords,
        grad_residual=grad_residual,
        grad_input=grad_input,
        grad_weight=grad_weight,
    )
    expected = ops.rms_norm_backward(
        grad_output, input, shape, weight, case.eps, **keywords, grad_residual=grad_residual
    )
    assert grad_input is not None
    assert torch.equal(grad_input, expected[0])
    if weight is not None:
        assert torch.equal(grad_weight, expected[1])


@pytest.mark.parametrize("layout", [cases.contiguous, cases.qkv_slice, cases.misaligned, cases.transposed_columns])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [5, 64, 100])
def test_exact_aliasing(cols: int, dtype: torch.dtype, layout: cases.Layout, device: str) -> None:
    case = Case(
        (2, 3, 2, cols), dtype, weight_dtype=torch.float32, layout=layout, grad_layout=layout, has_residual=True
    )
    weight = on(device, case.weight())

    def tensors() -> dict[str, Tensor]:
        made = {"grad_output": case.grad_output(), "input": case.input(), "grad_residual": case.grad_residual()}
        return {name: moved for name, tensor in made.items() if (moved := on(device, tensor)) is not None}

    def fresh_backward(residual: Tensor | None) -> tuple[Tensor, Tensor]:
        t = tensors()
        gradients: tuple[Tensor, Tensor] = ops.rms_norm_backward(
            t["grad_output"], t["input"], [cols], weight, EPS, grad_residual=residual
        )
        return gradients

    t = tensors()
    expected = ops.rms_norm(t["input"], [cols], weight, EPS)
    assert torch.equal(ops.rms_norm.out(t["input"], [cols], weight, EPS, out=t["input"]), expected)

    for over in ("grad_output", "input", "grad_residual"):
        t = tensors()
        grad_weight = torch.empty(cols, device=device)
        grad_input, _ = ops.rms_norm_backward.out(
            t["grad_output"],
            t["input"],
            [cols],
            weight,
            EPS,
            grad_residual=t["grad_residual"],
            grad_input=t[over],
            grad_weight=grad_weight,
        )
        expected_input, expected_weight = fresh_backward(tensors()["grad_residual"])
        assert torch.equal(grad_input, expected_input), over
        assert torch.equal(grad_weight, expected_weight), over


@pytest.mark.parametrize("cols", [64, 70, 40000])
@pytest.mark.parametrize("over", ["grad_output", "input", "weight", "grad_residual"])
def test_exact_aliasing_of_a_single_row_with_a_vector(over: str, cols: int, device: str) -> None:
    """Where there is one row, the weight has the shape of the output, and grad_weight that of every input."""
    case = Case((cols,), torch.float32, weight_dtype=torch.float32, has_residual=True)
    made = {"grad_output": case.grad_output(), "input": case.input(), "grad_residual": case.grad_residual()}
    made["weight"] = case.weight()

    def tensors() -> dict[str, Tensor]:
        return {name: tensor.to(device, copy=True) for name, tensor in made.items() if tensor is not None}

    def gradients(t: dict[str, Tensor], **targets: Tensor) -> tuple[Tensor, Tensor]:
        operator = ops.rms_norm_backward.out if targets else ops.rms_norm_backward
        return operator(
            t["grad_output"], t["input"], [cols], t["weight"], EPS, grad_residual=t["grad_residual"], **targets
        )

    t = tensors()
    expected = ops.rms_norm(t["input"], [cols], t["weight"], EPS)
    expected_gradients = gradients(t)
    if over in ("input", "weight"):
        assert torch.equal(ops.rms_norm.out(t["input"], [cols], t["weight"], EPS, out=t[over]), expected)
    for target, other in (("grad_input", "grad_weight"), ("grad_weight", "grad_input")):
        t = tensors()
        results = gradients(t, **{target: t[over], other: torch.empty_like(t["weight"])})
        for actual, reference in zip(results, expected_gradients, strict=True):
            assert torch.equal(actual, reference)


def refused(memory: Tensor, input: Tensor, out: Tensor) -> bool:
    try:
        ops.rms_norm.out(input, [input.shape[-1]], None, EPS, out=out)
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        assert first_line == (
            "rms_norm: expected out to be exactly input or to share no memory with it, but got a partial overlap"
        )
        return True
    return False


def test_partial_overlap_is_refused_and_interleaving_is_not(device: str) -> None:
    flat = torch.ones(200, device=device)
    assert refused(flat, flat[:64].view(4, 16), flat[1:65].view(4, 16))
    assert refused(flat, flat[:64].view(4, 16), flat[63:127].view(4, 16))
    assert not refused(flat, flat[:64].view(4, 16), flat[64:128].view(4, 16))
    assert refused(flat, flat[:64].view(4, 16), flat[:64].view(16, 4).t())

    rows = torch.ones(5, 40, device=device)
    assert refused(rows, rows[:, :16], rows[:, 8:24])
    assert refused(rows, rows[:, :16], rows[:, 15:31])
    assert not refused(rows, rows[:, :16], rows[:, 16:32])
    assert not refused(rows, rows[:, 24:], rows[:, :16])
    assert refused(rows, rows[:4, :16], rows[1:, :16])
    assert refused(rows, rows[:4, 1:17], rows[1:, :16])
    assert not refused(rows, rows[:4, 24:40], rows[1:, :16])

    qkv = torch.ones(2, 3, 3, 4, 8, device=device)
    assert not refused(qkv, qkv[:, :, 0], qkv[:, :, 2])
    assert not refused(qkv, qkv[:, :, 1], qkv[:, :, 1])


def test_overlap_decides_as_a_brute_force_does() -> None:
    """Against the sets of addresses, over views with equal strides of one buffer."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.ones(400)
    decided = {True: 0, False: 0}
    for _ in range(500):
        rows, cols, gap, shift = (int(torch.randint(1, high, (1,), generator=generator)) for high in (6, 12, 24, 120))
        strides = (cols + gap, 1)
        input = memory.as_strided((rows, cols), strides, 0)
        out = memory.as_strided((rows, cols), strides, shift)
        addresses = {r * strides[0] + c for r in range(rows) for c in range(cols)}
        overlaps = bool(addresses & {shift + a for a in addresses})
        assert refused(memory, input, out) == overlaps, (rows, cols, strides, shift)
        decided[overlaps] += 1
    assert min(decided.values()) > 50


def test_targets_are_checked(device: str) -> None:
    x, w = torch.ones(3, 4, device=device), torch.ones(4, device=device)

    def message(**keywords: Tensor) -> str:
        op = ops.rms_norm.out if "out" in keywords else partial(ops.rms_norm_backward.out, x)
        with pytest.raises(RuntimeError) as raised:
            op(x, [4], w, **keywords)
        return str(raised.value).splitlines()[0]

    other = "meta"
    assert message(out=torch.empty(3, 5, device=device)) == (
        "rms_norm: expected out to have shape [3, 4], the shape of the result, but got [3, 5]"
    )
    assert message(out=torch.empty(3, 4, dtype=torch.float64, device=device)) == (
        "rms_norm: expected out to be float32, but got float64"
    )
    assert message(out=torch.empty(3, 4, device=other)) == (
        f"rms_norm: expected out to be on {x.device}, the device of input, but got {other}"
    )
    assert message(out=torch.empty(1, 4, device=device).expand(3, 4)) == (
        "rms_norm: expected out to have an element of memory for each of its own, but got an expanded tensor with "
        "strides [0, 1]"
    )
    assert message(grad_input=torch.empty(3, 5, device=device), grad_weight=torch.empty_like(w)) == (
        "rms_norm_backward: expected grad_input to have shape [3, 4], the shape of the result, but got [3, 5]"
    )
    assert message(grad_input=torch.empty_like(x), grad_weight=torch.empty(3, device=device)) == (
        "rms_norm_backward: expected grad_weight to have shape [4], the shape of the result, but got [3]"
    )
    shared = torch.empty(3, 4, device=device)
    assert message(grad_input=shared, grad_weight=shared[1]) == (
        "rms_norm_backward: expected grad_input and grad_weight to share no memory, but got an overlap"
    )
    assert message(grad_input=torch.empty_like(x), grad_weight=x[0]) == (
        "rms_norm_backward: expected grad_weight to be exactly grad_output or to share no memory with it, "
        "but got a partial overlap"
    )


def test_out_refuses_gradients_and_bumps_the_version(device: str) -> None:
    x = torch.ones(3, 4, device=device, requires_grad=True)
    out = torch.empty(3, 4, device=device)
    with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
        ops.rms_norm.out(x, [4], out=out)
    version = out._version
    with torch.no_grad():
        ops.rms_norm.out(x, [4], out=out)
    assert out._version == version + 1
