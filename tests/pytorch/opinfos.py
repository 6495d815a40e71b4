"""OpInfos of the operators, by which PyTorch describes an operator to its own tests, and a reference for each.

``OpInfo.ref`` is a definition by torch operations, computed in float64. It returns a tuple of the wanted results, as
``SampleInput.output_process_fn_grad`` does for the operator's.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.testing import make_tensor
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import normops
from reference import definitions
from reference.cases import HALVES, compute_dtype

Arguments = dict[str, Any]
Reference = Callable[..., tuple[Tensor, ...]]
ops = torch.ops.normops
vjp: Any = torch.func.vjp  # typed as if they always returned auxiliary results too
jvp: Any = torch.func.jvp


class T(NamedTuple):
    """A tensor argument of a sample."""

    shape: tuple[int, ...]
    is_table: bool = False
    """A table of angles: it requires a gradient in few samples only, as the operators then run their definition."""
    is_sum: bool = False
    """A sum of squares: positive, in the dtype of the computation."""
    is_wide: bool = False
    """float32 if the input has 16 bits."""

    def make(self, dtype: torch.dtype, device: str, requires_grad: bool) -> Tensor:
        if self.is_sum or (self.is_wide and dtype in HALVES):
            dtype = compute_dtype(dtype)
        low, high = (1, 4) if self.is_sum else (-2, 2)
        return make_tensor(
            self.shape,
            dtype=dtype,
            device=device,
            low=low,
            high=high,
            requires_grad=requires_grad and not self.is_table,
        )


# References


def defined(name: str) -> Reference:
    definition = getattr(definitions, name)
    return lambda **arguments: as_tuple(definition(**arguments))


def gradients(norm: Reference, *names: str) -> Reference:
    """Returns the backward of a norm: the gradients of the named arguments."""

    def backward(
        grad_output: Tensor, output_mask: Iterable[bool] = (True,) * 3, grad_residual: Any = None, **arguments: Any
    ) -> tuple[Tensor, ...]:
        wanted = [
            n for n, is_wanted in zip(names, output_mask, strict=False) if is_wanted and arguments.get(n) is not None
        ]

        def of_wanted(*tensors: Tensor) -> Tensor:
            (output,) = norm(**arguments | dict(zip(wanted, tensors, strict=True)))
            return output

        _, pull_back = vjp(of_wanted, *(arguments[name] for name in wanted))
        results = dict(zip(wanted, pull_back(grad_output), strict=True))
        if grad_residual is not None and "input" in results:
            results["input"] = results["input"] + grad_residual
        return tuple(results.values())

    return backward


# Samples


def form(
    input: tuple[int, ...], normalized_shape: tuple[int, ...], weight: tuple[int, ...] | None, **others: Any
) -> Arguments:
    arguments = {"input": T(input), "normalized_shape": normalized_shape, "eps": 0.1}
    return arguments | ({} if weight is None else {"weight": T(weight)}) | others


# The first one is a sample of all: groups, two rows each, an offset.
ROWS = (
    form((2, 2, 4), (4,), (2, 4), weight_offset=1.0),
    form((2, 3), (3,), (3,)),
    form((2, 3), (3,), None, weight_offset=1.0),
    form((2, 2, 3), (2, 3), (2, 3), eps=0.5),
    form((2, 2, 2, 4), (4,), (2, 1, 1, 4)),
    form((2, 4), (4,), (4,), eps=None, rounding="llama"),
    form((1,), (1,), (1,)),
    form((1, 1, 2), (2,), (1, 2)),
    form((0, 3), (3,), (3,)),
    form((2, 0), (0,), (0,)),
)
# Channels before positions, behind them, in one position; with 8 positions, as many as the kernels of channels need.
CHANNELS = (
    form((2, 3, 2), (3,), (2, 1, 3), dim=-2, weight_offset=1.0),
    form((2, 3, 2, 2), (3,), (3,), dim=-3),
    form((3, 4), (3,), None, dim=-2, eps=0.5),
    form((2, 4), (4,), (4,), dim=-1, eps=None),
    form((1, 1, 1), (1,), (1,), dim=-2),
    form((2, 3, 1, 1), (3,), (3,), dim=-3, rounding="llama"),
    form((0, 3, 2), (3,), (3,), dim=-2),
    form((2, 0, 2), (0,), (0,), dim=-2),
    form((2, 3, 0), (3,), (3,), dim=-2),
    form((2, 2, 8), (2,), (2, 1, 2), dim=-2),
    form((1, 2, 8), (2,), (2,), dim=-2),
)


def of_shape(*names: str) -> Callable[[Arguments], Arguments]:
    return lambda form: {name: T(form["input"].shape) for name in names}


def sums(form: Arguments) -> Arguments:
    rows = form["input"].shape[: -len(form["normalized_shape"])]
    return {"square_sum": T(rows, is_sum=True), "dot": T(rows, is_sum=True), "row_size": 8}


def tables(form: Arguments) -> Arguments:
    *_, columns = form["input"].shape
    heads = form["input"].shape[:-1] if len(form["input"].shape) < 3 else (*form["input"].shape[:-2], 1)
    table = T((*heads, columns // 2 * 2), is_table=True)
    return {"cos": table, "sin": table} | ({"rotary_dim": columns - 1} if columns % 2 else {})


def masks(count: int) -> list[Arguments]:
    return [{"output_mask": mask} for mask in product((True, False), repeat=count) if any(mask) and not all(mask)]


WIDE: Arguments = {"weight": T((2, 4), is_wide=True)}
LLAMA: Arguments = {"rounding": "llama"}
BIASES: list[Arguments] = [{"bias": T(shape)} for shape in ((2, 4), (4,), (2, 2, 4))]
OF_CHANNELS: list[Arguments] = [
    {"bias": T((2, 1, 3)), "activation": "silu"},
    {"bias": T((3,)), "activation": "sigmoid"},
    {"bias": T((2, 2, 3))},
    {"weight": T((3,), is_wide=True), "activation": "sigmoid"},
]
GATES: list[Arguments] = [
    {"activation": activation, "norm_before_gate": is_before}
    for activation, is_before in (("silu", False), ("sigmoid", True), ("sigmoid", False))
]
HALF_TABLE, GIVEN_TABLE = T((2, 2, 1), is_table=True), T((2, 1, 4))
ROTATIONS: list[Arguments] = [
    {"interleaved": True},
    {"cos": HALF_TABLE, "sin": HALF_TABLE, "rotary_dim": 2, "rotary_offset": 1},
    {"cos": HALF_TABLE, "sin": HALF_TABLE, "rotary_dim": 2, "interleaved": True},
    {"cos": GIVEN_TABLE, "sin": GIVEN_TABLE, "interleaved": True},
]


class Operator(NamedTuple):
    """The samples of an operator: every form, and the first one with each of the variants."""

    name: str
    reference: Reference
    forms: tuple[Arguments, ...] = ROWS
    others: tuple[Callable[[Arguments], Arguments], ...] = ()
    variants: tuple[Arguments, ...] = ()

    @property
    def overload(self) -> Any:
        return getattr(ops, self.name).default

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.overload._schema.arguments)

    def specs(self) -> Iterator[Arguments]:
        for number, given in enumerate(self.forms):
            spec = dict(given)
            for other in self.others:
                spec |= other(given)
            for variant in ({}, *self.variants) if number == 0 else ({},):
                yield {name: value for name, value in (spec | variant).items() if name in self.arguments}

    def sample(self, spec: Arguments, dtype: torch.dtype, device: str, requires_grad: bool) -> SampleInput:
        made = {
            name: value.make(dtype, device, requires_grad) if isinstance(value, T) else value
            for name, value in spec.items()
        }
        return self.split(made, name=", ".join(f"{n}={_text(v)}" for n, v in spec.items() if n != "normalized_shape"))

    def split(self, arguments: Arguments, name: str = "") -> SampleInput:
        """Returns a sample with the first arguments by position, and the others by name."""
        by_position, by_name = [], dict(arguments)
        for argument in self.overload._schema.arguments:
            if argument.kwarg_only or argument.name not in by_name:
                break
            by_position.append(by_name.pop(argument.name))
        return SampleInput(
            by_position[0],
            args=tuple(by_position[1:]),
            kwargs=by_name,
            output_process_fn_grad=partial(_kept, self.wanted(arguments)),
            name=name,
        )

    def wanted(self, arguments: Arguments) -> tuple[bool, ...] | None:
        """Returns for each result whether the arguments ask for it; None if they always ask for all."""
        if "output_mask" not in self.arguments:
            return None
        names = [result.name.removeprefix("grad_") for result in self.overload._schema.returns]
        mask = arguments.get("output_mask", (True,) * len(names))
        return tuple(is_wanted and arguments.get(name) is not None for name, is_wanted in zip(names, mask, strict=True))


def _kept(wanted: tuple[bool, ...] | None, results: Any) -> Any:
    """Returns the wanted results. Dynamo traces it."""
    if wanted is None:
        return results
    return tuple(result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted)


def _text(value: object) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, T) else str(value)


def with_out(packet: Any) -> Callable[..., Any]:
    """Returns the operator with torch's spelling of targets: ``out``, a tensor or a tuple."""
    targets = [argument.name for argument in packet.out._schema.arguments if argument.alias_info is not None]

    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return packet(*args, **kwargs)
        return packet.out(*args, **kwargs, **dict(zip(targets, out if isinstance(out, tuple) else (out,), strict=True)))

    call.__name__ = str(packet).removeprefix("normops.")
    return call


def info_of(operator: Operator) -> OpInfo:
    packet = getattr(ops, operator.name)
    inplace: Any = getattr(normops, f"{operator.name}_", None) or getattr(ops, f"{operator.name}_", None)

    def samples(
        info: OpInfo, device: str, dtype: torch.dtype, requires_grad: bool, **kwargs: Any
    ) -> Iterator[SampleInput]:
        return (operator.sample(spec, dtype, device, requires_grad) for spec in operator.specs())

    return OpInfo(
        f"normops.{operator.name}",
        op=with_out(packet),
        ref=operator.reference,
        dtypes=floating_types_and(*HALVES),
        method_variant=None,  # type: ignore[arg-type]
        operator_variant=None,  # type: ignore[arg-type]
        inplace_operator_variant=None,  # type: ignore[arg-type]
        inplace_variant=inplace,
        supports_inplace_autograd=False,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        sample_inputs_func=samples,
    )


OPERATORS = (
    Operator("rms_norm", defined("rms_norm"), variants=(*BIASES, WIDE, LLAMA)),
    Operator(
        "rms_norm_backward",
        gradients(defined("rms_norm"), "input", "weight", "bias"),
        others=(of_shape("grad_output"),),
        variants=(*BIASES, WIDE, LLAMA, {"grad_residual": T((2, 2, 4))}, *(BIASES[0] | mask for mask in masks(3))),
    ),
    Operator(
        "add_rms_norm",
        defined("add_rms_norm"),
        others=(of_shape("residual"),),
        variants=({"alpha": 0.5}, WIDE | {"residual": T((2, 2, 4), is_wide=True)}),
    ),
    Operator("gated_rms_norm", defined("gated_rms_norm"), others=(of_shape("gate"),), variants=(*GATES, WIDE, LLAMA)),
    Operator(
        "gated_rms_norm_backward",
        gradients(defined("gated_rms_norm"), "input", "gate", "weight"),
        others=(of_shape("grad_output", "gate"),),
        variants=(*GATES, WIDE, LLAMA, *masks(3)),
    ),
    Operator(
        "rms_norm_rope",
        defined("rms_norm_rope"),
        forms=tuple(form for form in ROWS if len(form["normalized_shape"]) == 1),
        others=(tables,),
        variants=(*ROTATIONS, WIDE, LLAMA),
    ),
    Operator(
        "rms_norm_rope_backward",
        gradients(defined("rms_norm_rope"), "input", "weight"),
        forms=tuple(form for form in ROWS if len(form["normalized_shape"]) == 1),
        others=(of_shape("grad_output"), tables),
        variants=(*ROTATIONS, WIDE, LLAMA, *masks(2)),
    ),
    Operator("channel_rms_norm", defined("channel_rms_norm"), forms=CHANNELS, variants=tuple(OF_CHANNELS)),
    Operator(
        "channel_rms_norm_backward",
        gradients(defined("channel_rms_norm"), "input", "weight", "bias"),
        forms=CHANNELS,
        others=(of_shape("grad_output"),),
        variants=(*OF_CHANNELS, *(OF_CHANNELS[0] | mask for mask in masks(3))),
    ),
    Operator("rms_norm_stats", defined("rms_norm_stats")),
    Operator("rms_norm_from_stats", defined("rms_norm_from_stats"), others=(sums,), variants=(WIDE, LLAMA)),
    Operator(
        "rms_norm_backward_stats",
        defined("rms_norm_backward_stats"),
        others=(of_shape("grad_output"),),
        variants=(WIDE,),
    ),
    Operator(
        "rms_norm_backward_from_stats",
        defined("rms_norm_backward_from_stats"),
        others=(of_shape("grad_output"), sums),
        variants=(WIDE, LLAMA, {"grad_residual": T((2, 2, 4))}, *masks(2)),
    ),
)
OPINFOS = tuple(map(info_of, OPERATORS))


def _of_torch() -> OpInfo:
    (info,) = (info for info in op_db if info.name == "nn.functional.rms_norm")
    info = copy.copy(info)
    info.ref = defined("rms_norm")
    return info


OVERRIDDEN = _of_torch()
"""torch's own description of its norm, which runs normops in tests with the fixture ``overrides``."""


def schema_of(info: OpInfo) -> tuple[str, ...]:
    """Returns the names of an operator's arguments."""
    if info is OVERRIDDEN:
        return tuple(inspect.signature(torch.nn.functional.rms_norm).parameters)
    return next(o.arguments for o in OPERATORS if f"normops.{o.name}" == info.name)


def by_name(info: OpInfo, sample: SampleInput) -> Arguments:
    return dict(zip(schema_of(info), (sample.input, *sample.args), strict=False)) | sample.kwargs


def reference_of(info: OpInfo, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Returns the reference's results, computed in float64."""
    dtype = arguments["input"].dtype
    given = {n: v.double() if isinstance(v, Tensor) else v for n, v in arguments.items()}
    if given.get("eps") is None and "eps" in schema_of(info):
        given["eps"] = torch.finfo(compute_dtype(dtype)).eps
    results: tuple[Tensor, ...] = cast("Reference", info.ref)(**given)
    return results


def call(info: OpInfo, sample: SampleInput) -> tuple[Tensor, ...]:
    """Returns the wanted results of a sample."""
    return as_tuple(sample.output_process_fn_grad(info(sample.input, *sample.args, **sample.kwargs)))


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def leaves_of(sample: SampleInput) -> list[Tensor]:
    """Returns the tensors of a sample that require a gradient."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def samples_of(info: OpInfo, dtype: torch.dtype, count: int | None = None, **options: Any) -> Iterator[SampleInput]:
    """Yields the first ``count`` samples, or all of them, with the same numbers each time."""
    torch.manual_seed(0)
    for index, sample in enumerate(info.sample_inputs("cpu", dtype, **options)):
        if count is None or index < count:
            yield sample


def of_operators(
    dtypes: tuple[torch.dtype, ...],
    *,
    core: int = 1,
    full: int | None = None,
    infos: Iterable[OpInfo] = (*OPINFOS, OVERRIDDEN),
) -> pytest.MarkDecorator:
    """Parametrizes a test by operator, dtype and number of samples: ``core`` of them in the first dtype are core, and
    ``full`` of them, or all, in each dtype are full, if that is more."""
    marked = []
    for info in infos:
        name = info.name.removeprefix("normops.")
        for index, dtype in enumerate(dtypes):
            text = f"{name}-{str(dtype).removeprefix('torch.')}"
            if index == 0 and core:
                marked.append(pytest.param(info, dtype, core, id=f"{text}-{core}"))
            if index or core != full:
                marked.append(pytest.param(info, dtype, full, id=text, marks=pytest.mark.full))
    return pytest.mark.parametrize(("info", "dtype", "count"), marked)
