"""add_rms_norm into the caller's memory: .out, in place, aliasing."""

from functools import partial

import pytest
import torch
from add_cases import ADD_CASES, AddCase, problem, targets_of
from assertions import message_of, same_bits
from torch import Tensor
from traced_graphs import operators, trace

import normops
from reference import cases
from reference.cases import EPS, HALVES, Case, on

ops = torch.ops.normops


@pytest.mark.parametrize("add_case", [c for c in ADD_CASES if c.case.dtype == torch.bfloat16], ids=str)
def test_out_is_the_functional_result(add_case: AddCase, device: str) -> None:
    case = add_case.case
    arguments = (on(device, case.input()), on(device, add_case.residual()), case.normalized_shape)
    weight = on(device, case.weight())
    targets = targets_of(case, case.dtype, add_case.residual_dtype, device)
    results = ops.add_rms_norm.out(*arguments, weight, case.eps, weight_offset=case.weight_offset, **targets)
    assert results[0] is targets["out"]
    assert results[1] is targets["residual_out"]
    expected = ops.add_rms_norm(*arguments, weight, case.eps, weight_offset=case.weight_offset)
    for actual, reference in zip(results, expected, strict=True):
        assert same_bits(actual, reference)


ALIASES = (
    {"out": "input", "residual_out": "residual"},
    {"out": "residual", "residual_out": "input"},
    {"out": "input"},
    {"out": "residual"},
    {"residual_out": "input"},
    {"residual_out": "residual"},
)


@pytest.mark.parametrize("layout", [cases.contiguous, cases.qkv_slice, cases.misaligned, cases.transposed_columns])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [5, 64, 100, 40000])
def test_exact_aliasing(cols: int, dtype: torch.dtype, layout: cases.Layout, device: str) -> None:
    case = Case((2, 3, 2, cols) if cols < 1000 else (1, 1, 2, cols), dtype, 1, dtype, layout=layout, grad_layout=layout)
    weight = on(device, case.weight())
    for residual_dtype in (dtype, torch.float32) if dtype in HALVES else (dtype,):
        add_case = AddCase(case, residual_dtype)

        def tensors(add_case: AddCase = add_case) -> dict[str, Tensor]:
            made = {"input": add_case.case.input(), "residual": add_case.residual()}
            return {name: moved for name, tensor in made.items() if (moved := on(device, tensor)) is not None}

        dtypes = {"out": dtype, "input": dtype, "residual": residual_dtype, "residual_out": residual_dtype}
        t = tensors()
        expected = ops.add_rms_norm(t["input"], t["residual"], [cols], weight, EPS)
        for aliases in ALIASES:
            t = tensors()
            if any(dtypes[target] != dtypes[source] for target, source in aliases.items()):
                continue
            new = targets_of(case, dtype, residual_dtype, device)
            targets = {name: t[aliases[name]] if name in aliases else new[name] for name in new}
            results = ops.add_rms_norm.out(t["input"], t["residual"], [cols], weight, EPS, **targets)
            for actual, reference in zip(results, expected, strict=True):
                assert same_bits(actual, reference), aliases
        t = tensors()
        assert ops.add_rms_norm_(t["input"], t["residual"], [cols], weight, EPS) is None
        for actual, reference in zip((t["input"], t["residual"]), expected, strict=True):
            assert same_bits(actual, reference)


@pytest.mark.parametrize("cols", [64, 100, 40000])
def test_a_weight_may_be_written_over_by_the_output_alone(cols: int, device: str) -> None:
    """Where there is one row, the weight has the shape of the outputs."""
    x, residual, w = problem((cols,), torch.float32, device)
    expected = ops.add_rms_norm(x, residual, (cols,), w, EPS)
    with pytest.raises(RuntimeError, match="expected residual_out and weight to share no memory, but got an overlap"):
        ops.add_rms_norm.out(x, residual, (cols,), w, EPS, out=torch.empty_like(x), residual_out=w)
    with pytest.raises(RuntimeError, match="expected residual and weight to share no memory, but got an overlap"):
        ops.add_rms_norm_(x, w, (cols,), w, EPS)
    results = ops.add_rms_norm.out(x, residual, (cols,), w, EPS, out=w, residual_out=torch.empty_like(x))
    for actual, reference in zip(results, expected, strict=True):
        assert same_bits(actual, reference)

    x, residual, w = problem((cols,), torch.float32, device)
    expected = ops.add_rms_norm(w, residual, (cols,), w, EPS)
    ops.add_rms_norm_(w, residual, (cols,), w, EPS)  # the input is the weight
    for actual, reference in zip((w, residual), expected, strict=True):
        assert same_bits(actual, reference)


def test_ggml_report(device: str) -> None:
    """ggml's rms_norm_back was wrong where its output shared memory with an input (ggml#1491)."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=device)
    zero = torch.zeros_like(x)
    leaf = x.clone().requires_grad_()
    normops.add_rms_norm(leaf, zero, 4, eps=1e-4)[0].backward(x)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), torch.tensor([[0.000799, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)
    expected = ops.add_rms_norm(x, zero, (4,), None, 1e-4)
    for out, residual_out in ((x, zero), (zero, x)):
        a, b = x.clone(), zero.clone()
        targets = {"out": a if out is x else b, "residual_out": a if residual_out is x else b}
        for actual, reference in zip(ops.add_rms_norm.out(a, b, (4,), None, 1e-4, **targets), expected, strict=True):
            assert same_bits(actual, reference)


@pytest.mark.parametrize("inplace", [True, False])
def test_operators_that_write_compile_to_the_functional_operator(inplace: bool, device: str) -> None:
    def add_norm(x: Tensor, residual: Tensor, out: Tensor, residual_out: Tensor) -> Tensor:
        if inplace:
            normops.add_rms_norm_(x, residual, 8, None, 1e-5)
            return x + residual
        torch.ops.normops.add_rms_norm.out(x, residual, [8], None, 1e-5, out=out, residual_out=residual_out)
        return out + residual_out

    def arguments() -> list[Tensor]:
        x, residual, _ = problem((4, 8), torch.float32, device)
        return [x, residual, torch.zeros_like(x), torch.zeros_like(x)]

    torch._dynamo.reset()
    eager, compiled = arguments(), arguments()
    expected = add_norm(*eager)
    assert same_bits(torch.compile(add_norm, fullgraph=True)(*compiled), expected)
    for actual, reference in zip(compiled, eager, strict=True):
        assert same_bits(actual, reference)
    assert operators(trace(add_norm, *arguments()).forward)[:1] == ["normops.add_rms_norm.default"]


def test_targets_are_checked(device: str) -> None:
    x, residual, w = problem((3, 4), torch.float32, device)

    def message(**changes: Tensor) -> str:
        targets = {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)} | changes
        return message_of(lambda: ops.add_rms_norm.out(x, residual, [4], w, **targets))

    shared = torch.empty_like(x)
    assert message(out=shared, residual_out=shared) == (
        "add_rms_norm: expected out and residual_out to share no memory, but got an overlap"
    )
    memory = torch.ones(20, device=device)
    x = memory[:12].view(3, 4)
    assert message(residual_out=memory[1:13].view(3, 4)) == (
        "add_rms_norm: expected residual_out to be exactly input or to share no memory with it, "
        "but got a partial overlap"
    )
    assert message(residual_out=torch.empty(3, 4, dtype=torch.bfloat16, device=device)) == (
        "add_rms_norm: expected residual_out to be float32, but got bfloat16"
    )
    assert message_of(lambda: ops.add_rms_norm_(x, x, [4])) == (
        "add_rms_norm_: expected input and residual to share no memory, but got an overlap"
    )
    assert message_of(lambda: ops.add_rms_norm_(x, residual[:1].expand(3, 4), [4])) == (
        "add_rms_norm_: expected residual to have an element of memory for each of its own, but got an expanded tensor "
        "with strides [0, 1]"
    )


def test_operators_that_write_refuse_gradients_and_bump_the_version(device: str) -> None:
    x, residual, _ = problem((3, 4), torch.float32, device)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    x.requires_grad_()
    refusal = (
        "expected no argument to require a gradient, as an operator that writes into its arguments does not support "
        "automatic differentiation, but got one that does; call it under torch.no_grad()"
    )
    write = partial(ops.add_rms_norm.out, out=out, residual_out=residual_out)
    assert message_of(lambda: write(x, residual, [4])) == f"add_rms_norm: {refusal}"
    assert message_of(lambda: normops.add_rms_norm_(residual, x, 4)) == f"add_rms_norm_: {refusal}"
    versions = [t._version for t in (x, residual, out, residual_out)]
    with torch.no_grad():
        write(x, residual, [4])
        normops.add_rms_norm_(x, residual, 4)
    assert [t._version for t in (x, residual, out, residual_out)] == [version + 1 for version in versions]
