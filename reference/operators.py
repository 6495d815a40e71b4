"""Describes the operators for tests and benchmarks: a new one needs an entry in OPERATORS.

Names, order and types of arguments and results are read from the schemas; this module adds the rest. Callers must load
the operators first: the installed ones by importing normops, or others.
"""

import importlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from reference import cases, oracle
from reference.cases import CASES, HALVES, Case, compute_dtype, moved
from reference.oracle import Bounded

Dtypes = Callable[[torch.dtype], tuple[torch.dtype, ...]]
"""Maps the dtype of the input to the dtypes that another tensor may have; the input's own comes first, if allowed."""


def computed(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (compute_dtype(dtype),)


def equal(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype,)


def wider(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, torch.float32) if dtype in HALVES else (dtype,)


def narrower(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, *HALVES) if dtype == torch.float32 else (dtype,)


def floating(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, *(other for other in cases.DTYPES if other != dtype))


def narrower_or_wider(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (*narrower(dtype), *wider(dtype)[1:])


Flags = Mapping[str, object]


def like_input(case: Case, flags: Flags, dtype: torch.dtype, seed: int) -> Tensor:
    return case.grad_layout(case.shape, dtype, seed)


# Tensors whose dtype is independent of the others: one combination with each is enough.
OF_ANY_DTYPE = ("bias",)


def like_weight(case: Case, flags: Flags, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor of the weight's shape; if all rows share the weight, of the input's shape."""
    if not case.group_dims:
        return like_input(case, flags, dtype, seed)
    projected = cases.values((*case.weight_shape[:-1], 3 * case.weight_shape[-1]), dtype, seed)
    return projected.chunk(3, -1)[1]


def rows_of(case: Case) -> tuple[int, ...]:
    return case.shape[: len(case.shape) - case.normalized_dims]


def _sums(terms: Callable[[Case], Tensor], stride: int) -> Callable[[Case, Flags, torch.dtype, int], Tensor]:
    """Returns a function that sums each row as if it had two such parts, with NaNs between the sums in memory."""

    def make(case: Case, flags: Flags, dtype: torch.dtype, seed: int) -> Tensor:
        sums = terms(case).flatten(len(rows_of(case))).sum(-1) * 2
        others = [torch.full_like(sums, torch.nan)] * (stride - 1)
        return torch.stack([sums, *others], -1).to(compute_dtype(dtype))[..., 0]

    return make


square_sums = _sums(lambda case: case.input().double().square(), 2)
dots = _sums(lambda case: case.grad_output().double() * case.input().double(), 3)


def table_shape(shape: tuple[int, ...], flags: Flags) -> tuple[int, ...]:
    """Returns the shape of the angles for rows of this shape and these flags. The last of several row dimensions, the
    heads, shares them."""
    columns = (shape[-1] - cast("int", flags.get("rotary_offset", 0))) // 2 * 2
    if (rotary_dim := flags.get("rotary_dim")) is not None:
        columns = cast("int", rotary_dim) // 2
    return (*(shape[:-1] if len(shape) < 3 else (*shape[:-2], 1)), columns)


def fitted(flags: Flags, columns: int) -> Flags:
    """Returns the flags for rows of this width: those of an odd width need ``rotary_dim``, as tables are even."""
    is_narrow = flags.get("rotary_dim", columns) is None and columns % 2 == 1
    return {**flags, "rotary_dim": columns - 1} if is_narrow else flags


def table(case: Case, flags: Flags, dtype: torch.dtype, seed: int) -> Tensor:
    return case.grad_layout(table_shape(case.shape, flags), dtype, seed)


@dataclass(frozen=True)
class Argument:
    """A tensor argument other than input and weight."""

    dtypes: Dtypes = equal
    make: Callable[[Case, Flags, torch.dtype, int], Tensor] = like_input


@dataclass(frozen=True, eq=False)
class Operator:
    name: str
    tensors: Mapping[str, Argument] = field(default_factory=dict)
    """Tensors other than input and weight. Cases with a residual pass the optional ones."""
    flags: tuple[Flags, ...] = ({},)
    """Arguments that select the computation, in all combinations that differ."""
    tables: tuple[str, ...] = ()
    """Tensors that broadcast over the rows of input. They share a dtype, and ``gradient`` omits them."""
    takes: Callable[[Case], bool] = lambda case: True
    gradient: str | None = None
    """The operator that differentiates it."""
    sums: tuple[str, ...] = ()
    """Arguments and outputs that have a number for each row of input."""
    not_over: frozenset[tuple[str, str]] = frozenset()
    """Pairs (result, input) that may not alias, although shape and dtype are equal. Sums may never alias an
    input."""

    @property
    def oracle(self) -> Callable[..., Any]:
        """The function that returns a Bounded, or a tuple with one for each result: None for a result that is None."""
        function: Callable[..., Any] = getattr(oracle, self.name)
        return function

    @property
    def packet(self) -> Any:
        return getattr(torch.ops.normops, self.name)

    @property
    def default(self) -> Any:
        return self.packet.default

    @property
    def out(self) -> Any:
        return self.packet.out

    @property
    def inplace(self) -> Any:
        """The in-place operator, or None."""
        packet = getattr(torch.ops.normops, f"{self.name}_", None)
        return packet and packet.default

    @property
    def function(self) -> Callable[..., Any] | None:
        """The public function, or None."""
        module = "normops.sharding" if self.sums else "normops"
        return getattr(importlib.import_module(module), self.name, None)

    @property
    def inplace_function(self) -> Callable[..., Any]:
        return getattr(importlib.import_module("normops"), f"{self.name}_")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.default._schema.arguments)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The tensors among its arguments."""
        kinds = ("Tensor", "Optional[Tensor]")
        return tuple(argument.name for argument in self.default._schema.arguments if str(argument.type) in kinds)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(result.name or "output" for result in self.default._schema.returns)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The names of the outputs in the .out overload."""
        return _written(self.out)

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """The arguments that the in-place operator overwrites."""
        return _written(self.inplace)

    @cached_property
    def never_over(self) -> frozenset[tuple[str, str]]:
        sums = (target for target in self.targets if target in self.sums)
        return self.not_over | frozenset(product(sums, self.inputs))

    @property
    def has_mask(self) -> bool:
        return "output_mask" in self.names

    def __str__(self) -> str:
        return self.name

    def shape_of(self, name: str, shape: tuple[int, ...], flags: Flags, normalized_dims: int = 1) -> tuple[int, ...]:
        """Returns the shape of a tensor argument for an input of this shape."""
        if name in self.sums:
            return shape[: len(shape) - normalized_dims]
        return table_shape(shape, flags) if name in self.tables else shape

    def dtype_of(self, output: str, arguments: Mapping[str, Any]) -> torch.dtype:
        if output in self.sums:
            return compute_dtype(arguments["input"].dtype)
        dtype: torch.dtype = arguments[of_argument(output)].dtype
        return dtype

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that the operator has."""
        return {name: value for name, value in arguments.items() if name in self.names}

    def is_optional(self, name: str) -> bool:
        (argument,) = (argument for argument in self.default._schema.arguments if argument.name == name)
        return str(argument.type).startswith("Optional")

    def masks(self) -> Iterator[tuple[bool, ...]]:
        return product((True, False), repeat=len(self.outputs))

    def results(self, returned: Any) -> tuple[Any, ...]:
        """Returns the result or results of a call as a tuple."""
        return tuple(returned) if len(self.outputs) > 1 else (returned,)

    def call(self, function: Callable[..., Any] | None = None, /, **arguments: Any) -> tuple[Any, ...]:
        """Calls the operator or a function like it, and returns the results, with None for those not requested."""
        results = self.results((function or self.default)(**arguments))
        mask = arguments.get("output_mask", [True] * len(self.outputs))
        are_wanted = [
            is_asked_for and (not name.startswith("grad_") or arguments.get(of_argument(name)) is not None)
            for name, is_asked_for in zip(self.outputs, mask, strict=True)
        ]
        assert all(is_wanted or result.shape == (0,) for result, is_wanted in zip(results, are_wanted, strict=True))
        return tuple(result if is_wanted else None for result, is_wanted in zip(results, are_wanted, strict=True))

    def expected(self, arguments: Mapping[str, object]) -> tuple[Bounded | None, ...]:
        """Returns the oracle's values and bounds of the results."""
        mask: Any = arguments.get("output_mask", [True] * len(self.outputs))
        bounded = self.oracle(**{name: value for name, value in arguments.items() if name != "output_mask"})
        results = (bounded,) if isinstance(bounded, Bounded) else bounded
        return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))


def _written(overload: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload._schema.arguments if argument.alias_info is not None)


def of_argument(output: str) -> str:
    """Returns the argument with the shape and dtype of an output or its target, which are named after it. Sums have no
    such argument."""
    return "input" if output in ("output", "out") else output.removeprefix("grad_").removesuffix("_out")


def positional(overload: Any, arguments: Mapping[str, object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits arguments as users usually pass them: by position where the schema allows it."""
    args, kwargs = [], dict(arguments)
    for argument in overload._schema.arguments:
        if argument.kwarg_only or argument.name not in kwargs:
            break
        args.append(kwargs.pop(argument.name))
    return tuple(args), kwargs


ROUNDINGS = ({"rounding": "once"}, {"rounding": "llama"})
BIAS, GATE = {"bias": Argument(floating, like_weight)}, {"gate": Argument(narrower_or_wider)}
RMS_NORM = Operator("rms_norm", BIAS, ROUNDINGS, gradient="rms_norm_backward")
RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward", {"grad_output": Argument(narrower), "grad_residual": Argument(), **BIAS}, ROUNDINGS
)
ADD_RMS_NORM = Operator(
    "add_rms_norm",
    {"residual": Argument(wider)},
    # alpha is a power of two, so that the product is exact, with and without fused multiply-adds.
    ({"rounding": "once", "alpha": 1.0}, {"rounding": "llama", "alpha": 0.25}),
    gradient="rms_norm_backward",
    # residual_out is written before the weight is read.
    not_over=frozenset({("residual_out", "weight")}),
)
GATING = tuple(
    {"activation": activation, "norm_before_gate": norm_before_gate, "rounding": rounding}
    for activation, rounding in (("silu", "once"), ("sigmoid", "once"), ("silu", "llama"))
    for norm_before_gate in (True, False)
)
GATED_RMS_NORM = Operator("gated_rms_norm", GATE, GATING, gradient="gated_rms_norm_backward")
GATED_RMS_NORM_BACKWARD = Operator("gated_rms_norm_backward", {"grad_output": Argument(), **GATE}, GATING)

# Angles for each column or for each pair; rotations of all columns, or of some from an offset on.
ROPES = tuple(
    {"rounding": rounding, "interleaved": interleaved, "rotary_dim": rotary_dim, "rotary_offset": rotary_offset}
    for rounding, interleaved, rotary_dim, rotary_offset in (
        ("once", False, None, 0),
        ("once", True, None, 0),
        ("once", False, 4, 1),
        ("once", True, 4, 1),
        ("llama", False, 4, 1),
        ("llama", True, None, 0),
    )
)
TABLES = {"cos": Argument(wider, table), "sin": Argument(wider, table)}


def has_heads(case: Case) -> bool:
    return case.normalized_dims == 1 and case.shape[-1] >= 5


RMS_NORM_ROPE = Operator("rms_norm_rope", TABLES, ROPES, tuple(TABLES), has_heads, gradient="rms_norm_rope_backward")
RMS_NORM_ROPE_BACKWARD = Operator(
    "rms_norm_rope_backward", {"grad_output": Argument(), **TABLES}, ROPES, tuple(TABLES), has_heads
)
SUMS = {"square_sum": Argument(computed, square_sums), "dot": Argument(computed, dots)}
SQUARE_SUM = {"square_sum": SUMS["square_sum"]}
RMS_NORM_STATS = Operator("rms_norm_stats", sums=tuple(SQUARE_SUM))
RMS_NORM_FROM_STATS = Operator("rms_norm_from_stats", SQUARE_SUM, ROUNDINGS, sums=tuple(SQUARE_SUM))
RMS_NORM_BACKWARD_STATS = Operator(
    "rms_norm_backward_stats", {"grad_output": Argument(narrower)}, ROUNDINGS, sums=tuple(SUMS)
)
RMS_NORM_BACKWARD_FROM_STATS = Operator(
    "rms_norm_backward_from_stats",
    {"grad_output": Argument(narrower), **SUMS, "grad_residual": Argument()},
    ROUNDINGS,
    sums=tuple(SUMS),
)

OPERATORS = (
    RMS_NORM,
    RMS_NORM_BACKWARD,
    ADD_RMS_NORM,
    GATED_RMS_NORM,
    GATED_RMS_NORM_BACKWARD,
    RMS_NORM_ROPE,
    RMS_NORM_ROPE_BACKWARD,
    RMS_NORM_STATS,
    RMS_NORM_FROM_STATS,
    RMS_NORM_BACKWARD_STATS,
    RMS_NORM_BACKWARD_FROM_STATS,
)
DIFFERENTIABLE = tuple(operator for operator in OPERATORS if operator.gradient)


def of_rows(operator: Operator, cols: int) -> Callable[..., Any]:
    """Returns the public function of (input, other, weight), with ``other`` for every other required tensor."""
    function, required = operator.function, [name for name in operator.tensors if not operator.is_optional(name)]
    assert function is not None

    def norm(input: Tensor, other: Tensor, weight: Tensor | None) -> Any:
        others = {name: other.detach() if name in operator.tables else other for name in required}
        return function(input=input, normalized_shape=cols, weight=weight, eps=cases.EPS, **others)

    norm.__name__ = operator.name
    return norm


def named(name: str) -> Operator:
    (operator,) = (operator for operator in OPERATORS if operator.name == name)
    return operator


class Variant(NamedTuple):
    """An operator with values for its flags."""

    operator: Operator
    flags: Flags

    def shape_of(self, name: str, shape: tuple[int, ...], normalized_dims: int = 1) -> tuple[int, ...]:
        return self.operator.shape_of(name, shape, self.flags, normalized_dims)

    def beside(self, name: str, rows: Tensor) -> Tensor:
        """Returns a tensor argument made from a tensor like the input, with the required width."""
        if name in self.operator.sums:
            return rows.to(compute_dtype(rows.dtype)).abs().amax(-1)
        return rows[..., : self.shape_of(name, tuple(rows.shape))[-1]]

    def at(self, case: Case, dtypes: Mapping[str, torch.dtype] | None = None) -> "OperatorCase":
        return OperatorCase(self.operator, case, self.flags, dtypes or {})

    def __str__(self) -> str:
        return "-".join([self.operator.name, *(f"{name}:{value}" for name, value in self.flags.items())])


def variants(operators: Iterable[Operator] = OPERATORS) -> tuple[Variant, ...]:
    return tuple(Variant(operator, flags) for operator in operators for flags in operator.flags)


class OperatorCase(NamedTuple):
    operator: Operator
    case: Case
    flags: Flags
    dtypes: Mapping[str, torch.dtype]
    """The dtypes of tensors other than input and weight, if not the input's."""

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Returns the arguments by name, in the order of the schema, with the same numbers each time."""
        case = self.case
        made: dict[str, Any] = {
            "input": case.input(),
            "normalized_shape": case.normalized_shape,
            "row_size": 2 * math.prod(case.normalized_shape),
            "weight": case.weight(),
            "eps": case.eps,
            "weight_offset": case.weight_offset,
            **fitted(self.flags, case.shape[-1]),
        }
        for seed, (name, argument) in enumerate(self.operator.tensors.items(), 4):
            is_given = case.has_residual or not self.operator.is_optional(name)
            dtype = self.dtypes.get(name, case.dtype)
            made[name] = argument.make(case, self.flags, dtype, seed) if is_given else None
        return moved(device, {name: made[name] for name in self.operator.names if name in made})

    def with_nans(self) -> Iterator[dict[str, Any]]:
        """Yields arguments with a NaN of each payload in one tensor, for each tensor; rows and columns differ."""
        for name, tensor in self.arguments().items():
            if isinstance(tensor, Tensor):
                arguments, nans = self.arguments(), cases.nans(tensor.dtype)
                rows = arguments[name][:, None] if name in self.operator.sums else torch.atleast_2d(arguments[name])
                index = torch.arange(len(nans))
                rows[index % len(rows), index * (rows.shape[1] - 1) // (len(nans) - 1)] = nans
                yield arguments

    def expected(self, arguments: Mapping[str, Any] | None = None) -> tuple[Bounded | None, ...]:
        return self.operator.expected(self.arguments() if arguments is None else arguments)

    def targets(self, device: str = "cpu") -> dict[str, Any]:
        """Returns memory for the outputs, with other numbers, in the layouts of the inputs if these are writable."""
        made = {}
        for seed, name in enumerate(self.operator.targets, 20):
            like, case = of_argument(name), self.case
            if name in self.operator.sums:
                made[name] = square_sums(case, self.flags, case.dtype, seed)
            elif like == "weight":
                weight = case.weight()
                made[name] = torch.empty(0) if weight is None else torch.full_like(weight, torch.nan)
            else:
                layout = case.layout if like == "input" else case.grad_layout
                layout = cases.contiguous if layout in (cases.expanded, cases.expanded_scalar) else layout
                shape = case.weight_shape if like == "bias" and case.group_dims else case.shape
                made[name] = layout(shape, self.dtypes.get(like, case.dtype), seed)
        return moved(device, made)

    def results(self, device: str = "cpu", **changes: object) -> tuple[Any, ...]:
        """Returns the results of the operator that allocates them."""
        return self.operator.call(**self.arguments(device) | changes)

    def __str__(self) -> str:
        flags = [f"{name}:{value}" for name, value in self.flags.items()]
        dtypes = [
            f"{name}:{cases.short(self.dtypes.get(name, self.case.dtype))}"
            for name, argument in self.operator.tensors.items()
            if argument.dtypes not in (equal, computed)
        ]
        return "-".join([self.operator.name, str(self.case), *dtypes, *flags])


def other_dtypes(
    operator: Operator, dtype: torch.dtype, without: tuple[str, ...] = ()
) -> tuple[dict[str, torch.dtype], ...]:
    """Returns every choice of dtypes for the other tensors, except the dtype of the input for all of them."""
    without = (*without, *operator.sums)
    tensors = {name: argument for name, argument in operator.tensors.items() if name not in without}
    choices = [argument.dtypes(dtype) for argument in tensors.values()]
    others = (dict(zip(tensors, chosen, strict=True)) for chosen in product(*choices))
    possible = (chosen for chosen in others if len({chosen[name] for name in operator.tables}) <= 1)
    return tuple(chosen for chosen in possible if set(chosen.values()) - {dtype})


def cases_of(operator: Operator) -> tuple[OperatorCase, ...]:
    """Returns every case with all tensors in its dtype, about half of them with other dtypes too, and every flag."""
    choose = random.Random(0)
    every, taken = operator.flags, [case for case in CASES if operator.takes(case)]
    found = [OperatorCase(operator, case, choose.choice(every), {}) for case in taken]
    for index, case in enumerate(taken):
        others = other_dtypes(operator, case.dtype, () if case.has_residual else OF_ANY_DTYPE)
        if index % 2 < len(others):
            found.append(OperatorCase(operator, case, choose.choice(every), choose.choice(others)))
    if len(every) > 1:
        narrow = [Case((3, cols), torch.float32, 1, torch.float32) for cols in (1, 17, 1000)]
        for flags in every:
            found += [OperatorCase(operator, case, flags, {}) for case in narrow if operator.takes(case)]
            for dtype in HALVES:
                case = Case(
                    (4, 3, 36), dtype, 1, dtype, layout=cases.qkv_slice, grad_layout=cases.padded_rows, group_dims=1
                )
                others = other_dtypes(operator, dtype, OF_ANY_DTYPE)
                found += [OperatorCase(operator, case, flags, dtypes) for dtypes in others]
    return tuple(found)


OPERATOR_CASES = tuple(case for operator in OPERATORS for case in cases_of(operator))
