"""Reads the graph that Dynamo traces: which operation a node computes, in whichever form the program wrote it.

Such a graph contains the functions and methods of torch that the program called. It is not functional: nodes may write
to tensors, or switch autograd and autocast, so that two neighbours may not always be swapped.
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
    """One of the operations in RMSNorms: elementwise, a sum or mean, or a cast."""

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
# Operations in rotations, scales and shifts, and not in an RMSNorm.
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
"""The norms of normops with one result."""
UNIT_NORMS = (F.normalize,)
"""The functions that divide by a norm, not by the root of a mean. Dynamo's graphs contain their operations instead."""

OPERATIONS = frozenset((*filter(callable, _BY_TARGET), *_RESHAPES, *NORMS, *UNIT_NORMS))
"""The functions of torch in RMSNorms."""
METHODS = frozenset(
    (*(each for each in _BY_TARGET if isinstance(each, str)), *CASTS, "view", *(each.__name__ for each in _RESHAPES))
)
"""The methods of tensors in RMSNorms."""
RESHAPES = frozenset((*_RESHAPES, "view", *(each.__name__ for each in _RESHAPES)))
"""The functions and methods whose results have the elements of their first argument, in the same order."""


def value_of(node: Any) -> Tensor | None:
    """Returns a tensor without data that has the dtype, shape, strides and device of the node's result.

    Returns None if the result is not a strided tensor, if a transform has wrapped it, or if its class may support only
    torch's operators.
    """
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided or storage_of(value) is None:
        return None
    return value if takes_operators(type(value)) else None


def storage_of(tensor: Tensor) -> Any:
    """Returns an identifier of a tensor's memory; None if unknown, as for tensors that a transform has wrapped."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def call_of(node: Any) -> Call | None:
    """Returns the operation that the node computes into a new tensor; None if it is not one of RMSNorms."""
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
        given.pop("dtype", None)  # the dtype of the node's value
    call = _complete(name, node, parameters, given)
    return None if call is None else _simplest(call)


def other_call_of(node: Any) -> Call | None:
    """Returns the operation that the node computes, if it is one of the other operations that are fused with norms."""
    if value_of(node) is None or node.op not in ("call_function", "call_method"):
        return None
    name = _AFTER_BY_TARGET.get(node.target)
    if name is None:
        return None
    parameters = _AFTER_NORMS[name].parameters
    return _complete(name, node, parameters, dict(zip(parameters, node.args, strict=False)) | node.kwargs)


def _complete(name: str, node: Node, parameters: tuple[str, ...], given: Mapping[str, Any]) -> Call | None:
    """Returns the call, if it has all of its parameters and no other arguments."""
    if given.keys() != {*parameters} or len(node.args) > len(parameters):
        return None
    return Call(name, tuple(given[parameter] for parameter in parameters))


def _simplest(call: Call) -> Call | None:
    """Returns the same call with one spelling for squares, for roots and for quotients."""
    a, *others = call.arguments
    if call.name == "pow":
        power = _POWERS.get(number(others[0]) or 0.0)
        return None if power is None else Call(power, (a,))
    if call.name == "mul" and a is others[0]:
        return Call("square", (a,))
    return Call("div", (1.0, a)) if call.name == "reciprocal" else call


def _is_cast(node: Node) -> bool:
    """Returns whether the node casts its input, also to the same dtype, and changes neither device nor layout."""
    if node.op != "call_method" or node.target not in CASTS or not node.kwargs.keys() <= {"dtype", "device"}:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    has_flags = any(isinstance(argument, bool) for argument in node.args)
    return before is not None and after is not None and before.device == after.device and not has_flags


def arguments_of_norm(node: Node) -> tuple[Any, ...]:
    """Returns input, normalized_shape, weight and eps of a call of torch's own norm; None for each omitted one."""
    parameters = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = dict(zip(parameters, node.args, strict=False)) | node.kwargs
    return tuple(map(given.get, parameters))


def arguments_of_unit_norm(node: Node) -> dict[str, Any]:
    """Returns the arguments of a call of F.normalize by name, including its defaults."""
    given = dict(zip(("input", "p", "dim", "eps", "out"), node.args, strict=False)) | node.kwargs
    return {"p": 2.0, "dim": 1, "eps": 1e-12, "out": None, **given}


def is_reshape(node: Node) -> bool:
    """Returns whether a node's result has the elements of its first argument, in the same order."""
    return node.target in RESHAPES


def applied(node: Node, tensor: Tensor) -> Tensor:
    """Returns the result of the node for another first argument."""
    others, named = map_arg((node.args[1:], node.kwargs), lambda other: other.meta["example_value"])
    target: Any = getattr(type(tensor), node.target) if isinstance(node.target, str) else node.target
    result: Tensor = target(tensor, *others, **named)
    return result


def called(method: str, node: Node, *arguments: Any) -> Node:
    """Inserts a call of a method of the node's value."""
    result = node.graph.call_method(method, (node, *arguments))
    result.meta["example_value"] = applied(result, node.meta["example_value"])
    return result


def dims_permuted_by(node: Node) -> tuple[int, ...] | None:
    """Returns for each dimension of the node's value the one of its first argument; None if it is no permutation."""
    if node.target not in _PERMUTES and node.target not in [each.__name__ for each in _PERMUTES]:
        return None
    value = value_of(node.args[0]) if node.args else None
    if value is None:
        return None
    # Distinct sizes identify the dimensions, in whichever way the call names them.
    return tuple(applied(node, torch.empty(*range(value.dim()), device="meta")).shape)


class Slice(NamedTuple):
    """The columns ``start``, ``start + step``, ... of a tensor, in all of its rows."""

    nodes: tuple[Node, ...]
    """The slice, and the call that split the tensor, if any."""
    source: Node
    start: Any
    step: Any


def slice_of(node: Node) -> Slice | None:
    """Returns the columns in a node's value, if it is a view of some columns of another node's."""
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
    # The strides identify the columns, for every spelling of the call.
    is_of_last_dim = x.dim() == part.dim() > 0 and all(
        is_equal(a, b)
        for a, b in zip((*x.shape[:-1], *x.stride()[:-1]), (*part.shape[:-1], *part.stride()[:-1]), strict=True)
    )
    offset = part.storage_offset() - x.storage_offset()
    if not is_of_last_dim or not is_equal(x.stride(-1), 1):
        return None
    return Slice(nodes, source, offset, part.stride(-1))


def number(argument: Any) -> float | None:
    """Returns the argument if it is a known number, else None."""
    return float(argument) if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def specialized(argument: Any) -> float | None:
    """Returns the argument if it is a known number, or an argument of the program that torch.compile left open.

    An open number is specialized with a guard: torch then traces again, with the number in the graph and so in the keys
    of its caches. A guard on a number that the program computes would not cause that.
    """
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    if not isinstance(value, torch.SymFloat):
        return number(argument)
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes the import of sympy

    expression = value.node.expr
    is_given = expression.is_number or (expression.is_Symbol and not free_unbacked_symbols(expression))
    return float(value) if is_given else None


def specialize_what_is_above(argument: Any) -> None:
    """Specializes the open numbers that are arguments of the program, and that the argument is computed from."""
    for node in argument.all_input_nodes if isinstance(argument, Node) else ():
        specialize_what_is_above(node)
        specialized(node)


def is_equal(a: Any, b: Any) -> bool:
    """Returns whether two sizes, or nodes of them, are equal for every size of the inputs. Adds no guard."""
    a, b = (size.meta.get("example_value") if isinstance(size, Node) else size for size in (a, b))
    if not isinstance(a, _SYMBOLS) and not isinstance(b, _SYMBOLS):
        return bool(a == b)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes the import of sympy

    return bool(statically_known_true(a == b))


def have_one_shape(a: Tensor, b: Tensor) -> bool:
    """Returns whether the shapes of two tensors are equal, as defined by :func:`is_equal`."""
    return a.dim() == b.dim() and all(map(is_equal, a.shape, b.shape))


def order_in_memory(tensor: Tensor, last_dims: int) -> tuple[int, ...] | None:
    """Returns the order of dimensions that makes the tensor contiguous and keeps the last ones last, or None.

    Dimensions of size 1 have the place where a contiguous tensor would have their strides, if there is such a place.
    """
    order: list[int] = []
    stride: Any = 1
    left = list(range(tensor.dim()))

    def misfit(dim: int) -> tuple[bool, bool]:
        return not is_equal(tensor.stride(dim), stride), not is_equal(tensor.shape[dim], 1)

    while left:
        # From the innermost dimension outwards: only one dimension has the next stride, except for sizes of 1.
        dim = min(left[-1:] if len(order) < last_dims else reversed(left), key=misfit)
        if all(misfit(dim)):
            return None
        left.remove(dim)
        order.insert(0, dim)
        stride = stride * tensor.shape[dim]
    return tuple(order)


def length(normalized_shape: Any) -> int:
    """Returns the number of normalized dimensions."""
    return len(normalized_shape.meta["example_value"] if isinstance(normalized_shape, Node) else normalized_shape)


def is_contiguous(tensor: Tensor) -> bool:
    """Returns whether a tensor is contiguous for every size of the inputs, as defined by :func:`is_equal`."""
    return order_in_memory(tensor, tensor.dim()) is not None
