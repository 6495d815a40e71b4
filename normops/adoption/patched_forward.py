"""The forward that :func:`normops.patch` gives a module."""

import linecache
from collections.abc import Callable
from itertools import count, pairwise, product
from types import CodeType, FunctionType
from typing import Any, TypeGuard
from weakref import finalize

import torch
from torch import Tensor, nn

from normops._operators import TENSORS
from normops.adoption.following import PROPERTIES
from normops.adoption.guards import conditions, names_of
from normops.adoption.norm import ACTIVATIONS, OUTPUT_DTYPES, Norm, Saved
from normops.functional import CastingMode, gated_rms_norm, rms_norm
from normops.inductor import Rounding
from normops.inductor.calls import DTYPES, HALVES, METHODS

_numbers = count()


def forward_of(cls: type[nn.Module], norm: Norm, rounding: Rounding) -> FunctionType:
    """The function of a patched forward.

    It is compiled from source, as a dataclass's methods are. Its arguments then get the names that callers know: in the
    compiled code, where they cannot hide what the source calls.
    """
    own: Any = cls.forward
    names: dict[str, Any] = {
        "own_forward": own_forward,
        "rms_norm": rms_norm,
        "gated_rms_norm": gated_rms_norm,
        "is_gate": is_gate,
        "gate_beside": gate_beside,
        "promote_types": torch.promote_types,
        "is_tracing": torch.jit.is_tracing,  # type: ignore[attr-defined]
        "is_grad_enabled": torch.is_grad_enabled,
        "is_compiling": torch.compiler.is_compiling,
        "is_exporting": torch.compiler.is_exporting,
        "is_in_onnx_export": _is_in_onnx_export,
        "is_served": _is_served,
        "may_autocast": _may_autocast,
        "order_of": _order_of,
        "copied": _copies(norm),
        "writable": _writable,
        "float32": torch.float32,
        "DTYPES": DTYPES,
        "ALLOWED": norm.dtypes,
        "PLAIN": (Tensor, nn.Parameter),
        "output_dtype": OUTPUT_DTYPES[norm.output_dtype],
        **ACTIVATIONS,
        **names_of(norm.guards),
    }
    source, file = _source(norm, rounding), f"<normops.patch {next(_numbers)}: {norm}>"
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    code: CodeType = names["forward"].__code__
    given = own.__code__.co_varnames[: own.__code__.co_argcount]
    others = [name + "_" * max(map(len, given)) for name in code.co_varnames[len(given) :]]
    code = code.replace(co_varnames=(*given, *others))
    forward = names["forward"] = FunctionType(code, names, "forward", own.__defaults__)
    finalize(forward, linecache.cache.pop, file, None).atexit = False
    return forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that the class of a module has now, bound as Python would bind it."""
    cls = type(module)
    forward = next(vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base))
    return forward.__get__(module, cls) if hasattr(type(forward), "__get__") else forward


def _source(norm: Norm, rounding: Rounding) -> str:
    """The source of a patched forward: conditions, what is computed if they hold, and else the module's own forward."""
    parameters = _parameters(norm)
    weight = None if norm.weight is None else "_weight"
    gate = None if norm.gate is None else "gate"
    arguments = ", ".join(_ARGUMENTS[: len(norm.arguments)])
    # Dynamo knows no descriptors.
    own = f"return type(self).forward(self, {arguments}) if is_compiling() else own_forward(self)({arguments})"
    lines = [f"def forward(self, {arguments}):", "cls, own = type(self), self.__dict__"]
    for parameter, name in parameters.items():  # nn.Module.__getattr__ would take as long as ten guards
        is_hidden = f"{name!r} in own or hasattr(cls, {name!r})"
        lines += [f"{parameter} = self.{name} if {is_hidden} else self._parameters.get({name!r})"]
    lines += ["try:", "    _holds = (", *(f"    {'and ' * (i > 0)}{each}" for i, each in enumerate(_conditions(norm)))]
    # What was there when it was patched may be gone.
    lines += ["    )", "except (AttributeError, KeyError, ValueError):", "    _holds = False"]
    lines += ["if not _holds:", f"    {own}", *_by_order(norm, own), *_copying(norm)]
    if norm.gate is not None and norm.gate.widens:
        lines += ["x = x.to(promote_types(x.dtype, gate.dtype))"]
    of_parameter = f"{next(iter(parameters), None)}.dtype"
    dtype = "x.dtype" if norm.output_dtype == "input's" else f"output_dtype(x.dtype, {of_parameter})"
    casting_mode: CastingMode = "gemma" if rounding == "once" or norm.rounds == "once" else "llama"
    call = _call(norm, weight, gate, casting_mode)
    if norm.bias is not None and rounding == "original":
        # What is rounded before the bias is added was looked at where dtypes are equal.
        return "\n    ".join([*lines, f"if x.dtype != {of_parameter}:", f"    {own}", f"return {call}"]) + "\n"
    lines += [f"_dtype = {dtype}"]
    if casting_mode == "llama" or norm.output_dtype != "input's":
        # If input and weight have one dtype, so has the output, whatever the rule.
        lines.insert(-1, f"if x.dtype == {of_parameter}:\n        return {call}")
    if casting_mode == "gemma":
        if norm.output_dtype != "input's":
            lines += ["x = x.to(promote_types(x.dtype, _dtype))"]
            call = f"{call}.to(_dtype)"
        return "\n    ".join([*lines, f"return {call}"]) + "\n"
    # The product with a weight of another dtype is rounded to no dtype that the operator rounds to. What it multiplies
    # has a dtype of its own.
    first = "_dtype" if norm.output_dtype.startswith("weight") else "x.dtype"
    lines += [f"_first = {first}", "x = x.to(promote_types(x.dtype, _first))"]
    gate_after = norm.gate is not None and norm.gate.gating.norm_before_gate
    lines += [f"_normalized = {_call(norm, None, None if gate_after else gate, 'gemma')}.to(_first)"]
    factor = weight if norm.weight_offset == 0.0 else f"({_widened(str(weight))} + {norm.weight_offset})"
    lines += [f"_normalized = {factor} * _normalized"]
    if norm.gate is not None and gate_after:
        lines += [f"_normalized = _normalized * {norm.gate.gating.activation}({_widened('gate')})"]
    return "\n    ".join([*lines, "return _normalized.to(_dtype)"]) + "\n"


_ARGUMENTS = ("x", "gate")


def _parameters(norm: Norm) -> dict[str, str]:
    """The names of the parameters, by those of their variables. All have the shape and the dtype of the first one."""
    names = {"_weight": norm.weight, "_bias": norm.bias}
    return {variable: name for variable, name in names.items() if name is not None}


def _widened(tensor: str) -> str:
    return f"{tensor}.to(promote_types({tensor}.dtype, float32))"


def _conditions(norm: Norm) -> list[str]:
    """The conditions under which the module's own forward computes what it was seen to compute."""
    conditions_ = [
        "'__reduce_ex__' in own",
        _is_tensor("x"),
        "not is_tracing()",
        "not (is_exporting() and is_in_onnx_export())",
        "x.dtype in DTYPES",
        f"x.dim() in {norm.dims}",
    ]
    shape = "" if norm.shape is None else f" == {norm.shape}"
    if parameters := [*_parameters(norm)]:
        first, *others = parameters
        conditions_ += [_is_tensor(first), f"{first}.dtype in DTYPES"]
        if norm.parameter_dims == 1:  # a slice of a shape would take longer
            size = "" if norm.shape is None else f" == {norm.shape[0]}"
            conditions_ += [f"{first}.dim() == 1", f"x.size(-1) == (_shape := {first}.size(0)){size}"]
        else:
            conditions_ += [f"x.shape[-{norm.parameter_dims}:] == (_shape := {first}.shape){shape}"]
        for other in others:
            conditions_ += [_is_tensor(other), f"({other}.dtype, {other}.shape) == ({first}.dtype, {first}.shape)"]
    elif norm.shape is not None:
        conditions_ += [f"x.shape[-{len(norm.shape)}:]{shape}"]
    tensors = ["x", *parameters[:1]]
    if norm.gate is not None:
        conditions_ += ["is_gate(gate, x)", _is_tensor("gate")]
        tensors += ["gate"]
    if norm.dtypes is not None:
        conditions_ += [f"({', '.join(f'{each}.dtype' for each in tensors)},) in ALLOWED"]
    if not norm.takes_empty:
        conditions_ += ["x.numel() > 0"]
    if isinstance(norm.eps, str):
        conditions_ += [f"type(self.{norm.eps}) is float", f"self.{norm.eps} == self.{norm.eps}"]
    conditions_ += conditions(norm.guards)
    if norm.autocasts:
        conditions_ += ["not may_autocast(x)"]
    return conditions_


def _is_tensor(name: str) -> str:
    return f"(type({name}) in PLAIN or is_served(type({name})))"


def _by_order(norm: Norm, own: str) -> list[str]:
    """What is done with inputs that are not contiguous.

    The result of normops is contiguous; that of the module's own forward may have the order in memory of its input.
    """
    last_dims = max(norm.parameter_dims, norm.normalized_dims)
    if not norm.takes_gaps:
        tensors = _ARGUMENTS[: len(norm.arguments)]
        return [f"if not ({' and '.join(f'{each}.is_contiguous()' for each in tensors)}):", f"    {own}"]
    if norm.gate is not None:
        return [
            "if not (x.is_contiguous() and gate.is_contiguous()):",
            f"    if order_of(x, {last_dims}) is not None or order_of(gate, {last_dims}) is not None:",
            f"        {own}",
        ]
    lines = ["if not x.is_contiguous():", f"    _order = order_of(x, {last_dims})"]
    if norm.order != "kept":
        return [
            *lines,
            f"    if {'_order is not None' if norm.order == 'unknown' else '_order == ()'}:",
            f"        {own}",
        ]
    again = "writable(forward(self, x.permute(_order)).permute([*map(_order.index, range(len(_order)))]))"
    return [*lines, "    if _order == ():", f"        {own}", "    if _order is not None:", f"        return {again}"]


def _copying(norm: Norm) -> list[str]:
    tensors = ", ".join([*_ARGUMENTS[: len(norm.arguments)], *[*_parameters(norm)][:1]])
    return ["if is_grad_enabled() and not is_compiling():", f"    {tensors}, *_ = copied({tensors})"]


def _copies(norm: Norm) -> Callable[..., tuple[Tensor, ...]]:
    """A function that copies those tensors that normops saves for the backward as they are, and the module does not.

    A module that computes in another dtype saves a copy in that one, so that programs may write into the tensor itself
    afterwards. Compiled code gets no copies from here: Inductor removes the copy of an input of its graph, and would
    save what is there after the write. There the passes make copies, as they know which tensors are inputs.
    """
    count = 1 + (norm.gate is not None) + (norm.parameter_dims > 0)
    needed = {
        (*dtypes, *requires): which
        for dtypes in product(DTYPES, repeat=count)
        for requires in product((False, True), repeat=count)
        if any(which := _needed(norm, requires, *map(_class_of, dtypes)))
    }

    def copied(*tensors: Tensor) -> tuple[Tensor, ...]:
        which = needed.get((*[tensor.dtype for tensor in tensors], *[tensor.requires_grad for tensor in tensors]))
        if which is None:
            return tensors
        return tuple([tensor.clone() if copies else tensor for tensor, copies in zip(tensors, which, strict=True)])

    return copied


def _needed(norm: Norm, requires: tuple[bool, ...], dtype: torch.dtype, *others: torch.dtype) -> tuple[bool, ...]:
    if not any(requires):
        return (False,)
    weight_dtype = others[-1] if norm.parameter_dims > 0 else dtype
    is_known = norm.gate is None or others[0] == dtype  # it was watched only with a gate of the input's dtype
    is_saved = [is_known and Saved(dtype, weight_dtype, requires, i) in norm.saves for i in range(len(requires))]
    # normops saves the weight only for the gradients of the other tensors, and no bias.
    needs = [True] * len(requires)
    if norm.parameter_dims > 0:
        needs[-1] = norm.weight is not None and any(requires[:-1])
    return tuple(need and not saved for need, saved in zip(needs, is_saved, strict=True))


def _class_of(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in HALVES else dtype


def _is_in_onnx_export() -> bool:
    """Whether torch.onnx exports, which knows what modules are made of themselves, and not our operators."""
    return torch.onnx.is_in_onnx_export()


def _is_served(cls: type) -> bool:
    """Whether tensors of a class, not plain ones, take our operators, and have no methods of their own.

    Others may know nothing but torch's operators, and nobody has looked at what their methods compute.
    """
    if not issubclass(cls, Tensor) or not TENSORS.isdisjoint(cls.__mro__):
        return issubclass(cls, Tensor)
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    is_plain = function in (nn.Parameter.__torch_function__, vars(Tensor)["__torch_function__"].__func__)
    is_plain &= cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    names = (*METHODS, *PROPERTIES, *_SPECIAL)
    return is_plain and all(getattr(cls, name) is getattr(Tensor, name) for name in names)


_SPECIAL = (
    "__getattribute__",
    *(f"__{r}{each}__" for each in ("add", "sub", "mul", "truediv", "pow") for r in ("", "r")),
)


# As by torch.compiler.assume_constant_result, which imports torch._dynamo. That would take the first to be False.
_is_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_served._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _may_autocast(tensor: Tensor) -> bool:
    """Whether autocast may cast for an operation of a norm, which it does only on CUDA."""
    return tensor.is_cuda and torch.is_autocast_enabled("cuda")


def _writable(view: Tensor) -> Tensor:
    """The same, which may be written to once gradients are recorded again, unlike a view made where they are not."""
    return view if torch.is_grad_enabled() else view.detach()


def _order_of(tensor: Tensor, last_dims: int) -> tuple[int, ...] | None:
    """The dimensions in the order in which they lie in memory, or None if they lie in their own order.

    Empty, if nobody knows in which order the result of the module's own operations would lie: if rows lie in another
    order and also apart or over each other, or if the dimensions of a row do not come last.
    """
    sizes, strides = tensor.shape, tensor.stride()
    dims = [dim for dim in range(tensor.dim()) if sizes[dim] != 1]
    if any(strides[dim] == 0 for dim in dims):
        return ()
    if all(strides[a] >= strides[b] for a, b in pairwise(dims)):
        return None
    order: list[int] = []
    for dim in range(tensor.dim()):  # not sorted(), as Dynamo cannot sort sizes that it does not know
        place = len(order)
        while place > 0 and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    is_kept = order[-last_dims:] == [*range(tensor.dim() - last_dims, tensor.dim())]
    return tuple(order) if is_kept and tensor.permute(order).is_contiguous() else ()


def _call(norm: Norm, weight: str | None, gate: str | None, casting_mode: CastingMode) -> str:
    """The source of a call of normops, with this weight and this gate, if there are any."""
    size = norm.group_size
    eps = f"self.{norm.eps}" if isinstance(norm.eps, str) else norm.eps
    shape = "_shape" if norm.normalized_dims == norm.parameter_dims else f"x.shape[-{norm.normalized_dims}:]"
    tensors = ["x"] if gate is None else ["x", f"gate_beside({gate}, x.dtype)"]
    bias = None if norm.bias is None else "_bias"
    result = "{}"
    if size is not None:
        groups = f".unflatten(-1, (-1, {size}))"
        tensors = [f"{tensor}{groups}" for tensor in tensors]
        weight, bias = weight and f"{weight}{groups}", bias and f"{bias}{groups}"
        shape, result = str(size), "writable({}.flatten(-2))"
    options = f"weight_offset={norm.weight_offset}, casting_mode={casting_mode!r}"
    if norm.gate is None or gate is None:
        options += "" if bias is None else f", bias={bias}"
        return result.format(f"rms_norm({', '.join(tensors)}, {shape}, {weight}, {eps}, {options})")
    activation, norm_before_gate = norm.gate.gating
    options += f", activation={activation!r}, norm_before_gate={norm_before_gate}"
    return result.format(f"gated_rms_norm({', '.join(tensors)}, {shape}, {weight}, {eps}, {options})")


def is_gate(gate: object, input: Tensor) -> TypeGuard[Tensor]:
    """Whether the operator can take the gate, perhaps cast; it cannot if that is None, or has another shape."""
    return isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.shape == input.shape


def gate_beside(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """The gate, cast if the operator does not take its dtype beside the input's.

    It takes the same dtype, or float32 beside one of 16 bits.
    """
    one_is_wide = (gate.dtype == torch.float32 and dtype in HALVES) or (gate.dtype in HALVES and dtype == torch.float32)
    return gate if gate.dtype == dtype or one_is_wide else gate.to(torch.promote_types(dtype, torch.float32))
