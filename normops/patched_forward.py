"""The forward that :func:`normops.patch` gives a module."""

import linecache
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple, SupportsIndex, cast

import torch
from torch import nn

from normops.functional import rms_norm
from normops.recognition import DTYPES, OUTPUT_DTYPES, Norm

Rounding = Literal["once", "original"]

# Where a module keeps a forward that it was given instead of its class's, the one that computes first: hooks of
# accelerate take the place of ``forward``, and call what they found there.
_SLOTS = ("_old_forward", "forward")

ENTRIES = (*_SLOTS, "__reduce_ex__")
"""What may be among the attributes of a patched module."""


class Given(NamedTuple):
    """What a forward is made of."""

    norm: Norm
    rounding: Rounding


def give(module: nn.Module, norm: Norm, rounding: Rounding) -> None:
    """Lets a module run normops."""
    slot = "_old_forward" if "_old_forward" in vars(module) else "forward"
    module.__dict__[slot] = _bind(module, Given(norm, rounding))


def given(module: nn.Module) -> dict[Given, str]:
    """What the module was given, and in which of its attributes it is."""
    found = {_given(vars(module).get(slot)): slot for slot in _SLOTS}
    return {made: slot for made, slot in found.items() if made is not None}


def give_back(module: nn.Module) -> bool:
    """Lets a module run as it did; tells whether it was another."""
    found = given(module)
    for slot in found.values():
        if slot == "forward":
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = MethodType(type(module).forward, module)
    if found:
        del module.__dict__["__reduce_ex__"]
    return bool(found)


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether it computes with a forward that neither its class nor this module made."""
    forward = next((vars(module)[slot] for slot in _SLOTS if slot in vars(module)), None)
    own = isinstance(forward, MethodType) and forward.__func__ is getattr(type(module), "forward", None)
    return forward is not None and not own and _given(forward) is None


def _given(forward: Any) -> Given | None:
    return getattr(forward.__func__, "normops", None) if isinstance(forward, MethodType) else None


def _bind(module: nn.Module, made_of: Given) -> MethodType:
    """A method, with one function for all modules that are alike: torch.compile compiles their callers once."""
    module.__dict__["__reduce_ex__"] = MethodType(_reduce, module)
    return MethodType(_forward(made_of), module)


class _Bound:
    """Such a method for pickle and copy, which would find it by its name: that of the module's own."""

    def __init__(self, module: nn.Module, made_of: Given) -> None:
        self._arguments = module, made_of

    def __reduce__(self) -> tuple[Any, ...]:
        return _bind, self._arguments


def _reduce(module: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """What pickle and copy ask the module itself for, before its class."""
    function, arguments, state, *rest = cast(tuple[Any, ...], type(module).__reduce_ex__(module, protocol))
    bound = {slot: _Bound(module, made_of) for made_of, slot in given(module).items()}
    state = {name: bound.get(name, value) for name, value in state.items() if name != "__reduce_ex__"}
    return function, arguments, state, *rest


@cache
def _forward(made_of: Given) -> FunctionType:
    """Compiled from source, as a dataclass's methods are: its argument has the name that callers know."""
    source, file = _source(*made_of), f"<normops.patch: {made_of}>"
    names = {
        "rms_norm": rms_norm,
        "promote_types": torch.promote_types,
        "float32": torch.float32,
        "DTYPES": DTYPES,
        "output_dtype": OUTPUT_DTYPES[made_of.norm.output_dtype],
    }
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    forward = cast(FunctionType, names["forward"])
    forward.normops = made_of  # type: ignore[attr-defined]
    return forward


def _source(norm: Norm, rounding: Rounding) -> str:
    x = norm.argument
    weight = None if norm.weight is None else f"self.{norm.weight}"
    eps = f"self.{norm.eps}" if isinstance(norm.eps, str) else norm.eps
    shape = f"{x}.shape[-1:]" if weight is None else f"{weight}.shape"
    shape = shape if norm.normalized_shape is None else f"self.{norm.normalized_shape}"
    dtype = f"{x}.dtype" if norm.output_dtype == "input's" else f"output_dtype({x}.dtype, {weight}.dtype)"
    lines = [f"if {x}.dtype not in DTYPES:", f"    return type(self).forward(self, {x})", f"dtype = {dtype}"]
    twice = rounding == "original" and norm.rounds == "twice"
    if not twice and norm.group_size is None:
        input = x if norm.output_dtype == "input's" else f"{x}.to(promote_types({x}.dtype, dtype))"
        result = f"rms_norm({input}, {shape}, {weight}, {eps}, weight_offset={norm.weight_offset})"
        return _function(x, [*lines, f"return {result}.to(dtype)"])
    # The weight comes after. What it multiplies has a dtype of its own.
    if not twice:
        first = f"promote_types({x}.dtype, float32)"
    else:
        first = "dtype" if norm.output_dtype.startswith("weight") else f"{x}.dtype"
    lines += [f"first = {first}", f"input = {x}.to(promote_types({x}.dtype, first))"]
    if norm.group_size is None:
        lines += [f"normalized = rms_norm(input, {shape}, None, {eps}).to(first)"]
    else:
        groups = f"input.unflatten(-1, (-1, {norm.group_size}))"
        lines += [f"normalized = rms_norm({groups}, {norm.group_size}, None, {eps}).flatten(-2).to(first)"]
    if weight is not None:
        factor = weight if twice else f"{weight}.to(first)"
        factor = factor if norm.weight_offset == 0.0 else f"({factor} + {norm.weight_offset})"
        lines += [f"normalized = {factor} * normalized"]
    return _function(x, [*lines, "return normalized.to(dtype)"])


def _function(argument: str, lines: list[str]) -> str:
    return "\n    ".join([f"def forward(self, {argument}):", *lines]) + "\n"
