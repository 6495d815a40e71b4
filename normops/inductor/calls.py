"""Reading the graph that Dynamo makes of a program: what a node computes, whichever way it was written.

Such a graph holds the functions and methods of torch that the program called. It is not functional: nodes may write
into tensors, or switch autograd and autocast, so that not every two neighbours may change places.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from normops._operators import takes_operators

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)


class Call(NamedTuple):
    """One of the operations that RMSNorms are made of: elementwise, or a sum or mean, or a cast."""

    name: str
    arguments: tuple[Any, ...]


class _Spellings(NamedTuple):
    functions: tuple[Callable[..., Any], ...]
    methods: tuple[str, ...]
    parameters: tuple[str, ...] = ("input", "other")


_REDUCTION = ("input", "dim", "keepdim")
_SPELLINGS = {
    "add": _Spellings((torch.add, operator.add), ("add", "__add__", "__radd__")),
    "mul": _Spellings((torch.mul, torch.multiply, operator.mul), ("mul", "multiply", "__mul__", "__rmul__")),
    "div": _Spellings((torch.div, torch.divide, torch.true_divide, operator.truediv), ("div", "divide", "__truediv__")),
    "pow": _Spellings((torch.pow, operator.pow), ("pow", "__pow__"), ("input", "exponent")),
    "square": _Spellings((torch.square,), ("square",), ("input",)),
    "sqrt": _Spellings((torch.sqrt,), ("sqrt",), ("input",)),
    "rsqrt": _Spellings((torch.rsqrt,), ("rsqrt",), ("input",)),
    "reciprocal": _Spellings((torch.reciprocal,), ("reciprocal",), ("input",)),
    "mean": _Spellings((torch.mean,), ("mean",), _REDUCTION),
    "sum": _Spellings((torch.sum,), ("sum",), _REDUCTION),
    "silu": _Spellings((F.silu,), (), ("input",)),
    "sigmoid": _Spellings((torch.sigmoid, F.sigmoid), ("sigmoid",), ("input",)),
}
# What rotations arrange and turn columns with, and what scales and shifts. No part of an RMSNorm.
_AFTER_NORMS = {
    "neg": _Spellings((torch.neg, torch.negative, operator.neg), ("neg", "negative", "__neg__"), ("input",)),
    "cat": _Spellings((torch.cat, torch.concat, torch.concatenate), (), ("tensors", "dim")),
    "stack": _Spellings((torch.stack,), (), ("tensors", "dim")),
    "repeat": _Spellings((torch.repeat_interleave,), ("repeat_interleave",), ("input", "repeats", "dim")),
    "addcmul": _Spellings((torch.addcmul,), ("addcmul",), ("input", "tensor1", "tensor2")),
}


def _by_target(spellings: Mapping[str, _Spellings]) -> dict[Any, str]:
    return {target: name for name, (functions, methods, _) in spellings.items() for target in (*functions, *methods)}


_BY_TARGET, _AFTER_BY_TARGET = _by_target(_SPELLINGS), _by_target(_AFTER_NORMS)
_POWERS = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt"}

CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_RESHAPES = (torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze)
_PERMUTES = (torch.transpose, torch.permute, torch.swapaxes, torch.swapdims, torch.movedim, torch.moveaxis)
_SPLITS = (torch.chunk, torch.split, torch.tensor_split)
_SLICES = (torch.narrow, operator.getitem, "narrow")
NORMS = (F.rms_norm, torch.rms_norm)
NORMOPS_NORMS = (
    torch.ops.normops.rms_norm.default,
    torch.ops.normops.gated_rms_norm.default,
    torch.ops.normops.channel_rms_norm.default,
    torch.ops.normops.rms_norm_rope.default,
)
"""The norms of normops that return nothing else."""
UNIT_NORMS = (F.normalize,)
"""The functions that divide by a norm, not by a root of a mean. Dynamo shows what they do instead."""

OPERATIONS = frozenset((*filter(callable, _BY_TARGET), *_RESHAPES, *NORMS, *UNIT_NORMS))
"""The functions of torch that RMSNorms are made of."""
METHODS = frozenset(
    (*(each for each in _BY_TARGET if isinstance(each, str)), *CASTS, "view", *(each.__name__ for each in _RESHAPES))
)
"""The methods of tensors that RMSNorms are made of."""
RESHAPES = frozenset((*_RESHAPES, "view", *(each.__name__ for each in _RESHAPES)))
"""The functions and methods whose results have the elements of their first arguments, in their order."""


def value_of(node: Any) -> Tensor | None:
    """A tensor without data, of the dtype, shape, strides and device of the one that the node returns.

    None if that is no tensor, one that is not strided or that a transform has wrapped, or one that may know torch's
    operators alone.
    """
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided or storage_of(value) is None:
        return None
    return value if takes_operators(type(value)) else None


def storage_of(tensor: Tensor) -> Any:
    """What a tensor's memory is known by; None if it cannot be told, as of one that a transform has wrapped."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def call_of(node: Any) -> Call | None:
    """What the node computes, into a tensor of its own; None if that is something else."""
    if value_of(node) is None or node.op not in ("call_function", "call_method"):
        return None
    name = _BY_TARGET.get(node.target)
    if name is None:
        return Call("cast", node.args[:1]) if _is_cast(node) else None
    parameters = _SPELLINGS[name].parameters
    given = dict(zip(parameters, node.args, strict=False)) | node.kwargs
    if name == "silu" and not given.get("inplace"):
        given.pop("inplace", None)
    if parameters == _REDUCTION:
        given = {"keepdim": False, "dim": given.pop("axis", None)} | given
        given.pop("dtype", None)  # the value has it
    call = _complete(name, node, parameters, given)
    return None if call is None else _simplest(call)


def other_call_of(node: Any) -> Call | None:
    """What the node computes, if that is one of those steps that are joined to norms, and no part of any."""
    if value_of(node) is None or node.op not in ("call_function", "call_method"):
        return None
    name = _AFTER_BY_TARGET.get(node.target)
    if name is None:
        return None
    parameters = _AFTER_NORMS[name].parameters
    return _complete(name, node, parameters, dict(zip(parameters, node.args, strict=False)) | node.kwargs)


def _complete(name: str, node: Node, parameters: tuple[str, ...], given: Mapping[str, Any]) -> Call | None:
    """The call, if it is given all of its parameters and nothing else."""
    if given.keys() != {*parameters} or len(node.args) > len(parameters):
        return None
    return Call(name, tuple(given[parameter] for parameter in parameters))


def _simplest(call: Call) -> Call | None:
    """The same call, but with one name each for squares, for roots and for quotients, however they are written."""
    a, *others = call.arguments
    if call.name == "pow":
        power = _POWERS.get(number(others[0]) or 0.0)
        return None if power is None else Call(power, (a,))
    if call.name == "mul" and a is others[0]:
        return Call("square", (a,))
    return Call("div", (1.0, a)) if call.name == "reciprocal" else call


def _is_cast(node: Node) -> bool:
    """Whether the node casts to another dtype, or to the same one, and not to another device or layout."""
    if node.op != "call_method" or node.target not in CASTS or not node.kwargs.keys() <= {"dtype", "device"}:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    has_flags = any(isinstance(argument, bool) for argument in node.args)
    return before is not None and after is not None and before.device == after.device and not has_flags


def arguments_of_norm(node: Node) -> tuple[Any, ...]:
    """input, normalized_shape, weight and eps of a call of torch's own norm; None for what it leaves out."""
    parameters = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = dict(zip(parameters, node.args, strict=False)) | node.kwargs
    return tuple(map(given.get, parameters))


def is_reshape(node: Node) -> bool:
    """Whether a node's elements are those of its first argument, in their order."""
    return node.target in RESHAPES


def applied(node: Node, tensor: Tensor) -> Tensor:
    """What the node computes with another first argument."""
    others, named = map_arg((node.args[1:], node.kwargs), lambda other: other.meta["example_value"])
    target: Any = getattr(type(tensor), node.target) if isinstance(node.target, str) else node.target
    result: Tensor = target(tensor, *others, **named)
    return result


def called(method: str, node: Node, *arguments: Any) -> Node:
    """A call of a method of the node's value, where its graph inserts nodes."""
    result = node.graph.call_method(method, (node, *arguments))
    result.meta["example_value"] = applied(result, node.meta["example_value"])
    return result


def dims_permuted_by(node: Node) -> tuple[int, ...] | None:
    """For each dimension of the node's value the one of its first argument; None if it does not permute them."""
    if node.target not in _PERMUTES and node.target not in [each.__name__ for each in _PERMUTES]:
        return None
    value = value_of(node.args[0]) if node.args else None
    if value is None:
        return None
    # Its sizes tell dimensions apart, in whichever way the call names them.
    return tuple(applied(node, torch.empty(*range(value.dim()), device="meta")).shape)


class Slice(NamedTuple):
    """The columns ``start``, ``start + step``, ... of a tensor, in all of its rows."""

    nodes: tuple[Node, ...]
    """Those that take them: the slice, and the call that split the tensor in several."""
    source: Node
    start: Any
    step: Any


def slice_of(node: Node) -> Slice | None:
    """The columns that a node's value is made of, if it is a view of some columns of another node's."""
    if node.target not in _SLICES or not node.args or not isinstance(node.args[0], Node):
        return None
    nodes: tuple[Node, ...] = (node,)
    source = node.args[0]
    is_split = source.target in _SPLITS or source.target in [each.__name__ for each in _SPLITS]
    if is_split and node.target is operator.getitem and source.args and isinstance(source.args[0], Node):
        nodes, source = (node, source), source.args[0]
    x, part = value_of(source), value_of(node)
    if x is None or part is None or storage_of(x) is None or storage_of(x) != storage_of(part):
        return None
    # However the call says which columns: the strides tell.
    is_of_last_dim = x.dim() == part.dim() > 0 and all(
        is_equal(a, b)
        for a, b in zip((*x.shape[:-1], *x.stride()[:-1]), (*part.shape[:-1], *part.stride()[:-1]), strict=True)
    )
    offset = part.storage_offset() - x.storage_offset()
    if not is_of_last_dim or not is_equal(x.stride(-1), 1):
        return None
    return Slice(nodes, source, offset, part.stride(-1))


def number(argument: Any) -> float | None:
    """The argument, if it is a number that is known now."""
    return float(argument) if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def specialized(argument: Any) -> float | None:
    """The argument, if it is a number that is known now, or one that the program was given and torch.compile left open.

    The latter counts as what it is now, with a guard: torch then traces again, with the number in the graph and so in
    the keys of its caches. A guard on a number that the program computes does not make it do that.
    """
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    if not isinstance(value, torch.SymFloat):
        return number(argument)
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes the import of sympy

    expression = value.node.expr
    is_given = expression.is_number or (expression.is_Symbol and not free_unbacked_symbols(expression))
    return float(value) if is_given else None


def specialize_what_is_above(argument: Any) -> None:
    """Makes constants of the open numbers that the program was given and computes the argument from."""
    for node in argument.all_input_nodes if isinstance(argument, Node) else ():
        specialize_what_is_above(node)
        specialized(node)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two sizes, or nodes of them, are equal for every size of the inputs. Asking adds no guard."""
    a, b = (size.meta.get("example_value") if isinstance(size, Node) else size for size in (a, b))
    if not isinstance(a, _SYMBOLS) and not isinstance(b, _SYMBOLS):
        return bool(a == b)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes the import of sympy

    return bool(statically_known_true(a == b))


def have_one_shape(a: Tensor, b: Tensor) -> bool:
    """Whether the shapes of two tensors are equal, in the sense of :func:`is_equal`."""
    return a.dim() == b.dim() and all(map(is_equal, a.shape, b.shape))


def order_in_memory(tensor: Tensor, last_dims: int) -> tuple[int, ...] | None:
    """The dimensions in the order that makes the tensor contiguous, of which the last ones stay where they are.

    Dimensions of size 1 stand where a contiguous tensor gives them their strides, if there is such a place.
    """
    order: list[int] = []
    stride: Any = 1
    left = list(range(tensor.dim()))

    def misfit(dim: int) -> tuple[bool, bool]:
        return not is_equal(tensor.stride(dim), stride), not is_equal(tensor.shape[dim], 1)

    while left:
        # Outwards: but for sizes of 1, no two have the stride that comes next.
        dim = min(left[-1:] if len(order) < last_dims else reversed(left), key=misfit)
        if all(misfit(dim)):
            return None
        left.remove(dim)
        order.insert(0, dim)
        stride = stride * tensor.shape[dim]
    return tuple(order)


def length(normalized_shape: Any) -> int:
    """The number of normalized dimensions."""
    return len(normalized_shape.meta["example_value"] if isinstance(normalized_shape, Node) else normalized_shape)


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous for every size of the inputs, as :func:`is_equal` would say."""
    return order_in_memory(tensor, tensor.dim()) is not None
