"""The forward that :func:`normops.patch` gives a module."""

import linecache
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeGuard, cast

import torch
from torch import Tensor, nn

from normops.functional import gated_rms_norm, rms_norm
from normops.recognition import ACTIVATIONS, DTYPES, OUTPUT_DTYPES, Norm

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
        "gated_rms_norm": gated_rms_norm,
        "is_gate": is_gate,
        "gate_beside": gate_beside,
        "promote_types": torch.promote_types,
        "float32": torch.float32,
        "DTYPES": DTYPES,
        "output_dtype": OUTPUT_DTYPES[made_of.norm.output_dtype],
        **ACTIVATIONS,
    }
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    forward = cast(FunctionType, names["forward"])
    forward.normops = made_of  # type: ignore[attr-defined]
    return forward


def _source(norm: Norm, rounding: Rounding) -> str:
    x, gate = norm.argument, None if norm.gate is None else norm.gate.argument
    weight = None if norm.weight is None else f"self.{norm.weight}"
    dtype = f"{x}.dtype" if norm.output_dtype == "input's" else f"output_dtype({x}.dtype, {weight}.dtype)"
    is_unfit = f"{x}.dtype not in DTYPES" + ("" if gate is None else f" or not is_gate({gate}, {x})")
    lines = [f"if {is_unfit}:", f"    return type(self).forward(self, {x if gate is None else f'{x}, {gate}'})"]
    if norm.gate is not None and norm.gate.widens:
        lines += [f"{x} = {x}.to(promote_types({x}.dtype, {gate}.dtype))"]
    lines += [f"dtype = {dtype}"]
    if rounding == "once" or norm.rounds == "once":
        if norm.output_dtype != "input's":
            lines += [f"{x} = {x}.to(promote_types({x}.dtype, dtype))"]
        return _function(norm, [*lines, f"return {_call(norm, weight, gate)}.to(dtype)"])
    # The weight comes after. What it multiplies has a dtype of its own.
    first = "dtype" if norm.output_dtype.startswith("weight") else f"{x}.dtype"
    lines += [f"first = {first}", f"{x} = {x}.to(promote_types({x}.dtype, first))"]
    gate_after = norm.gate is not None and norm.gate.gating.norm_before_gate
    lines += [f"normalized = {_call(norm, None, None if gate_after else gate)}.to(first)"]
    factor = weight if norm.weight_offset == 0.0 else f"({weight} + {norm.weight_offset})"
    lines += [f"normalized = {factor} * normalized"]
    if norm.gate is not None and gate_after:
        wide = f"{gate}.to(promote_types({gate}.dtype, float32))"
        lines += [f"normalized = normalized * {norm.gate.gating.activation}({wide})"]
    return _function(norm, [*lines, "return normalized.to(dtype)"])


def _call(norm: Norm, weight: str | None, gate: str | None) -> str:
    """With this weight, if any, and this gate."""
    x, size = norm.argument, norm.group_size
    eps = f"self.{norm.eps}" if isinstance(norm.eps, str) else norm.eps
    shape = f"{x}.shape[-1:]" if norm.weight is None else f"self.{norm.weight}.shape"
    shape = shape if norm.normalized_shape is None else f"self.{norm.normalized_shape}"
    tensors = [x] if gate is None else [x, f"gate_beside({gate}, {x}.dtype)"]
    end = ""
    if size is not None:
        groups = f".unflatten(-1, (-1, {size}))"
        tensors = [f"{tensor}{groups}" for tensor in tensors]
        weight, shape, end = weight and f"{weight}{groups}", str(size), ".flatten(-2)"
    options = f"weight_offset={norm.weight_offset}"
    if norm.gate is None or gate is None:
        return f"rms_norm({', '.join(tensors)}, {shape}, {weight}, {eps}, {options}){end}"
    activation, norm_before_gate = norm.gate.gating
    options += f", activation={activation!r}, norm_before_gate={norm_before_gate}"
    return f"gated_rms_norm({', '.join(tensors)}, {shape}, {weight}, {eps}, {options}){end}"


def _function(norm: Norm, lines: list[str]) -> str:
    arguments = norm.argument
    if norm.gate is not None:
        arguments += f", {norm.gate.argument}" + ("=None" if norm.gate.is_optional else "")
    return "\n    ".join([f"def forward(self, {arguments}):", *lines]) + "\n"


def is_gate(gate: object, input: Tensor) -> TypeGuard[Tensor]:
    """Whether the operator can take it, perhaps in another dtype; it may be missing, or want to be expanded."""
    return isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.shape == input.shape


def gate_beside(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype that the operator takes beside that of the input: the same, or float32 where the other has 16 bits."""
    halves = (torch.float16, torch.bfloat16)
    one_is_wide = (gate.dtype == torch.float32 and dtype in halves) or (gate.dtype in halves and dtype == torch.float32)
    return gate if gate.dtype == dtype or one_is_wide else gate.to(torch.promote_types(dtype, torch.float32))
