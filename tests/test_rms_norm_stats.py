"""rms_norm in two steps, around the sum of squares: rms_norm_stats, rms_norm_from_stats and their backwards."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_same_bits, message_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import normops
from reference import cases, oracle
from reference.cases import CASES, EPS, Case
from reference.operators import CASTINGS

ops = torch.ops.normops

SOME = [case for case in CASES[::5] if math.prod(case.shape)] + [
    Case((3, 5000), torch.bfloat16, weight_dtype=torch.float32),
    Case((2, 40000), torch.float32, weight_dtype=torch.float32),
    Case((6, 4, 100), torch.float16, weight_dtype=torch.float16, group_dims=1),
]


def of_norm(case: Case, **flags: object) -> dict[str, Any]:
    return {
        "normalized_shape": case.normalized_shape,
        "weight": case.weight(),
        "eps": case.eps,
        "weight_offset": case.weight_offset,
        **flags,
    }


def size_of(case: Case) -> int:
    return math.prod(case.normalized_shape)


@pytest.mark.parametrize("flags", CASTINGS, ids=lambda flags: flags["casting_mode"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_with_nothing_in_between_the_bits_are_those_of_the_norm(
    case: Case, flags: dict[str, str], device: str, serves_cpu: bool
) -> None:
    x, dy = case.input().to(device), case.grad_output().to(device)
    norm = of_norm(case, **flags)
    norm["weight"] = None if norm["weight"] is None else norm["weight"].to(device)
    square_sum = ops.rms_norm_stats(x, case.normalized_shape)
    assert_same_bits([ops.rms_norm_from_stats(x, square_sum, size_of(case), **norm)], [ops.rms_norm(x, **norm)])
    sums = ops.rms_norm_backward_stats(dy, x, **norm)
    if serves_cpu:
        assert_same_bits([sums[0]], [square_sum])
    else:  # in another order, where the backward does not hold a row as the norm does
        torch.testing.assert_close(sums[0], square_sum)
    expected = ops.rms_norm_backward(dy, x, **norm)
    for mask in ((True, True), (True, False), (False, True)):
        gradients = ops.rms_norm_backward_from_stats(dy, x, *sums, size_of(case), **norm, output_mask=mask)
        for gradient, theirs, wanted in zip(gradients, expected, mask, strict=True):
            assert (gradient is None) == (theirs is None or not wanted)
            if gradient is not None:
                assert_same_bits([gradient], [theirs])
    residual = torch.randn_like(x)
    assert_same_bits(
        ops.rms_norm_backward_from_stats(dy, x, *sums, size_of(case), **norm, grad_residual=residual)[:1],
        ops.rms_norm_backward(dy, x, **norm, grad_residual=residual)[:1],
    )


def in_parts(
    tensors: tuple[Tensor, ...], weight: Tensor | None, parts: int
) -> list[tuple[tuple[Tensor, ...], Tensor | None]]:
    split = [t.tensor_split(parts, -1) for t in tensors]
    weights = weight.tensor_split(parts, -1) if weight is not None else [None] * parts
    return list(zip(zip(*split, strict=True), weights, strict=True))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [7, 64, 5000])
def test_parts_of_rows(cols: int, dtype: torch.dtype, device: str) -> None:
    """Uneven ones, whose sums are added up in between."""
    x, dy, w = (cases.values(shape, dtype, i).to(device) for i, shape in enumerate(((9, cols), (9, cols), (cols,))))
    parts = in_parts((x, dy), w, 3)
    square_sum = torch.stack([normops.rms_norm_stats(part, part.shape[-1]) for (part, _), _ in parts]).sum(0)
    y = [normops.rms_norm_from_stats(part, square_sum, cols, part.shape[-1], v, EPS) for (part, _), v in parts]
    oracle.assert_within(torch.cat(y, -1), oracle.rms_norm(x, (cols,), w, EPS))
    sums = [ops.rms_norm_backward_stats(grad, part, part.shape[-1:], v, EPS) for (part, grad), v in parts]
    total = [torch.stack(each).sum(0) for each in zip(*sums, strict=True)]
    gradients = [
        ops.rms_norm_backward_from_stats(grad, part, *total, cols, part.shape[-1:], v, EPS) for (part, grad), v in parts
    ]
    expected = oracle.rms_norm_backward(dy, x, (cols,), w, EPS)
    assert expected.grad_weight is not None
    for of_parts, bounded in zip(
        zip(*gradients, strict=True), (expected.grad_input, expected.grad_weight), strict=True
    ):
        oracle.assert_within(torch.cat(of_parts, -1), bounded)


def test_differentiable_in_everything(device: str) -> None:
    x, dy, w = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in ((3, 5), (3, 5), (5,))
    )
    square_sum = (torch.rand(3, dtype=torch.float64, device=device) + 1).requires_grad_()
    dot = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    residual = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    checks: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (lambda x: ops.rms_norm_stats(x, [5]), (x,)),
        (lambda x, s, w: ops.rms_norm_from_stats(x, s, 8, [5], w, EPS), (x, square_sum, w)),
        (lambda dy, x, w: ops.rms_norm_backward_stats(dy, x, [5], w, EPS), (dy, x, w)),
        (
            lambda dy, x, s, d, w, r: ops.rms_norm_backward_from_stats(
                dy, x, s, d, 8, [5], w, EPS, weight_offset=0.5, grad_residual=r
            ),
            (dy, x, square_sum, dot, w, residual),
        ),
    ]
    for function, inputs in checks:
        assert gradcheck(function, inputs, check_forward_ad=True)
        assert gradgradcheck(function, inputs)


def test_reduced_by_whoever_differentiates_through_it(device: str) -> None:
    """Two ranks in one process: the gradients are those of the norm."""
    x, w = cases.values((6, 40), torch.float64, 1).to(device), cases.values((40,), torch.float64, 2).to(device)
    x, w = x.requires_grad_(), w.requires_grad_()
    dy = cases.values((6, 40), torch.float64, 3).to(device)
    parts = in_parts((x,), w, 2)
    square_sum = torch.stack([normops.rms_norm_stats(part, 20) for (part,), _ in parts]).sum(0)
    y = torch.cat([normops.rms_norm_from_stats(part, square_sum, 40, 20, v) for (part,), v in parts], -1)
    torch.testing.assert_close(y, normops.rms_norm(x, 40, w))
    gradients = torch.autograd.grad(y, (x, w), dy)
    torch.testing.assert_close(gradients, torch.autograd.grad(normops.rms_norm(x, 40, w), (x, w), dy))


def test_compiles_to_the_operators(device: str) -> None:
    from traced_graphs import operators, trace

    def halves(x: Tensor, w: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        square_sum = normops.rms_norm_stats(left, 8) + normops.rms_norm_stats(right, 8)
        return normops.rms_norm_from_stats(left, square_sum, 16, 8, w)

    x, w = torch.randn(4, 16, device=device, requires_grad=True), torch.randn(8, device=device, requires_grad=True)
    graphs = trace(halves, x, w)
    assert [name for name in operators(graphs.forward) if "normops" in name] == [
        "normops.rms_norm_stats.default",
        "normops.rms_norm_stats.default",
        "normops.rms_norm_from_stats.default",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, s: ops.rms_norm_from_stats(x, s[:1], 8, [8]),
            "rms_norm_from_stats: expected square_sum to have shape [2], a number for each row of input, but got [1]",
        ),
        (
            lambda x, s: ops.rms_norm_from_stats(x, s.half(), 8, [8]),
            "rms_norm_from_stats: expected square_sum to be float32, in which bfloat16 is computed, but got float16",
        ),
        (
            lambda x, s: ops.rms_norm_from_stats(x, s, 7, [8]),
            "rms_norm_from_stats: expected size to be that of a whole row, at least the 8 elements of "
            "normalized_shape, but got 7",
        ),
        (
            lambda x, s: ops.rms_norm_backward_from_stats(x, x, s, s[:1], 8, [8]),
            "rms_norm_backward_from_stats: expected dot to have shape [2], a number for each row of input, but got [1]",
        ),
        (
            lambda x, s: ops.rms_norm_stats(x, [7]),
            "rms_norm_stats: expected normalized_shape to be the last dimensions of input, whose shape is [2, 8], but "
            "got [7]",
        ),
    ],
)
def test_errors(call: Callable[[Tensor, Tensor], object], message: str, device: str) -> None:
    x, square_sum = torch.ones(2, 8, dtype=torch.bfloat16, device=device), torch.ones(2, device=device)
    assert message_of(lambda: call(x, square_sum)) == message


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_nothing(shape: tuple[int, int], device: str) -> None:
    x, w = torch.ones(shape, device=device), torch.ones(shape[1], device=device)
    square_sum = ops.rms_norm_stats(x, [shape[1]])
    assert torch.equal(square_sum, torch.zeros(shape[0], device=device))
    assert ops.rms_norm_from_stats(x, square_sum, 8, [shape[1]], w).shape == shape
    sums = ops.rms_norm_backward_stats(x, x, [shape[1]], w)
    grad_input, grad_weight = ops.rms_norm_backward_from_stats(x, x, *sums, 8, [shape[1]], w)
    assert grad_input.shape == shape
    assert torch.equal(grad_weight, torch.zeros(shape[1], device=device))


def calls(device: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """The operators with arguments for them."""
    x, dy = (cases.values((3, 2, 10), dtype, i).to(device).requires_grad_() for i in range(2))
    norm = {"normalized_shape": [10], "weight": cases.values((2, 10), dtype, 2).to(device).requires_grad_(), "eps": EPS}
    square_sum = ops.rms_norm_stats(x.detach(), [10]) * 2
    dot = cases.values((3, 2), square_sum.dtype, 3).to(device)
    return {
        "rms_norm_stats": {"input": x, "normalized_shape": [10]},
        "rms_norm_from_stats": {"input": x, "square_sum": square_sum, "size": 20, **norm},
        "rms_norm_backward_stats": {"grad_output": dy, "input": x, **norm},
        "rms_norm_backward_from_stats": {
            "grad_output": dy, "input": x, "square_sum": square_sum, "dot": dot, "size": 20, **norm
        },
    }  # fmt: skip


NAMES = ("rms_norm_stats", "rms_norm_from_stats", "rms_norm_backward_stats", "rms_norm_backward_from_stats")
every_operator = pytest.mark.parametrize("name", NAMES)


def results(returned: Any) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def detached(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name: str, dtype: torch.dtype, device: str) -> None:
    torch.library.opcheck(getattr(ops, name).default, (), calls(device, dtype)[name])


@every_operator
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_writing_into_given_tensors(name: str, dtype: torch.dtype, device: str) -> None:
    """Of any strides, each of its own."""
    arguments = detached(calls(device, dtype)[name])
    expected = results(getattr(ops, name)(**arguments))
    written = [argument.name for argument in getattr(ops, name).out._schema.arguments if argument.alias_info]
    targets = [torch.empty(*t.shape, 2 + i, dtype=t.dtype, device=device)[..., 0] for i, t in enumerate(expected)]
    actual = results(getattr(ops, name).out(**arguments, **dict(zip(written, targets, strict=True))))
    assert all(a is t for a, t in zip(actual, targets, strict=True))
    assert_same_bits(targets, expected)


@every_operator
def test_strides_of_what_is_given_do_not_show(name: str, device: str) -> None:
    arguments = detached(calls(device)[name])
    strided = {
        key: value.repeat_interleave(3, 0)[::3] if isinstance(value, Tensor) else value
        for key, value in arguments.items()
    }
    if "square_sum" in strided:  # others than those of dot
        strided["square_sum"] = arguments["square_sum"].T.contiguous().T
    assert_same_bits(results(getattr(ops, name)(**strided)), results(getattr(ops, name)(**arguments)))


@every_operator
@pytest.mark.parametrize("with_weights", [False, True])
def test_vmap(name: str, with_weights: bool, device: str) -> None:
    """A call for all samples, which may have a weight each."""
    arguments = detached(calls(device)[name])
    tensors = [key for key, value in arguments.items() if isinstance(value, Tensor)]
    batched = [key for key in tensors if with_weights or key != "weight"]
    samples = {key: torch.stack([arguments[key], arguments[key] * 1.5, arguments[key] * 2]) for key in batched}

    def call(**of_sample: Tensor) -> Any:
        return getattr(ops, name)(**arguments | of_sample)

    together = results(torch.vmap(lambda *given: call(**dict(zip(batched, given, strict=True))))(*samples.values()))
    for i in range(3):
        alone = results(call(**{key: value[i] for key, value in samples.items()}))
        torch.testing.assert_close([value[i] for value in together], [*alone])


@every_operator
def test_sequences_of_different_lengths(name: str, device: str) -> None:
    arguments = detached(calls(device)[name])
    lengths = torch.tensor([0, 1, 3], device=device)
    nested = {
        key: torch.nested.nested_tensor_from_jagged(value, lengths)
        if isinstance(value, Tensor) and key != "weight"
        else value
        for key, value in arguments.items()
    }
    expected = results(getattr(ops, name)(**arguments))
    for actual, values in zip(results(getattr(ops, name)(**nested)), expected, strict=True):
        assert_same_bits([actual.values() if actual.is_nested else actual], [values])


@every_operator
def test_a_row_does_not_know_the_others(name: str, device: str) -> None:
    arguments = detached(calls(device)[name])
    whole = results(getattr(ops, name)(**arguments))
    first = {key: v[:1] if isinstance(v, Tensor) and key != "weight" else v for key, v in arguments.items()}
    for part, value in zip(results(getattr(ops, name)(**first)), whole, strict=True):
        if value.shape[0] == 3:
            assert_same_bits([part], [value[:1]])


def test_flops(device: str) -> None:
    """Together those of the norm, but for g, which is formed twice."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = {}
    for name, arguments in calls(device).items():
        with FlopCounterMode(display=False) as counter:
            getattr(ops, name)(**detached(arguments))
        counts[name] = counter.get_total_flops() // 60
    assert counts == {
        "rms_norm_stats": 2,
        "rms_norm_from_stats": 2,
        "rms_norm_backward_stats": 5,
        "rms_norm_backward_from_stats": 7,
    }


@every_operator
def test_on_the_meta_device(name: str, device: str) -> None:
    arguments = detached(calls(device)[name])
    expected = results(getattr(ops, name)(**arguments))
    meta = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments.items()}
    for actual, value in zip(results(getattr(ops, name)(**meta)), expected, strict=True):
        assert (actual.shape, actual.dtype, actual.stride()) == (value.shape, value.dtype, value.stride())
