"""Giving the additions around the norms to normops, in a graph of ATen's: that of a forward or of a backward."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from normops._operators import by_name
from normops.inductor.calls import have_one_shape, is_contiguous

_aten, _normops = torch.ops.aten, torch.ops.normops


def fuse_additions(graph: Graph) -> None:
    """Makes one operator of ``x + residual`` and its norm, and one of a backward and an addition to its grad_input."""
    for node in list(graph.nodes):
        if node.target is _normops.rms_norm.default:
            _fuse_forward(node)
        elif node.target is _normops.rms_norm_backward.default:
            _fuse_backward(node)


def _fuse_forward(norm: Node) -> None:
    add: Any = norm.args[0]
    # Inductor computes elementwise summands within the addition; before an operator it has to write them to memory.
    if not _adds_two_tensors(add) or any(_is_elementwise(summand, add) for summand in add.args):
        return
    place = min(add.users)
    if not all(node < place for node in norm.all_input_nodes) or _may_write(add, norm):
        return
    values = norm.meta["val"], add.meta["val"]
    with norm.graph.inserting_before(place):
        call = norm.graph.call_function(_normops.add_rms_norm.default, (*add.args, *norm.args[1:]), norm.kwargs)
        output, total = _unpacked(call, values)
    _replace({add: total, norm: output})


def _fuse_backward(backward: Node) -> None:
    grads: dict[Any, Node] = {grad.args[1]: grad for grad in backward.users}
    arguments = by_name(_normops.rms_norm_backward.default, backward.args, backward.kwargs)
    if arguments.get("grad_residual") is not None or 0 not in grads or len(grads[0].users) != 1:
        return
    (add,) = grads[0].users
    if not _adds_two_tensors(add):
        return
    residual: Any = add.args[1] if add.args[0] is grads[0] else add.args[0]
    place = min(user for grad in grads.values() for user in grad.users)
    if residual is grads[0] or not residual < place or _may_write(backward, add):
        return
    values = add.meta["val"], *backward.meta["val"][1:]
    with backward.graph.inserting_before(place):
        arguments["grad_residual"] = residual
        call = backward.graph.call_function(_normops.rms_norm_backward.default, (), arguments)
        unpacked = _unpacked(call, values)
    _replace({backward: call, **{grad: unpacked[i] for i, grad in grads.items()}, add: unpacked[0]})


def _adds_two_tensors(node: Any) -> bool:
    """Whether a node adds two tensors of one dtype, shape and device, and the result has the strides of normops'."""
    if not isinstance(node, Node) or node.target is not _aten.add.Tensor or node.kwargs:
        return False
    total, *summands = (n.meta.get("val") if isinstance(n, Node) else None for n in (node, *node.args))
    return isinstance(total, Tensor) and is_contiguous(total) and all(_are_alike(total, other) for other in summands)


def _are_alike(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.device == b.device and have_one_shape(a, b)


def _is_elementwise(node: Node, user: Node) -> bool:
    """Whether a node is one that Inductor computes in a loop with its only user."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and list(node.users) == [user]


def _may_write(first: Node, last: Node) -> bool:
    """Whether a node from the one to the other writes to tensors, so that these two may not change places."""
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
