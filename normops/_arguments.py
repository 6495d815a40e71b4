"""Passes arguments to the operators, and explains those of a wrong type.

The dispatcher's own errors print tensors, and schemas instead of signatures. Types are examined only after a call has
failed, so that calls with right arguments cost nothing more.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from normops import _C
from normops._operators import arguments_of, by_name, name_of

is_tracing: Callable[[], bool] = getattr(torch.jit, "is_tracing", lambda: False)

_INTEGERS: tuple[type, ...] = (Integral, torch.SymInt)
_NUMBERS: tuple[type, ...] = (Real, torch.SymFloat, *_INTEGERS)
_NONE = type(None)
_EXPECTED: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("input", "residual", "gate", "cos", "sin", "square_sum"), ((Tensor,), "a tensor")),
    **dict.fromkeys(("weight", "bias"), ((Tensor, _NONE), "a tensor or None")),
    "normalized_shape": (_INTEGERS, "an int or ints"),
    "eps": ((*_NUMBERS, _NONE), "a number or None"),
    **dict.fromkeys(("weight_offset", "alpha"), (_NUMBERS, "a number")),
    **dict.fromkeys(("row_size", "rotary_offset"), (_INTEGERS, "an int")),
    **dict.fromkeys(("rotary_dim", "dim"), ((*_INTEGERS, _NONE), "an int or None")),
    **dict.fromkeys(("interleaved", "norm_before_gate"), ((bool, torch.SymBool), "True or False")),
    **dict.fromkeys(("rounding", "activation"), ((str,), "a string")),
}
"""The types of each argument, and their description."""


def as_shape(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    """Returns the shape as a sequence. While torch.jit.trace records, sizes that are tensors stay in the trace."""
    is_traced = not torch.compiler.is_dynamo_compiling() and is_tracing()
    shape = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    return _C.traced_shape(shape) if is_traced else shape


def check_numbers(name: str, **numbers: object) -> None:
    """Raises TypeError for a bool, and for a tensor whose gradient would be lost: ``torch.ops`` accepts both."""
    for argument, number in numbers.items():
        if isinstance(number, (bool, Tensor)) and (isinstance(number, bool) or number.requires_grad):
            got = number if isinstance(number, bool) else "a tensor that requires a gradient"
            raise TypeError(f"{name}: expected {argument} to be a number, but got {got}")


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator. If it fails because of the type of an argument, the error names the argument."""
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if not str(error).startswith(f"{name_of(op)}: "):  # the operator's own errors name the argument
            explain(op, by_name(op, args, kwargs))
        raise


def explain(op: Any, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError if an argument of a failed call has a wrong type; otherwise returns."""
    if torch.compiler.is_dynamo_compiling():
        return
    name, names = name_of(op), arguments_of(op)
    positional = names[: names.index("eps") + 1] if "eps" in names else names
    for argument, value in arguments.items():
        types, expected = _EXPECTED[argument]
        wrong = _wrong(argument, value, types)
        if wrong is not None:
            order = f": the order is {name}({', '.join(positional)})" if argument in positional[1:] else ""
            raise TypeError(f"{name}: expected {argument} to be {expected}, but got {wrong}{order}") from None


def _wrong(argument: str, value: object, types: tuple[type, ...]) -> str | None:
    """Returns a description of a value of another type, without the elements of a tensor; otherwise None."""
    if argument == "normalized_shape" and isinstance(value, (tuple, list)):
        wrong = next(filter(None, (_wrong("size", size, types) for size in value)), None)
        return f"{wrong} in a {type(value).__name__}" if wrong is not None and len(value) > 1 else wrong
    if isinstance(value, types):
        return None
    if isinstance(value, Tensor):
        is_read = Tensor not in types and value.numel() == 1 and (Real in types or not value.is_floating_point())
        return None if is_read else "a tensor"  # torch.ops reads numbers from tensors
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__}"
    if value is None or isinstance(value, (Real, str)):
        return repr(value)
    return f"an instance of {type(value).__module__}.{type(value).__qualname__}"
