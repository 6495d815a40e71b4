"""Tests that every error names the argument, the expected and the actual value, in every mode."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from assertions import message_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import normops
from normops import _C, sharding
from reference.cases import DTYPES, Case, short
from reference.operators import OPERATORS, Operator, Variant

ops = torch.ops.normops

Arguments = dict[str, Any]
Errors = list[tuple[Arguments, str]]

FLOATING = "expected {} to be float16, bfloat16, float32 or float64"

BROADCAST = "expected {} to have shape {}, the normalized_shape"
MORE = ", or before it dimensions that broadcast to those of input, whose shape is [2, 3, 4]"


def of_kind(name: str, *shape: int) -> Errors:
    """Returns the errors of a tensor on another device and of a dtype without fractions."""
    return [
        ({name: torch.ones(shape, device="meta")}, f"expected {name} to be on cpu, the device of input, but got meta"),
        ({name: torch.ones(shape, dtype=torch.int64)}, f"{FLOATING.format(name)}, but got int64"),
    ]


def of_broadcast(name: str) -> Errors:
    beside: Arguments = {"weight": None, "bias": None}
    of_rows, of_heads, of_all = (BROADCAST.format(name, shape) for shape in ([4], [3, 4], [2, 3, 4]))
    return [
        *(({name: torch.ones(shape)}, f"{of_rows}{MORE}, but got {list(shape)}") for shape in ((5,), (1,), (2, 4), ())),
        ({name: torch.ones(3, 1, 4)}, f"{of_rows}{MORE}, but got [3, 1, 4]"),
        ({name: torch.ones(1, 2, 3, 4)}, f"{of_rows}{MORE}, but got [1, 2, 3, 4]"),
        (beside | {name: torch.ones(4), "normalized_shape": [3, 4]}, f"{of_heads}{MORE}, but got [4]"),
        (beside | {name: torch.ones(4), "normalized_shape": [2, 3, 4]}, f"{of_all}, but got [4]"),
        *of_kind(name, 4),
    ]


COMMON: Errors = [
    *of_broadcast("weight"),
    *of_broadcast("bias"),
    *(
        (
            {"normalized_shape": shape, "weight": None},
            f"expected normalized_shape to be the last dimensions of input, whose shape is [2, 3, 4], but got {shape}",
        )
        for shape in ([5], [2], [1, 2, 3, 4])
    ),
    (
        {"normalized_shape": [], "weight": None},
        "expected normalized_shape to have at least one dimension, but got []",
    ),
    ({"eps": float("nan")}, "expected eps to be a number, but got nan"),
    ({"rounding": "none"}, 'expected rounding to be "once" or "llama", but got "none"'),
    *(
        ({"activation": name}, f'expected activation to be "silu", "swish" or "sigmoid", but got "{name}"')
        for name in ("relu", "")
    ),
    *(
        ({"input": torch.ones(2, 3, 4, dtype=dtype)}, f"{FLOATING.format('input')}, but got {short(dtype)}")
        for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn)
    ),
]


def of_tensor(name: str) -> Errors:
    """Returns the errors of a tensor that must have the input's shape."""
    shape = f"expected {name} to have shape [2, 3, 4], the shape of input, but got "
    return [
        *(
            ({name: torch.ones(other)}, f"{shape}{list(other)}")
            for other in ((1, 3, 4), (2, 4, 4), (2, 3, 5), (3, 4), (4,))
        ),
        *of_kind(name, 2, 3, 4),
    ]


ANGLES = "expected cos to broadcast over the leading dimensions of input, whose shape is [2, 3, 4], but got the shape"
OF_COS = "expected sin to have shape [2, 1, 4], the shape of cos, but got"
COLUMNS = "expected cos to have 4 columns, those of input, but got {0}: pass rotary_dim={0} to rotate {0} columns"
ROTATED = "expected the rotated columns, {} from rotary_offset {} on, to be among those of input, but it has 4"
ROPE: Errors = [
    (
        {"normalized_shape": [3, 4], "weight": None},
        "expected normalized_shape to be one dimension, along which rows are rotated, but got [3, 4]",
    ),
    *(({"cos": torch.ones(shape)}, f"{ANGLES} {list(shape)}") for shape in ((2, 4, 4), (4, 1, 4), (1, 2, 3, 4), ())),
    *of_kind("cos", 2, 1, 4),
    *of_kind("sin", 2, 1, 4),
    *(({"sin": torch.ones(shape)}, f"{OF_COS} {list(shape)}") for shape in ((2, 1, 2), (4,))),
    ({"sin": torch.ones(2, 1, 4).double()}, "expected sin to be float32, the dtype of cos, but got float64"),
    *(({"cos": torch.ones(count), "sin": torch.ones(count)}, COLUMNS.format(count)) for count in (3, 6)),
    ({"rotary_dim": 3}, "expected rotary_dim to be even, but got 3"),
    ({"rotary_dim": -2}, "expected rotary_dim to be at least 0, but got -2"),
    *(
        ({"rotary_dim": count}, f"expected cos to have {count} columns, the rotary_dim, or half as many, but got 4")
        for count in (2, 12)
    ),
    ({"rotary_dim": 8}, ROTATED.format(8, 0)),
    ({"rotary_offset": -1}, "expected rotary_offset to be at least 0, but got -1"),
    *(({"rotary_offset": offset}, ROTATED.format(4, offset)) for offset in (1, 2**63 - 1)),
]


SIZE: Errors = [
    (
        {"row_size": 3},
        "expected row_size to be that of a whole row, at least the 4 elements of normalized_shape, but got 3",
    )
]


def of_sums(name: str) -> Errors:
    shape = f"expected {name} to have shape [2, 3], a number for each row of input, but got "
    return [
        *(({name: torch.ones(other)}, f"{shape}{list(other)}") for other in ((2, 4), (2, 3, 4), (3,), ())),
        *of_kind(name, 2, 3),
    ]


def of_operator(operator: Operator) -> Errors:
    common = [
        (operator.given(changes), expected)
        for changes, expected in COMMON
        if all(name in operator.names for name, value in changes.items() if value is not None)
    ]
    required = [name for name in operator.inputs if not operator.is_optional(name)]
    of_rows = [name for name in operator.tensors if name not in (*operator.tables, *operator.sums, "bias")]
    sums = [name for name in operator.tensors if name in operator.sums]
    return [
        *common,
        *(({name: None}, f"expected {name} to be a tensor, but got None") for name in required),
        *(error for name in of_rows for error in of_tensor(name)),
        *(error for name in sums for error in of_sums(name)),
        *(ROPE if operator.tables else []),
        *(SIZE if sums else []),
    ]


ERRORS = [(operator, changes, expected) for operator in OPERATORS for changes, expected in of_operator(operator)]


def arguments_of(operator: Operator, dtype: torch.dtype = torch.float32) -> Arguments:
    """Returns the arguments that are checked."""
    case = Variant(operator, {}).at(Case((2, 3, 4), dtype, weight_dtype=torch.float32, has_residual=True))
    return {name: value for name, value in case.arguments().items() if name != "weight_offset"}


def other_dtypes_of(operator: Operator, dtype: torch.dtype) -> Iterator[tuple[Arguments, str | None]]:
    """Yields each tensor in every dtype for an input of ``dtype``, and the error, or None if it is allowed."""
    arguments = arguments_of(operator, dtype)
    for name, argument in operator.tensors.items():
        if name in operator.tables[1:]:
            continue
        _, *others = allowed = argument.dtypes(dtype)
        choice = f", or {' or '.join(map(short, others))}" if others else ""
        what = f"{short(dtype)}, the dtype of input{choice}"
        if name in operator.sums:
            what = f"{short(allowed[0])}, in which {short(dtype)} is computed"
        for other in DTYPES:
            changed = operator.tables if name in operator.tables else (name,)
            changes = {each: arguments[each].to(other) for each in changed}
            yield changes, None if other in allowed else f"expected {name} to be {what}, but got {short(other)}"


def assert_same_everywhere(op: Callable[..., object], arguments: Arguments, expected: str) -> None:
    assert message_of(lambda: op(**arguments)) == expected
    with torch.inference_mode():
        assert message_of(lambda: op(**arguments)) == expected
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in arguments.items()}
        assert message_of(lambda: op(**fake)) == expected


@pytest.mark.parametrize(
    ("operator", "changes", "expected"), ERRORS, ids=lambda p: "" if isinstance(p, dict) else str(p)
)
def test_errors(operator: Operator, changes: Arguments, expected: str) -> None:
    """Also checks the function, which bypasses torch.ops if it can."""
    arguments, message = arguments_of(operator) | changes, f"{operator}: {expected}"
    assert_same_everywhere(operator.packet, arguments, message)
    if operator.function is not None:
        assert_same_everywhere(operator.function, arguments, message)
    torch._dynamo.reset()
    op = operator.function or operator.packet
    compiled = torch.compile(lambda kwargs: op(**kwargs), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        compiled(arguments)
    if operator.inplace:
        assert message_of(lambda: operator.inplace(**arguments)) == f"{operator}_: {expected}"
    assert message_of(lambda: getattr(_C, f"check_{operator}")(**arguments)) == message


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.tensors], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_other_than_the_inputs(dtype: torch.dtype, operator: Operator) -> None:
    calls = [operator.packet, getattr(_C, f"check_{operator}"), *([operator.function] if operator.function else [])]
    for changes, expected in other_dtypes_of(operator, dtype):
        for call in calls:
            changed = partial(call, **arguments_of(operator, dtype) | changes)
            if expected is None:
                changed()
            else:
                assert message_of(changed) == f"{operator}: {expected}"


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_missing_out_tensor_raises(operator: Operator) -> None:
    targets = Variant(operator, {}).at(Case((2, 3, 4), torch.float32, weight_dtype=torch.float32)).targets()
    for name in targets:
        message = f"{operator}: expected {name} to be a tensor, but got None"
        assert message_of(partial(operator.out, **arguments_of(operator), **targets | {name: None})) == message


FUNCTIONS = [
    (operator, function)
    for operator in OPERATORS
    for function in (operator.function, operator.inplace_function if operator.inplace else None)
    if function is not None
]


@pytest.mark.parametrize(("operator", "function"), FUNCTIONS, ids=lambda p: getattr(p, "__name__", str(p)))
def test_tensor_that_requires_gradient_is_no_number(operator: Operator, function: Callable[..., Any]) -> None:
    """torch.ops would use the number that it holds; torch's own functions reject it, too."""
    numbers = [argument.name for argument in operator.default._schema.arguments if "float" in str(argument.type)]
    for name in numbers:
        call = partial(function, **arguments_of(operator) | {name: torch.tensor(1.0, requires_grad=True)})
        expected = f"expected {name} to be a number, but got a tensor that requires a gradient"
        assert message_of(call, TypeError) == f"{function.__name__}: {expected}"


X, W = torch.ones(2, 4), torch.ones(4)
AN_ARRAY = "an instance of numpy.ndarray"
IN_ORDER = ": the order is rms_norm(input, normalized_shape, weight, eps)"
SHAPE, WEIGHT, EPS = (
    f"expected {name} to be {types}, but got {{}}{IN_ORDER}"
    for name, types in {
        "normalized_shape": "an int or ints",
        "weight": "a tensor or None",
        "eps": "a number or None",
    }.items()
)
OTHER_TYPES: list[tuple[tuple[Any, ...], str]] = [
    ((X, W), SHAPE.format("a tensor")),
    ((X, W, 1e-6), SHAPE.format("a tensor")),
    ((X, "4"), SHAPE.format("'4'")),
    ((X, 4.0), SHAPE.format("4.0")),
    ((X, None), SHAPE.format("None")),
    ((X, (2, None)), SHAPE.format("None in a tuple")),
    ((X, [2, W]), SHAPE.format("a tensor in a list")),
    ((X, 4, 1e-6), WEIGHT.format("1e-06")),
    ((X, 4, W.numpy()), WEIGHT.format(AN_ARRAY)),
    ((X, 4, W, "1e-5"), EPS.format("'1e-5'")),
    ((X, 4, W, W), EPS.format("a tensor")),
    ((X, 4, W, True), "expected eps to be a number, but got True"),
    ((X.tolist(), 4), "expected input to be a tensor, but got a list"),
    ((X.numpy(), 4), f"expected input to be a tensor, but got {AN_ARRAY}"),
]


@pytest.mark.parametrize(("arguments", "expected"), OTHER_TYPES)
def test_arguments_of_another_type(arguments: tuple[Any, ...], expected: str) -> None:
    """Also over a dimension and in place."""
    in_place = expected.replace("the order is rms_norm", "the order is rms_norm_")
    assert message_of(partial(normops.rms_norm, *arguments), TypeError) == f"rms_norm: {expected}"
    assert message_of(partial(normops.rms_norm, *arguments, dim=-1), TypeError) == f"rms_norm: {expected}"
    assert message_of(partial(normops.rms_norm_, *arguments), TypeError) == f"rms_norm_: {in_place}"


def test_other_arguments_of_another_type() -> None:
    add, rope, from_stats = normops.add_rms_norm, normops.rms_norm_rope, sharding.rms_norm_from_stats
    order = "the order is {}(input, {}, normalized_shape, weight, eps)"
    of_add, of_rope, of_stats = map(
        order.format, ("add_rms_norm", "rms_norm_rope", "rms_norm_from_stats"), ("residual", "cos, sin", "square_sum")
    )
    no_tensor = "expected {} to be a tensor, but got 4: {}"
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], Arguments, str]] = [
        (normops.rms_norm, (X, torch.ones(1)), {}, SHAPE.format("a tensor")),
        (normops.rms_norm, (X, 4), {"dim": "1"}, "expected dim to be an int or None, but got '1'"),
        (add, (X, 4, W), {}, no_tensor.format("residual", of_add)),
        (add, (X, X, 4), {"alpha": False}, "expected alpha to be a number, but got False"),
        (rope, (X, 4, X, X), {}, no_tensor.format("cos", of_rope)),
        (rope, (X, X, X, 4), {"interleaved": "no"}, "expected interleaved to be True or False, but got 'no'"),
        (from_stats, (X, 4, W), {"row_size": 4}, no_tensor.format("square_sum", of_stats)),
        (normops.gated_rms_norm, (X, X, 4), {"activation": None}, "expected activation to be a string, but got None"),
    ]
    for function, args, kwargs, expected in calls:
        assert message_of(partial(function, *args, **kwargs), TypeError) == f"{function.__name__}: {expected}"
    for arguments, expected in (
        ((4, True), "eps: expected a number or None, but got True"),
        ((4, 1e-6, 0.0), "elementwise_affine: expected True or False, but got 0.0"),
    ):
        message = message_of(partial(normops.RMSNorm, *arguments), TypeError)
        assert message == f"{expected}: the order is RMSNorm(normalized_shape, eps, elementwise_affine)"


def test_numbers_of_numpy_and_in_tensors_are_accepted() -> None:
    function: Callable[..., Tensor] = normops.rms_norm  # its annotations are narrower
    expected = function(X, 4, W, 1e-5)
    four, eps = torch.tensor([4, 1e-5], dtype=torch.float64).unbind()
    assert torch.equal(function(X, four.int(), W, eps), expected)
    assert torch.equal(function(X, four.int().numpy()[()], W, eps.numpy()[()]), expected)
    with pytest.raises((RuntimeError, OverflowError)):
        normops.rms_norm(X, 2**70)


def test_symbolic_width_differs_from_weight() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, [x.shape[-1]], w), backend="aot_eager", dynamic=True)
    compiled(torch.ones(3, 8), torch.ones(8))
    with pytest.raises(RuntimeError, match="expected weight to have shape"):
        compiled(torch.ones(3, 9), torch.ones(7))
