"""Analyzes the side effects of nodes in Dynamo's graphs, and whether other nodes may be swapped with them.

Answers are conservative: an operation that is not torch's, or whose schema does not declare its effects, may have any.
"""

import operator
from collections.abc import Iterator
from functools import lru_cache
from inspect import isbuiltin, isfunction, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.graph import magic_methods
from torch.utils._pytree import tree_leaves

from normops.inductor.calls import call_of, storage_of

_OPERATORS = {getattr(operator, name) for name in magic_methods if hasattr(operator, name)}
_VIEWS = {"size", "view", "reshape", "flatten", "unflatten", "transpose", "permute", getattr, operator.getitem}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# torch's functions in Python write only with one of these arguments.
_PERMISSIONS = ("inplace", "out", "running_mean", "running_var", "max_norm")

IS_RECORDED = "normops.is_recorded"
"""The key in ``meta`` of operators that a pass has inserted: whether they save their arguments for a backward."""

IS_COPY = "normops.is_copy"
"""The key in ``meta`` of nodes that a pass has inserted to copy a tensor. Nothing writes to their results."""


def may_write(node: Node) -> bool:
    """Returns whether a node may write to an existing tensor."""
    if node.op in ("placeholder", "get_attr", "output") or _only_computes(node):
        return False
    if bodies := list(subgraphs(node)):
        return any(may_write(inner) for body in bodies for inner in body.graph.nodes)
    if isfunction(node.target):
        return _function_may_write(node)
    overloads = _overloads(node.target)
    return not overloads or "out" in node.kwargs or any(_writes(overload) for overload in overloads)


def memory_written_by(node: Node) -> set[Any]:
    """Returns the memory that a node may write to: if it may write at all, the memory of all its arguments."""
    if not may_write(node):
        return set()
    return set().union(*map(memory_of, node.all_input_nodes), *map(_written_in, subgraphs(node)))


def _written_in(body: GraphModule) -> set[Any]:
    return set().union(*map(memory_written_by, body.graph.nodes))


def memory_of(node: Node) -> set[Any]:
    """Returns the memory of a node's tensors, which views share, also in other graphs.

    The set contains None if the memory is unknown.
    """
    if node.op == "get_attr" and "example_value" not in node.meta:
        return set()  # a body
    value = node.meta.get("example_value")
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    is_known = value is not None and all(tensor.layout is torch.strided for tensor in tensors)
    return {storage_of(tensor) for tensor in tensors} if is_known else {None}


def shares_memory(node: Node, memory: set[Any]) -> bool:
    """Returns whether tensors of a node may be in this memory. Copies that a pass has inserted are not."""
    return IS_COPY not in node.meta and (None in memory or not memory_of(node).isdisjoint(memory | {None}))


def is_harmless(node: Node) -> bool:
    """Returns whether a node may be swapped with its neighbours.

    It may if it does not write, draws no random numbers, and switches neither gradients nor autocast.
    """
    if node.op in ("placeholder", "get_attr") or _only_computes(node):
        return True
    overloads = _overloads(node.target)
    is_random = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return bool(overloads) and not is_random and not may_write(node)


def has_hook(node: Node) -> bool:
    """Returns whether a hook receives the gradient of a node's value."""
    return any("register_hook" in str(user.target) for user in node.users)


def changes_views(node: Node) -> bool:
    """Returns whether a node turns an existing tensor into another view, so that earlier nodes' values are wrong."""
    return any(torch.Tag.inplace_view in overload.tags for overload in _overloads(node.target)) or any(
        changes_views(inner) for body in subgraphs(node) for inner in body.graph.nodes
    )


def subgraphs(node: Node) -> Iterator[GraphModule]:
    """Yields the bodies that a higher-order operator runs."""
    module = node.graph.owning_module
    for argument in node.all_input_nodes:
        body = getattr(module, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield body


def _only_computes(node: Node) -> bool:
    """Returns whether a node computes a size or number, or calls a view, an operation of norms or a Python operator.

    Python's in-place operators, such as ``+=``, are excluded.
    """
    is_number = isinstance(node.meta.get("example_value"), (int, float, *_SYMBOLS))
    return is_number or node.target in _VIEWS or node.target in _OPERATORS or call_of(node) is not None


def _function_may_write(node: Node) -> bool:
    target: Any = node.target
    if target.__module__ not in ("torch.functional", "torch.nn.functional") or target.__name__.endswith("_"):
        return True
    try:
        given = signature(target).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return True
    return any(given.get(name) not in (None, False) for name in _PERMISSIONS)


@lru_cache(maxsize=1024)  # a target may be a function of the program
def _overloads(target: Any) -> tuple[OpOverload, ...]:
    """Returns the overloads, of ATen or other libraries, that a call may run; none if it may run other code."""
    if isinstance(target, OpOverload):
        return (target,)
    packet = target if isinstance(target, OpOverloadPacket) else _namesake(target)
    return () if packet is None else tuple(getattr(packet, name) for name in packet.overloads())


def _namesake(target: Any) -> Any:
    """Returns ATen's operator with the name of a method of tensors, or of a function of torch."""
    if isinstance(target, str):
        return getattr(torch.ops.aten, target, None) if hasattr(Tensor, target) else None
    if not isbuiltin(target) and not isfunction(target):
        return None
    name = target.__name__
    is_of_torch = target in (getattr(torch, name, None), getattr(F, name, None))
    return getattr(torch.ops.aten, name, None) if is_of_torch else None


def _writes(overload: OpOverload) -> bool:
    """Returns whether an overload writes to an argument other than ``out``, or to running statistics.

    Schemas do not declare the latter.
    """
    schema = overload._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    has_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return not schema.returns or has_statistics or any(not argument.kwarg_only for argument in written)
