"""Describes the operators to the rules in Python: vmap, sharding, nested tensors, FLOPs, recomputation.

A rule is written once, for all operators: it recognises arguments by these names, and reads the rest from the schemas.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from normops import _C
from normops._private_torch import warn_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

Operator: TypeAlias = "OpOverload"

_ops = torch.ops.normops
_names = _C.operators()

# All operators, and the functional operator of each in-place operator.
FUNCTIONAL: tuple[Operator, ...] = tuple(getattr(_ops, name).default for name in _names)
INPLACE: dict[Operator, Operator] = {
    getattr(_ops, inplace).default: getattr(_ops, name).default
    for name, inplace in _names.items()
    if inplace is not None
}

# The arguments with the shape of input.
ROWS = ("input", "gate", "residual", "grad_output", "grad_residual")

# One number for each row of input: a sum over the row, or over a part of it.
SUMS = ("square_sum", "dot")

# Arguments that broadcast over the dimensions of input before the normalized ones. Weight and bias have gradients. The
# tables contain the angles of positions, which heads share.
TABLES = ("cos", "sin")
BROADCAST = ("weight", "bias", *TABLES)

# Subclasses of Tensor that define __torch_dispatch__ and support the operators. The rules for a subclass add it here.
TENSORS: set[type[Tensor]] = set()


def takes_operators(cls: type[Tensor]) -> bool:
    """Returns whether tensors of a class support the operators: a ``__torch_dispatch__`` may support torch's alone."""
    return cls.__torch_dispatch__ is Tensor.__torch_dispatch__ or has_rules(cls)


def has_rules(cls: type[Tensor]) -> bool:
    """Returns whether a subclass is one that torch uses for tracing, or one of :data:`TENSORS`."""
    return not TENSORS.isdisjoint(cls.__mro__) or not _tracing_tensors().isdisjoint(cls.__mro__)


@cache
def _tracing_tensors() -> frozenset[type[Tensor]]:
    try:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch._subclasses.functional_tensor import FunctionalTensor
    except ImportError as error:
        warn_of("FakeTensor and FunctionalTensor under torch's own norms", error)
        return frozenset()
    return frozenset((FakeTensor, FunctionalTensor))


@cache
def name_of(op: Operator) -> str:
    """Returns the operator's name without its namespace; error messages begin with it."""
    return op._schema.name.removeprefix("normops::")


@cache
def schema_of(op: Operator) -> str:
    """Returns the operator's schema."""
    return str(op._schema)


@cache
def arguments_of(op: Operator) -> tuple[str, ...]:
    """Returns the names of the operator's arguments, in their order."""
    return tuple(argument.name for argument in op._schema.arguments)


@cache
def results_of(op: Operator) -> tuple[str, ...]:
    """Returns the names of the operator's results."""
    return tuple(result.name for result in op._schema.returns)


def of_argument(result: str) -> str:
    """Returns the name of the argument that a gradient belongs to and has the shape of."""
    return result.removeprefix("grad_")


@cache
def written_by(op: Operator) -> tuple[str, ...]:
    """Returns the names of the arguments that the operator writes to."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def normalized_dims(arguments: Mapping[str, Any], ndim: int) -> range:
    """Returns the normalized dimensions of an input with ``ndim`` dimensions."""
    if "dim" in arguments:
        dim = arguments["dim"] % ndim
        return range(dim, dim + 1)
    return range(ndim - len(arguments["normalized_shape"]), ndim)


def by_name(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, without omitted ones."""
    return {**dict(zip(arguments_of(op), args, strict=False)), **kwargs}


def wanted(op: Operator, arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns which results a call computes. The operator returns an empty tensor for each other one."""
    mask = arguments.get("output_mask", (True,) * len(results_of(op)))
    arguments_of_results = map(of_argument, results_of(op))
    is_given = (name not in BROADCAST or arguments.get(name) is not None for name in arguments_of_results)
    return tuple(map(all, zip(mask, is_given, strict=True)))
