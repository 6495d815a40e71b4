"""vmap: one call of an operator for the whole batch, with the results of one call per sample."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import pytest
import torch
from assertions import assert_same_bits, message_of
from calls import Calls
from sampling import marked
from test_errors import ERRORS, arguments_of
from torch import Tensor

import normops
from reference import cases
from reference.cases import EPS, Case, compute_dtype
from reference.operators import OPERATORS, Operator, Variant, fitted, of_argument, other_dtypes, variants

ops = torch.ops.normops

SIZE = 5
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64))

Dims = tuple[int | None, ...]


class Shapes(NamedTuple):
    """The shapes of one sample."""

    input: tuple[int, ...]
    normalized: tuple[int, ...]
    weight: tuple[int, ...]


SHAPES = (
    Shapes((3, 16), (16,), (16,)),
    Shapes((16,), (16,), (16,)),
    Shapes((2, 3, 4, 5), (4, 5), (4, 5)),
    Shapes((2, 3, 4, 5), (5,), (4, 5)),
    Shapes((3, 16), (16,), (3, 16)),
    Shapes((2, 3, 16), (16,), (2, 1, 16)),
)

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


def batched(shape: tuple[int, ...], dim: int | None, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Returns SIZE samples along ``dim``, or one tensor for all samples if ``dim`` is None."""
    if dim is None:
        return cases.values(shape, dtype, seed).to(device)
    return cases.values((SIZE, *shape), dtype, seed).to(device).movedim(0, dim)


def samples(tensor: Tensor | None, dim: int | None) -> Iterator[Any]:
    for i in range(SIZE):
        yield tensor if tensor is None or dim is None else tensor.select(dim, i).contiguous()


def per_sample(op: Callable[..., Any], tensors: Sequence[Tensor | None], dims: Dims) -> list[Any]:
    return [op(*sample) for sample in zip(*map(samples, tensors, dims), strict=True)]


def dims_of(rows: int) -> Iterator[Dims]:
    """Yields batch dimensions of ``rows`` tensors like the input, and of the weight; None shares one tensor."""
    if rows == 1:
        yield from (d for d in product((0, 1, -1, None), (0, -1, None)) if d != (None, None))
        return
    for of_rows, of_weight in (
        ((0,), None),
        ((0, None), None),
        ((None, 1), None),
        ((0, 1), 0),
        ((None,), 0),
        ((1, None), 1),
        ((-1, None), -1),
        ((-1,), -1),
    ):
        yield (*islice(cycle(of_rows), rows), of_weight)


def of_norm(shapes: Shapes) -> dict[str, Any]:
    return {"normalized_shape": shapes.normalized, "row_size": 2 * math.prod(shapes.normalized)}


def masks_of(operator: Operator) -> list[tuple[bool, ...]]:
    """Returns the output masks that request at least one result."""
    return [mask for mask in operator.masks() if any(mask)] if operator.has_mask else [()]


TAKEN = [
    (shapes, variant._replace(flags=fitted(variant.flags, shapes.input[-1])))
    for shapes, variant in product(SHAPES, variants())
    if variant.operator.takes(Case(shapes.input, torch.float32, len(shapes.normalized)))
]
CALLS = [
    (*taken, dims)
    for taken in TAKEN
    for dims in dims_of(len(taken[1].operator.tensors) + 1)
    if dims[-1] is None or "weight" in taken[1].operator.names
]


def of_rows(
    variant: Variant, shapes: Shapes, name: str, dim: int | None, dtype: torch.dtype, seed: int, device: str
) -> tuple[Tensor, int | None]:
    """Returns a tensor like the input, or one number per row, and its batch dimension: ``dim``, or the last if it has
    fewer dimensions."""
    shape = variant.shape_of(name, shapes.input, len(shapes.normalized))
    if name not in variant.operator.sums:
        return batched(shape, dim, dtype, seed, device), dim
    dim = None if dim is None else min(dim, len(shape))
    return batched(shape, dim, compute_dtype(dtype), seed, device).abs(), dim


CALLS_IN_DTYPES = [(*dtypes, *call) for dtypes, call in zip(cycle(DTYPES), CALLS, strict=False)]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "shapes", "variant", "dims"),
    # One call in seven, which has each shape and variant, in core and full.
    [
        *CALLS_IN_DTYPES[::14],
        *marked(pytest.mark.full, CALLS_IN_DTYPES[7::14]),
        *marked(pytest.mark.release, [call for index, call in enumerate(CALLS_IN_DTYPES) if index % 7]),
    ],
    ids=str,
)
def test_one_call_has_the_bits_of_each_sample(
    shapes: Shapes,
    variant: Variant,
    dims: Dims,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: str,
) -> None:
    """Covers weights and their gradients per sample, or no weight; calls the operator's function if it has one."""
    operator = variant.operator
    names = ["input", *operator.tensors, "weight"]
    others: dict[str, Any] = {**of_norm(shapes), "eps": EPS, "weight_offset": 0.5, **variant.flags}
    optional = tuple(name for name in names if name in operator.names and operator.is_optional(name))
    for dtypes, mask, without in product(({}, *other_dtypes(operator, dtype)), masks_of(operator), {(), optional}):
        made: list[tuple[Tensor | None, int | None]] = [
            (None, None)
            if name in without
            else of_rows(variant, shapes, name, dim, dtypes.get(name, dtype), seed, device)
            for seed, (name, dim) in enumerate(zip(names[:-1], dims[:-1], strict=True), 1)
        ]
        weight = batched(shapes.weight, dims[-1], weight_dtype, 9, device), dims[-1]
        tensors, given = zip(*made, (None, None) if "weight" in without else weight, strict=True)
        if all(dim is None for dim in given):
            continue
        wanted = {"output_mask": mask} if mask else {}

        def call(*tensors: Tensor | None, wanted: dict[str, Any] = wanted) -> Any:
            arguments = dict(zip(names, tensors, strict=True)) | others | wanted
            return (operator.function or operator.packet)(**operator.given(arguments))

        computed = [of_argument(name) not in without for name in operator.outputs]
        out_dims: Any = tuple(0 if all(each) else None for each in zip(mask, computed, strict=True)) if mask else 0
        with Calls() as calls:
            results = operator.results(torch.vmap(call, given, out_dims=out_dims)(*tensors))
        assert calls.names == [operator.name]
        of_samples = zip(*map(operator.results, per_sample(call, tensors, given)), strict=True)
        for result, expected, dim in zip(results, of_samples, out_dims if mask else (0,) * len(results), strict=True):
            if dim is None:
                assert result.shape == expected[0].shape == (0,)
            else:
                assert result.is_contiguous()
                assert_same_bits([result], [torch.stack(expected)], (dtypes, mask, without))


@pytest.mark.parametrize("has_weight", [True, False])
def test_bias_gradients_have_the_bits_of_each_sample(has_weight: bool, device: str, runs_cpu_kernels: bool) -> None:
    """The CPU kernels give the same bits for every output mask."""
    dy, x = (cases.values((SIZE, 37, 16), torch.float32, seed).to(device) for seed in range(2))
    w, b = (cases.values((16,), torch.float32, seed).to(device) for seed in (2, 3))
    sums = []
    for mask in product((True, False), (True, False), (True,)):

        def call(dy: Tensor, x: Tensor, mask: tuple[bool, ...] = mask) -> Tensor:
            return ops.rms_norm_backward(dy, x, [16], w if has_weight else None, EPS, bias=b, output_mask=mask)[2]

        sums += [torch.vmap(call)(dy, x), torch.stack([call(*sample) for sample in zip(dy, x, strict=True)])]
    bound = 0.0 if runs_cpu_kernels else 1e-5
    for each in sums:
        torch.testing.assert_close(each, sums[0], rtol=bound, atol=bound)


@pytest.mark.parametrize("dim", [0, None])
def test_tables_with_fewer_dimensions_than_the_input(dim: int | None, device: str) -> None:
    """Tables broadcast within a sample, even if the number of samples equals the input's next dimension."""
    x = cases.values((SIZE, SIZE, 3, 2, 16), torch.float32, 1).to(device)
    cos, sin = (cases.values((SIZE, 3, 1, 16), torch.float32, seed).to(device) for seed in (2, 3))

    def norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return normops.rms_norm_rope(x, cos, sin, 16, eps=EPS)

    tables = (cos, sin) if dim == 0 else (cos[0], sin[0])
    expected = [norm(x[i], *((cos[i], sin[i]) if dim == 0 else tables)) for i in range(SIZE)]
    assert torch.equal(torch.vmap(norm, (0, dim, dim))(x, *tables), torch.stack(expected))


@pytest.mark.parametrize("weight_dim", [None, 0])
@pytest.mark.parametrize("input_dim", [0, 1])
@pytest.mark.parametrize("variant", variants(operator for operator in OPERATORS if operator.inplace), ids=str)
def test_in_place_equals_functional(variant: Variant, input_dim: int, weight_dim: int | None, device: str) -> None:
    operator = variant.operator
    names = ["input", *operator.tensors, "weight"]
    dims = (*[input_dim] * (len(names) - 1), weight_dim)

    def tensors() -> list[Tensor]:
        made = [
            batched(variant.shape_of(name, (3, 16)), input_dim, torch.bfloat16, seed, device)
            for seed, name in enumerate(names[:-1])
        ]
        return [*made, batched((16,), weight_dim, torch.float32, 9, device)]

    def calling(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            given = dict(zip(names, tensors, strict=True))
            return function(**given, normalized_shape=(16,), eps=EPS, **variant.flags)

        return call

    expected = operator.results(torch.vmap(calling(operator.default), dims)(*tensors()))
    given = tensors()
    results = operator.results(torch.vmap(calling(operator.inplace_function), dims)(*given))
    replaced = dict(zip(names, given, strict=True))
    assert_same_bits(results, expected)
    assert_same_bits([replaced[name].movedim(input_dim, 0) for name in operator.replaced], expected)


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.inplace], ids=str)
def test_in_place_rejects_gradients(operator: Operator) -> None:
    arguments = arguments_of(operator) | {"weight": torch.ones(4, requires_grad=True)}
    message = message_of_batch(operator.inplace, arguments, "weight")
    assert message.startswith(f"{operator}_: expected no argument to require a gradient")


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_zero_and_one(size: int, device: str) -> None:
    x, w = torch.ones(size, 3, 16, device=device), torch.ones(size, 16, device=device)
    for dims in ((0, 0), (0, None)):
        given = w if dims[1] == 0 else torch.ones(16, device=device)
        assert torch.vmap(lambda x, w: normops.rms_norm(x, 16, w), dims)(x, given).shape == (size, 3, 16)


def message_of_batch(call: Callable[..., Any], arguments: dict[str, Any], *shared: str) -> str:
    """Returns the error message for a batch of one, which must not count as one of the dimensions."""
    batch = {name: value[None] for name, value in arguments.items() if isinstance(value, Tensor) and name not in shared}
    return message_of(lambda: torch.vmap(lambda sample: call(**arguments | sample))(batch))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_errors_describe_one_sample(operator: Operator) -> None:
    for other, changes, expected in ERRORS:
        if other is operator and (changes != {"input": None} or operator.tensors):
            message = message_of_batch(operator.packet, arguments_of(operator) | changes)
            assert message == f"{operator}: {expected}"


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.inplace], ids=str)
def test_written_tensors_must_be_batched(operator: Operator) -> None:
    for name in operator.replaced:
        assert message_of_batch(operator.inplace, arguments_of(operator), name) == (
            f"{operator}_: expected {name}, which is written to, to be batched like the other arguments under vmap, "
            "but got one tensor for all samples"
        )
