"""What a node of Dynamo's graph does besides returning something: whether others may change places with it.

Answers are conservative: what is not known to torch, or not by its schema, may do anything.
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

# A function of torch that is written in Python writes only if it was given one of these.
_PERMISSIONS = ("inplace", "out", "running_mean", "running_var", "max_norm")

IS_RECORDED = "normops.is_recorded"
"""The key in ``meta`` of operators that a pass has put there: whether they save their arguments for a backward."""

IS_COPY = "normops.is_copy"
"""The key in ``meta`` of nodes that a pass has made to copy a tensor, and to whose results nothing writes."""


def may_write(node: Node) -> bool:
    """Whether a node may write to a tensor that was there before."""
    if node.op in ("placeholder", "get_attr", "output") or _only_computes(node):
        return False
    if bodies := list(subgraphs(node)):
        return any(may_write(inner) for body in bodies for inner in body.graph.nodes)
    if isfunction(node.target):
        return _function_may_write(node)
    overloads = _overloads(node.target)
    return not overloads or "out" in node.kwargs or any(_writes(overload) for overload in overloads)


def memory_written_by(node: Node) -> set[Any]:
    """The memory that a node may write to: if it may write at all, that of all its arguments."""
    if not may_write(node):
        return set()
    return set().union(*map(memory_of, node.all_input_nodes), *map(_written_in, subgraphs(node)))


def _written_in(body: GraphModule) -> set[Any]:
    return set().union(*map(memory_written_by, body.graph.nodes))


def memory_of(node: Node) -> set[Any]:
    """The memory of a node's tensors, which views have in common, also those in other graphs.

    None is among it if that is not known.
    """
    if node.op == "get_attr" and "example_value" not in node.meta:
        return set()  # a body
    value = node.meta.get("example_value")
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    is_known = value is not None and all(tensor.layout is torch.strided for tensor in tensors)
    return {storage_of(tensor) for tensor in tensors} if is_known else {None}


def shares_memory(node: Node, memory: set[Any]) -> bool:
    """Whether the tensors of a node may be in that memory. Copies that a pass has made are not."""
    return IS_COPY not in node.meta and (None in memory or not memory_of(node).isdisjoint(memory | {None}))


def is_harmless(node: Node) -> bool:
    """Whether a node may change places with its neighbours.

    It may if it writes nowhere, draws no random numbers, and switches neither gradients nor autocast.
    """
    if node.op in ("placeholder", "get_attr") or _only_computes(node):
        return True
    overloads = _overloads(node.target)
    is_random = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return bool(overloads) and not is_random and not may_write(node)


def has_hook(node: Node) -> bool:
    """Whether something is called with the gradient of a node's value."""
    return any("register_hook" in str(user.target) for user in node.users)


def changes_views(node: Node) -> bool:
    """Whether a node makes another view of a tensor that was there before: its value no longer says what it was."""
    return any(torch.Tag.inplace_view in overload.tags for overload in _overloads(node.target)) or any(
        changes_views(inner) for body in subgraphs(node) for inner in body.graph.nodes
    )


def subgraphs(node: Node) -> Iterator[GraphModule]:
    """The bodies that a higher-order operator runs."""
    module = node.graph.owning_module
    for argument in node.all_input_nodes:
        body = getattr(module, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield body


def _only_computes(node: Node) -> bool:
    """Whether a node computes a size or number, or calls a view, an operation of norms or an operator of Python.

    Python's operators that assign, such as ``+=``, are not among these.
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
    """The overloads, of ATen or other libraries, of which a call may run one; none if it may run anything else."""
    if isinstance(target, OpOverload):
        return (target,)
    packet = target if isinstance(target, OpOverloadPacket) else _namesake(target)
    return () if packet is None else tuple(getattr(packet, name) for name in packet.overloads())


def _namesake(target: Any) -> Any:
    """ATen's operator that a method of tensors, or a function of torch, is named after."""
    if isinstance(target, str):
        return getattr(torch.ops.aten, target, None) if hasattr(Tensor, target) else None
    if not isbuiltin(target) and not isfunction(target):
        return None
    name = target.__name__
    is_of_torch = target in (getattr(torch, name, None), getattr(F, name, None))
    return getattr(torch.ops.aten, name, None) if is_of_torch else None


def _writes(overload: OpOverload) -> bool:
    """Whether an overload writes to an argument other than ``out``, or to running statistics.

    Of the latter the schemas say nothing.
    """
    schema = overload._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    has_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return not schema.returns or has_statistics or any(not argument.kwarg_only for argument in written)
