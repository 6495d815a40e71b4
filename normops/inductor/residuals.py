"""Fuses additions before and after norms with the norms' operators, in a graph of ATen's: a forward or a backward."""

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from normops._operators import by_name
from normops.inductor import ModelRounding
from normops.inductor.calls import HALVES, have_one_shape, is_contiguous, number

_aten, _normops = torch.ops.aten, torch.ops.normops


class _Sum(NamedTuple):
    """An addition that computes ``alpha * input + residual``."""

    add: Node
    input: Node
    residual: Node
    alpha: float
    product: Node | None
    """The node of ``alpha * input``, which is rounded separately; None if the addition computes it."""


def fuse_additions(graph: Graph, rounding: ModelRounding) -> None:
    """Fuses a residual's addition with the norm of the sum, and a norm's backward with the addition to its result.

    ``rounding="original"`` excludes sums whose 16-bit results would change: a model rounds the gradient that a norm
    returns before it adds to it, and the operator rounds only the sum.
    """
    for node in list(graph.nodes):
        if node.target is _normops.rms_norm.default:
            _fuse_forward(node, rounding)
        elif node.target is _normops.rms_norm_backward.default:
            _fuse_backward(node, rounding)


def _fuse_forward(norm: Node, rounding: ModelRounding) -> None:
    found = _sum_of(norm.args[0])
    arguments = by_name(_normops.rms_norm.default, norm.args, norm.kwargs)
    options = None if found is None else _options_of(found, arguments, rounding)
    if found is None or options is None or arguments.pop("bias", None) is not None:
        return
    if arguments.get("weight") is found.add:
        return
    add, first = found.add, found.product or found.add
    place = min(add.users)
    if not all(node < place for node in norm.all_input_nodes) or _may_write(first, norm):
        return
    values = norm.meta["val"], add.meta["val"]
    arguments |= {"input": found.input, "residual": found.residual, **options}
    with norm.graph.inserting_before(place):
        call = norm.graph.call_function(_normops.add_rms_norm.default, (), arguments)
        output, total = _unpacked(call, values)
    _replace({add: total, norm: output})
    if found.product is not None:
        norm.graph.erase_node(found.product)


def _sum_of(add: Any) -> _Sum | None:
    if not isinstance(add, Node) or add.target is not _aten.add.Tensor:
        return None
    arguments: Any = add.args
    a, b = arguments
    alpha = number(add.kwargs.get("alpha", 1.0))
    if alpha is None or not math.isfinite(alpha):
        return None
    found = _Sum(add, a, b, 1.0, None) if alpha == 1.0 else _Sum(add, b, a, alpha, None)
    for product, residual in ((a, b), (b, a)):
        if alpha == 1.0 and (scaled := _scaled(product, add)) is not None:
            input, factor = scaled
            found = _Sum(add, input, residual, factor, product)
    if not _is_like(add, found.input, found.residual):
        return None
    # Inductor fuses elementwise summands with the addition; for an operator it would write them to memory.
    is_computed = _is_elementwise(found.input, found.product or add) or _is_elementwise(found.residual, add)
    return None if is_computed else found


def _scaled(product: Any, user: Node) -> tuple[Node, float] | None:
    """Returns a tensor and its factor, if a node computes their product for this user alone."""
    if not isinstance(product, Node) or product.target is not _aten.mul.Tensor or list(product.users) != [user]:
        return None
    for tensor, factor in (product.args, product.args[::-1]):
        if isinstance(tensor, Node) and (alpha := number(factor)) is not None and math.isfinite(alpha):
            return tensor, alpha
    return None


def _options_of(found: _Sum, norm: Mapping[str, Any], rounding: ModelRounding) -> dict[str, Any] | None:
    """Returns the arguments of a scaled sum; None, if the operator would not round the product as required."""
    options: dict[str, Any] = {}
    if found.alpha == 1.0:
        return options
    casts = norm.get("rounding") == "llama"
    if rounding == "original":
        if found.product is None:  # only on some devices torch.add rounds it separately
            return None
        if found.add.meta["val"].dtype not in HALVES:
            options["rounding"] = "llama"  # the norm itself rounds only 16-bit tensors
        elif not casts:
            return None
    elif casts and found.product is None:
        return None
    return {**options, "alpha": found.alpha}


def _fuse_backward(backward: Node, rounding: ModelRounding) -> None:
    grads: dict[Any, Node] = {grad.args[1]: grad for grad in backward.users}
    arguments = by_name(_normops.rms_norm_backward.default, backward.args, backward.kwargs)
    if arguments.get("grad_residual") is not None or 0 not in grads or len(grads[0].users) != 1:
        return
    (add,) = grads[0].users
    if not _adds_two_tensors(add) or (rounding == "original" and add.meta["val"].dtype in HALVES):
        return
    residual: Any = add.args[1] if add.args[0] is grads[0] else add.args[0]
    place = min(user for grad in grads.values() for user in grad.users)
    if residual in grads.values() or not residual < place or _may_write(backward, add):
        return
    values = add.meta["val"], *backward.meta["val"][1:]
    with backward.graph.inserting_before(place):
        arguments["grad_residual"] = residual
        call = backward.graph.call_function(_normops.rms_norm_backward.default, (), arguments)
        unpacked = _unpacked(call, values)
    _replace({backward: call, **{grad: unpacked[i] for i, grad in grads.items()}, add: unpacked[0]})


def _adds_two_tensors(node: Any) -> bool:
    """Returns whether a node adds two tensors of one dtype, shape and device, with normops' strides in the result."""
    if not isinstance(node, Node) or node.target is not _aten.add.Tensor or node.kwargs:
        return False
    return _is_like(node, *node.args)


def _is_like(total: Node, *summands: Any) -> bool:
    """Returns whether a sum has the dtype, shape and device of its summands, and the strides of normops' results."""
    value, *others = (n.meta.get("val") if isinstance(n, Node) else None for n in (total, *summands))
    return isinstance(value, Tensor) and is_contiguous(value) and all(_are_alike(value, other) for other in others)


def _are_alike(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.device == b.device and have_one_shape(a, b)


def _is_elementwise(node: Node, user: Node) -> bool:
    """Returns whether Inductor fuses a node with its only user."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and list(node.users) == [user]


def _may_write(first: Node, last: Node) -> bool:
    """Returns whether a node between these two writes to tensors, so that they may not be swapped."""
    node = first
    while node is not last:
        if node.op == "call_function" and node.target is not operator.getitem:
            schema = getattr(node.target, "_schema", None)
            if schema is None or schema.is_mutable:
                return True
        node = node.next
    return False


def _unpacked(call: Node, values: tuple[Tensor, ...]) -> list[Node]:
    call.meta["val"] = values
    nodes = [call.graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    return nodes


def _replace(replacements: Mapping[Node, Node]) -> None:
    for old, new in replacements.items():
        old.replace_all_uses_with(new)
    for old in sorted(replacements, reverse=True):
        old.graph.erase_node(old)
