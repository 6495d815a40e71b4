""".out overloads write into the caller's memory, which may alias inputs, also in the case that ggml reported."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from assertions import assert_same_bits, message_of
from sampling import pairwise
from torch import Tensor
from traced_graphs import operators, trace

from reference import cases, oracle
from reference.cases import EPS, Case
from reference.operators import (
    OPERATORS,
    Operator,
    OperatorCase,
    Variant,
    of_argument,
    other_dtypes,
    variants,
)

ops = torch.ops.normops

# ggml's rms_norm_back returned -3.9976 for the first element when the output shared a buffer with an input (ggml#1491).
GGML_INPUT = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
GGML_EPS = 1e-4


@pytest.mark.parametrize("over", ["grad_output", "input", "both", "neither"])
def test_aliasing_as_in_ggml_report_is_correct(over: str, device: str) -> None:
    x = GGML_INPUT.to(device).clone()
    dy = x if over == "both" else GGML_INPUT.to(device).clone()
    grad_input = {"grad_output": dy, "input": x, "both": x, "neither": torch.empty_like(x)}[over]
    result = ops.rms_norm_backward.out(dy, x, [4], None, GGML_EPS, grad_input=grad_input)
    assert result[0] is grad_input
    expected = oracle.rms_norm_backward(GGML_INPUT, GGML_INPUT, (4,), None, GGML_EPS).grad_input
    oracle.assert_within(grad_input, expected, "grad_input")
    torch.testing.assert_close(grad_input.cpu(), torch.tensor([[0.000799, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.has_mask], ids=str)
def test_masked_targets_are_not_needed_and_unchanged(operator: Operator, device: str) -> None:
    """Nor does their version change, and they may require a gradient."""
    case = rows_of_three(operator)
    arguments = case.arguments(device)
    for mask in operator.masks():
        expected, targets = case.results(device, output_mask=mask), case.targets(device)
        wanted = {name: targets[name] for name, value in zip(targets, expected, strict=True) if value is not None}
        for target, is_wanted in zip(targets.values(), mask, strict=True):
            target.requires_grad_(not is_wanted)
        versions = [target._version for target in targets.values()]
        operator.out(**arguments, output_mask=mask, **targets)
        assert [target._version for target in targets.values()] == [
            version + (name in wanted) for name, version in zip(targets, versions, strict=True)
        ]
        results = operator.out(**arguments, output_mask=mask, **wanted)
        assert_same_bits(results, expected, mask)
        assert all(result is wanted.get(name) for result, name in zip(results, targets, strict=True))


def test_masked_target_compiles() -> None:
    x, grad_output, weight = torch.randn(3, 4), torch.randn(3, 4), torch.ones(4)

    def write(grad_output: Tensor, x: Tensor, weight: Tensor, grad_weight: Tensor) -> Tensor:
        mask = [False, True, False]
        ops.rms_norm_backward.out(grad_output, x, [4], weight, EPS, output_mask=mask, grad_weight=grad_weight)
        return grad_weight + 1

    expected, actual = torch.empty(4), torch.empty(4)
    result = write(grad_output, x, weight, expected)
    assert_same_bits([torch.compile(write, fullgraph=True)(grad_output, x, weight, actual), actual], [result, expected])
    graph = trace(write, grad_output, x, weight, actual).forward
    assert operators(graph)[:1] == ["normops.rms_norm_backward.default"]


def of_rows(operator: Operator) -> list[str]:
    """Returns the targets with the shape of the input."""
    return [target for target in operator.targets if target not in operator.sums and of_argument(target) != "weight"]


def places(case: OperatorCase) -> Iterator[dict[str, str]]:
    """Yields all assignments of targets to different inputs of the same shape and dtype; a target may have no input."""
    operator, arguments = case.operator, case.arguments()
    alike = {name: (t.shape, t.dtype) for name, t in arguments.items() if isinstance(t, Tensor)}
    wide = {target: of_argument(target) for target in of_rows(operator)}
    choices = [(None, *(name for name in alike if alike[name] == alike[like])) for like in wide.values()]
    for chosen in product(*choices):
        taken = [name for name in chosen if name is not None]
        if len(set(taken)) == len(taken):
            yield {target: name for target, name in zip(wide, chosen, strict=True) if name is not None}


def write_over(case: OperatorCase, over: Mapping[str, str], device: str) -> tuple[Any, ...]:
    """Calls .out with some targets that alias inputs."""
    arguments = case.arguments(device)
    targets = case.targets(device) | {target: arguments[name] for target, name in over.items()}
    return case.operator.results(case.operator.out(**arguments, **targets))


@pairwise
@pytest.mark.parametrize("layout", [cases.contiguous, cases.qkv_slice, cases.misaligned, cases.transposed_columns])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [5, 64, 100, 40000])
@pytest.mark.parametrize("variant", variants(), ids=str)
@pytest.mark.triton_release
def test_exact_aliasing(variant: Variant, cols: int, dtype: torch.dtype, layout: cases.Layout, device: str) -> None:
    """Tests all combinations of targets and inputs."""
    shape = (2, 3, 2, cols) if cols < 1000 else (1, 1, 2, cols)
    like = Case(shape, dtype, weight_dtype=torch.float32, layout=layout, grad_layout=layout, has_residual=True)
    for dtypes in ({}, *other_dtypes(variant.operator, dtype)[: cols == 100]):
        case = variant.at(like, dtypes)
        expected = case.results(device)
        for over in places(case):
            assert_same_bits(write_over(case, over, device), expected, over)


SINGLE_ROWS = [
    (variant, over)
    for variant in variants()
    for over in ("input", *variant.operator.tensors, "weight")
    if variant.shape_of(over, (64,)) == (64,)
]


@pytest.mark.parametrize("cols", [64, 70, 40000])
@pytest.mark.parametrize(("variant", "over"), SINGLE_ROWS, ids=str)
@pytest.mark.triton_release
def test_exact_aliasing_of_a_single_row_with_a_vector(variant: Variant, over: str, cols: int, device: str) -> None:
    """With one row, the weight has the shape of the output, and grad_weight the shape of every input."""
    operator = variant.operator
    case = variant.at(Case((cols,), torch.float32, weight_dtype=torch.float32, has_residual=True))
    expected = case.results(device)
    for target in [target for target in operator.targets if target not in operator.sums]:
        write = partial(write_over, case, {target: over}, device)
        if (target, over) in operator.never_over:
            shared = f"{operator}: expected {target} and {over} to share no memory, but got an overlap"
            assert message_of(write) == shared
        else:
            assert_same_bits(write(), expected, target)


def refused(input: Tensor, out: Tensor) -> bool:
    try:
        ops.rms_norm.out(input, [input.shape[-1]], None, EPS, out=out)
    except RuntimeError as error:
        return "expected out to be exactly input or to share no memory with it, but got a partial" in str(error)
    return False


def test_overlap_of_views_with_other_strides_and_more_dimensions(device: str) -> None:
    flat = torch.ones(64, device=device)
    assert refused(flat.view(4, 16), flat.view(16, 4).t())
    qkv = torch.ones(2, 3, 3, 4, 8, device=device)
    assert not refused(qkv[:, :, 0], qkv[:, :, 2])
    assert not refused(qkv[:, :, 1], qkv[:, :, 1])


def test_overlap_check_agrees_with_brute_force() -> None:
    """Compares with sets of addresses, for views of one buffer with equal strides."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.ones(400)
    decided = {True: 0, False: 0}
    for _ in range(500):
        lows, highs = (1, 1, 0, 1), (6, 12, 24, 120)
        rows, cols, gap, shift = (
            int(torch.randint(*of, (1,), generator=generator)) for of in zip(lows, highs, strict=True)
        )
        strides = (cols + gap, 1)
        input = memory.as_strided((rows, cols), strides, 0)
        out = memory.as_strided((rows, cols), strides, shift)
        addresses = {r * strides[0] + c for r in range(rows) for c in range(cols)}
        overlaps = bool(addresses & {shift + a for a in addresses})
        assert refused(input, out) == overlaps, (rows, cols, strides, shift)
        decided[overlaps] += 1
    assert min(decided.values()) > 50


def overlap_of(operator: Operator, target: str, name: str) -> str:
    """Returns the error message for a target that partially overlaps an input."""
    if (target, name) in operator.never_over:
        return f"{operator}: expected {target} and {name} to share no memory, but got an overlap"
    exact = f"to be exactly {name} or to share no memory with it, but got a partial overlap"
    return f"{operator}: expected {target} {exact}"


def rows_of_three(operator: Operator) -> OperatorCase:
    return Variant(operator, {}).at(Case((3, 4), torch.float32, weight_dtype=torch.float32, has_residual=True))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_invalid_targets_raise(operator: Operator, device: str) -> None:
    case = rows_of_three(operator)
    arguments, fresh = case.arguments(device), case.targets(device)

    def message(**targets: Tensor) -> str:
        return message_of(lambda: operator.out(**arguments, **fresh | targets))

    for name, target in fresh.items():
        shape = list(target.shape)
        others = {
            torch.empty(*shape[:-1], 5, device=device): f"to have shape {shape}, the shape of the result, but got "
            f"{[*shape[:-1], 5]}",
            torch.empty(shape, dtype=torch.float64, device=device): "to be float32, but got float64",
            torch.empty(shape, dtype=torch.bfloat16, device=device): "to be float32, but got bfloat16",
            torch.empty(shape, device="meta"): f"to be on {target.device}, the device of input, but got meta",
            torch.empty(1, device=device).expand(shape): "to have no expanded dimension, but got "
            f"strides {[0] * len(shape)}",
        }
        for other, expected in others.items():
            assert message(**{name: other}) == f"{operator}: expected {name} {expected}"
    shared = torch.empty(3, 4, device=device)
    names = list(fresh)
    for pair in ((a, b) for index, a in enumerate(names) for b in names[index + 1 :]):
        changes = {name: shared.view(-1)[: fresh[name].numel()].view_as(fresh[name]) for name in pair}
        expected = f"{operator}: expected {pair[0]} and {pair[1]} to share no memory, but got an overlap"
        assert message(**changes) == expected
        if operator.has_mask:  # targets of masked gradients are not checked
            mask = [name != pair[0] for name in names]
            operator.out(**arguments, **fresh | changes, output_mask=mask)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_overlap_with_any_input_raises(operator: Operator, device: str) -> None:
    case = rows_of_three(operator)
    fresh = case.targets(device)
    for target, name in product(fresh, operator.inputs):
        arguments = case.arguments(device)
        shape, memory = arguments[name].shape, torch.ones(20, device=device)
        arguments[name] = memory[: shape.numel()].view(shape)
        changed = memory[1 : 1 + fresh[target].numel()].view(fresh[target].shape)
        message = message_of(lambda: operator.out(**arguments, **fresh | {target: changed}))  # noqa: B023
        assert message == overlap_of(operator, target, name)


REFUSAL = (
    "expected no argument to require a gradient, as an operator that writes into its arguments does not support "
    "automatic differentiation, but got one that does; call it under torch.no_grad()"
)


WAYS = [
    (operator, way)
    for operator in OPERATORS
    for way in ("out", "out, over the input", "in place")
    if way != "in place" or operator.inplace
]


def writing(operator: Operator, way: str, device: str) -> tuple[Callable[..., object], dict[str, Any], list[str]]:
    """Returns a function that writes, its arguments, and the names of those that it writes to."""
    case = rows_of_three(operator)
    if way == "in place":
        return operator.inplace_function, case.arguments(device), [*operator.replaced]
    return operator.out, case.arguments(device) | case.targets(device), [*operator.targets]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(("operator", "way"), [each for each in WAYS if "over" not in each[1]], ids=str)
def test_writing_overloads_reject_gradients_and_bump_versions(
    operator: Operator, way: str, mode: Callable[[], AbstractContextManager[None]], device: str
) -> None:
    _, _, targets = writing(operator, way, device)
    for name in dict.fromkeys((*operator.inputs, *targets)):
        function, given, written = writing(operator, way, device)
        given[name].requires_grad_()
        write = partial(function, **given)
        assert message_of(write) == f"{operator}{'_' * (way == 'in place')}: {REFUSAL}"
        versions = {name: value._version for name, value in given.items() if isinstance(value, Tensor)}
        with mode():
            write()
        for other, version in versions.items():
            assert given[other]._version == version + (other in written)


@pytest.mark.parametrize(("operator", "way"), WAYS, ids=str)
def test_writing_overloads_compile_to_the_functional_operator(operator: Operator, way: str, device: str) -> None:
    function, arguments, written = writing(operator, way, device)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in arguments.items() if name not in names}
    over = next((t for t in written if of_argument(t) == "input"), None) if "over" in way else None

    def write(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        if over is not None:
            given[over] = given["input"]
        function(**given, **others)
        return sum(given[name].square().sum() for name in written)  # type: ignore[return-value]

    def tensors() -> list[Tensor]:
        _, given, _ = writing(operator, way, device)
        return [given[name] for name in names]

    torch._dynamo.reset()
    eager, compiled = tensors(), tensors()
    expected = write(*eager)
    torch.testing.assert_close(torch.compile(write, fullgraph=True)(*compiled), expected)
    assert_same_bits(compiled, eager)
    assert operators(trace(write, *tensors()).forward)[:1] == [f"normops.{operator}.default"]
