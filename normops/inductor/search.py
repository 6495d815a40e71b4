"""Helpers for the searches of patterns in a graph of Dynamo's."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from normops.inductor.calls import DTYPES, Call, call_of, number, value_of
from normops.inductor.effects import has_hook, is_harmless


class NoMatch(Exception):  # noqa: N818  nothing failed
    """Raised by a search if the pattern is absent."""


def value(node: Any) -> Tensor:
    """Returns the value of a node, which must be a strided tensor."""
    tensor = value_of(node)
    if tensor is None:
        raise NoMatch
    return tensor


def require(holds: object) -> None:
    """Ends a search without a match unless this is true."""
    if not holds:
        raise NoMatch


def widens(before: Tensor, after: Tensor) -> bool:
    """Returns whether a cast between dtypes of norms keeps every value."""
    dtypes = before.dtype, after.dtype
    return {*DTYPES} >= {*dtypes} and torch.promote_types(*dtypes) == after.dtype


def above_widening(node: Any) -> tuple[Any, list[Node]]:
    """Returns the input of casts that keep every value, and the casts, up to one whose hook needs the gradient."""
    passed = []
    while (call := call_of(node)) is not None and call.name == "cast" and widens(value(call.arguments[0]), value(node)):
        if has_hook(node):
            break
        passed.append(node)
        (node,) = call.arguments
    return node, passed


def above_offset(node: Any) -> tuple[Any, float, list[Node]]:
    """Returns the summand and the number of a sum, and the nodes between: the sum and casts that keep every value."""
    above, passed = above_widening(node)
    call = call_of(above)
    if call is None or call.name != "add" or has_hook(above):
        return above, 0.0, passed
    a, b = call.arguments
    a, b = (b, a) if number(b) is None else (a, b)
    if (offset := number(b)) is None or not math.isfinite(offset):
        return above, 0.0, passed
    summand, casts = above_widening(a)
    return summand, offset, [*passed, above, *casts]


class Search:
    """A search, with the nodes that are part of the pattern so far."""

    def __init__(self) -> None:
        self.inner: list[Node] = []

    def take(self, node: Any, *names: str, read: Callable[[Any], Call | None] = call_of) -> tuple[Any, ...]:
        """Returns the arguments of a node, which must be one of these calls and becomes part of the pattern."""
        call = read(node)
        if call is None or call.name not in names:
            raise NoMatch
        self.inner.append(node)
        return call.arguments

    def above_casts(self, node: Any) -> Any:
        """Returns the input of one or several casts; the node itself if it is no cast."""
        while (call := call_of(node)) is not None and call.name == "cast":
            (node,) = self.take(node, "cast")
        return node

    def require_uses_within(self, last: Node, *, but: Sequence[Any] = ()) -> None:
        """Requires that only the pattern, or calls of the targets ``but``, use the nodes before the last one."""
        inner = {*self.inner}
        require(all(user in inner or user.target in but for node in inner - {last} for user in node.users))


def may_be_computed_at(last: Node, nodes: Iterable[Node]) -> bool:
    """Returns whether all of these nodes may be computed at the place of the last one.

    Nodes in between must be harmless; the nodes themselves have no side effects.
    """
    nodes = {*nodes}
    above, node = set(nodes), last
    while above:
        if node not in nodes and not is_harmless(node):
            return False
        above.discard(node)
        node = node.prev
    return True
