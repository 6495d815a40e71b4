"""Fuses norms with scales and shifts of their results, by samples or tokens, in a graph of Dynamo's."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from normops._operators import by_name
from normops.inductor import ModelRounding
from normops.inductor.calls import DTYPES, HALVES, call_of, called, is_contiguous, is_equal, length, other_call_of
from normops.inductor.effects import IS_RECORDED, subgraphs
from normops.inductor.search import (
    NoMatch,
    Search,
    above_offset,
    above_widening,
    may_be_computed_at,
    require,
    value,
    widens,
)

_NORM = torch.ops.normops.rms_norm.default


class _Modulation(NamedTuple):
    """The operations after a norm that its operator can compute."""

    factor: Node | None
    bias: Node | None
    last: Node
    """The node of the result."""
    nodes: frozenset[Node]
    """The last node, the norm, and the nodes in between."""


def join_modulations(graph: Graph, rounding: ModelRounding) -> None:
    """Fuses each norm with the product and the sum that alone use its result into one operator, also in bodies.

    The factor becomes a weight and the summand a bias: ``norm(x) * (1 + scale) + shift``, ``x + gate * norm(branch)``.
    ``rounding="original"`` requires that the operator rounds to 16 bits like the program.
    """
    for node in list(graph.nodes):
        for body in subgraphs(node):
            join_modulations(body.graph, rounding)
            body.recompile()
        if node.target is _NORM:
            try:
                _Search(node, rounding).join()
            except NoMatch:
                continue


class _Search(Search):
    """Reads the graph from a norm downwards."""

    def __init__(self, norm: Node, rounding: ModelRounding) -> None:
        super().__init__()
        self._norm, self._y = norm, value(norm)
        self._arguments = by_name(_NORM, norm.args, norm.kwargs)
        weight = self._arguments.get("weight")
        self._weight = None if weight is None else value(weight)
        self._dims = length(self._arguments["normalized_shape"])
        self._rounding = rounding
        self._rounds_as_before = rounding == "original" and self._y.dtype in HALVES
        # The operator widens its input itself, which replaces a cast for the norm alone.
        self._narrow, self._casts = above_widening(self._arguments["input"])

    def join(self) -> None:
        """Replaces the norm and the operations after it by one operator."""
        require(self._arguments.get("bias") is None and is_contiguous(self._y))
        found = self._longest(self._norm, None, None)
        if found is None or not may_be_computed_at(found.last, found.nodes):
            raise NoMatch
        arguments, last, graph = dict(self._arguments), found.last, self._norm.graph
        if value(last).dtype != self._y.dtype:
            require(may_be_computed_at(last, {*found.nodes, *self._casts}))
            arguments["input"] = self._narrow
        with graph.inserting_before(last):
            if found.factor is not None:
                arguments |= self._weighted(found.factor, found)
            if found.bias is not None:
                arguments["bias"] = found.bias
            if self._rounds_as_before:
                arguments["rounding"] = "llama"
            result = graph.call_function(_NORM, (), arguments)
        result.meta |= {**last.meta, IS_RECORDED: value(last).requires_grad}
        last.replace_all_uses_with(result)
        for node in sorted({*found.nodes, *self._casts}, reverse=True):
            if not node.users:
                graph.erase_node(node)

    def _longest(self, node: Node, factor: Node | None, bias: Node | None) -> _Modulation | None:
        """Returns the longest modulation that begins with these nodes."""
        self.inner.append(node)
        y = value(node)
        is_modulated = y.dtype == self._y.dtype and (factor is not None or bias is not None)
        is_one = is_contiguous(y) and (is_modulated or self._is_narrow(y))
        found = _Modulation(factor, bias, node, frozenset(self.inner)) if is_one else None
        try:
            return self._longest(*self._below(node, factor, bias)) or found
        except NoMatch:
            return found

    def _below(self, node: Node, factor: Node | None, bias: Node | None) -> tuple[Node, Node | None, Node | None]:
        """Returns the only user of a node, with the factor and the bias so far."""
        require(len(node.users) == 1)
        (user,) = node.users
        call, y = call_of(user) or other_call_of(user), value(user)
        if call is None or call.name not in ("cast", "mul", "add", "addcmul"):
            raise NoMatch
        require(y.dtype in DTYPES and (y.dtype != torch.float64 or self._y.dtype == y.dtype))
        require(widens(self._y, y) or self._is_narrow(y))
        require(y.dtype == self._y.dtype or not self._rounds_as_before)
        require(self._rounding == "once" or not self._is_narrow(value(node)))
        if call.name == "cast":
            return user, factor, bias
        *summands, a, b = call.arguments
        other = b if a is node else a
        require(bias is None and call.arguments.count(node) == 1 and node not in summands)
        if call.name == "add":
            return user, factor, self._as_bias(other)
        # torch.addcmul rounds once.
        require(factor is None and not (summands and self._rounds_as_before))
        return user, self._as_factor(other), self._as_bias(*summands) if summands else None

    def _is_narrow(self, y: Tensor) -> bool:
        """Returns whether this has the 16-bit dtype that the program widened to float32 for the norm."""
        is_widened = self._y.dtype == torch.float32 and value(self._narrow).dtype in HALVES
        return is_widened and y.dtype == value(self._narrow).dtype

    def _as_factor(self, node: Any) -> Node:
        tensor = self._broadcast(node)
        if self._weight is not None:
            # Their product is computed first: cheap only if rows share the factor, and rounded differently.
            require(not is_equal(tensor.numel(), self._y.numel()))
            require(self._weight.dim() == self._dims and not self._rounds_as_before)
        return node

    def _as_bias(self, node: Any) -> Node:
        self._broadcast(node)
        rounds_product = self._weight is None or self._arguments.get("rounding") == "llama"
        require(rounds_product or not self._rounds_as_before)
        return node

    def _broadcast(self, node: Any) -> Tensor:
        """Returns the value of a node that the operator accepts as a weight or a bias."""
        tensor, y = value(node), self._y
        require(tensor.dtype in DTYPES and tensor.device == y.device and self._dims <= tensor.dim() <= y.dim())
        sizes = zip(reversed(tensor.shape), reversed(y.shape), strict=False)
        require(all(is_equal(a, b) or (i >= self._dims and is_equal(a, 1)) for i, (a, b) in enumerate(sizes)))
        return tensor

    def _weighted(self, factor: Node, found: _Modulation) -> dict[str, Any]:
        """Returns the arguments that multiply by the factor, and by the norm's own weight if it has one."""
        offset = 0.0
        if not self._rounds_as_before:
            above, number, passed = above_offset(factor)
            rounds = self._rounding == "original" and any(value(node).dtype in HALVES for node in passed)
            if not rounds and may_be_computed_at(found.last, {*found.nodes, *passed}):
                factor, offset = above, number
        if self._weight is None:
            return {"weight": factor, "weight_offset": offset}
        weight: Node = self._arguments["weight"]
        wide = torch.promote_types(self._y.dtype, torch.float32)
        dtype = torch.promote_types(torch.promote_types(self._weight.dtype, value(factor).dtype), wide)
        factors = []
        for node, added in (weight, self._arguments.get("weight_offset", 0.0)), (factor, offset):
            for method, argument in ("to", dtype), ("add", added):
                if argument != 0.0:
                    node = called(method, node, argument)
            factors.append(node)
        return {"weight": called("mul", *factors), "weight_offset": 0.0}
