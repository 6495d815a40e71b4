"""Finds handwritten RMSNorms, composed of operations of torch, in a graph of Dynamo's."""

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from normops.functional import Rounding
from normops.inductor.calls import (
    DTYPES,
    HALVES,
    UNIT_NORMS,
    arguments_of_unit_norm,
    call_of,
    is_contiguous,
    is_equal,
    number,
    order_in_memory,
    specialized,
    value_of,
)
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


class Weight(NamedTuple):
    """The factor of the normalized input: the node's value plus the offset."""

    node: Node
    offset: float


class Match(NamedTuple):
    """An RMSNorm: its inputs, and the nodes that normops can replace."""

    input: Node
    weight: Weight | None
    eps: float
    eps_argument: Any
    """The program's eps: a number or a node."""
    dtype: torch.dtype
    """The dtype to compute in: the input's, or the result's if that is wider, or float64 if that occurs on the way."""
    rounding: Rounding | None
    """The program's roundings to 16 bits; None if normops does not support their order."""
    dim: int
    """The normalized dimension: the last one, -1, or dimension 1, that of channels, counted from the end."""
    bias: Node | None
    """The summand of a norm over channels, with one number per channel."""
    last: Node
    """The node of the result."""
    nodes: frozenset[Node]
    """The node of the result, and all nodes on the way to it. They have no side effects."""


def match_norm(node: Node) -> Match | None:
    """Returns the norm of which a node is the inverted root, or the division by the root, if normops can replace it.

    normops can replace the last node if no other node uses the intermediate values, and if no node in between writes to
    tensors or switches autograd or autocast. The result must be dense, with contiguous rows; over channels, contiguous.
    ``F.normalize(x, dim) * size**0.5`` is such a norm, too.
    """
    call = call_of(node)
    is_unit = node.target in UNIT_NORMS
    if not is_unit and (call is None or call.name not in ("rsqrt", "div")):
        return None
    try:
        return _Search().match_unit(node) if is_unit else _Search().match(node)
    except NoMatch:
        return None


class _Search(Search):
    """Reads the graph from the root up to the input, and from there down to the result."""

    def __init__(self) -> None:
        super().__init__()
        # Nodes that may have other users: casts of the input and of the weight, and 1 + weight.
        self._bypassed: list[Node] = []
        self._dim = -1

    def match(self, node: Node) -> Match:
        dividend, root = self._dividend_and_root(node)
        open_eps, squared = self._mean_square(root)
        input = self._above_widening(squared)
        require(value(input).dim() > 0)  # mean(-1) accepts scalars
        if dividend is None:
            node, dividend = self._product(self._below_narrowing(node))
        weight = self._times_input(dividend, input)
        last = normalized = self._below_narrowing(node)
        if weight is None:
            last, weight = self._weighted(normalized, input)
        rounding = self._rounding(input, normalized, last)
        return self._found(input, weight, open_eps, rounding, last)

    def match_unit(self, node: Node) -> Match:
        """Reads ``F.normalize(x, dim)``, its product with the root of the size, and that with a weight."""
        given = arguments_of_unit_norm(node)
        input, eps = given["input"], number(given["eps"])
        self._dim = self._normalized_dim(given["dim"], input)
        size = value(input).shape[self._dim]
        require(number(given["p"]) == 2.0 and given["out"] is None and isinstance(size, int) and size > 0)
        if eps is None:
            raise NoMatch
        self.inner.append(node)
        product, factor = self._product(node)
        require(math.isclose(number(factor) or 0.0, math.sqrt(size), rel_tol=1e-12))
        last, weight = self._weighted(product, input)
        is_rounded = any(value(inner).dtype in HALVES for inner in self.inner)
        rounding: Rounding | None = None if is_rounded else "once"
        return self._found(input, weight, eps**2 / size, rounding, last)

    def _found(self, input: Node, weight: Weight | None, open_eps: Any, rounding: Rounding | None, last: Node) -> Match:
        bias = None
        if self._dim != -1 and (added := self._biased(last, input)) is not None:
            rounding = None if value(last).dtype in HALVES else rounding
            last, bias = added
        nodes = frozenset((*self.inner, *self._bypassed))
        self._check(input, last, nodes)
        eps = specialized(open_eps)
        if eps is None or not math.isfinite(eps):
            raise NoMatch
        dtype = self._dtype(input, last)
        return Match(input, weight, eps, open_eps, dtype, rounding, self._dim, bias, last, nodes)

    def _check(self, input: Node, last: Node, nodes: frozenset[Node]) -> None:
        y = value(last)
        require(order_in_memory(y, 1) if self._dim == -1 else is_contiguous(y))
        require(all(value(node).dtype in DTYPES for node in (input, *nodes)))
        self.require_uses_within(last)
        require(may_be_computed_at(last, nodes))

    def _dtype(self, input: Node, last: Node) -> torch.dtype:
        if any(value(node).dtype is torch.float64 for node in self.inner):
            return torch.float64
        return torch.promote_types(value(input).dtype, value(last).dtype)

    def _rounding(self, input: Node, normalized: Node, last: Node) -> Rounding | None:
        # Casts of the input and the weight only widen here. A sum with the weight may round.
        calls = {node: call_of(node) for node in (*self.inner, *self._bypassed)}
        rounded = {
            node
            for node, call in calls.items()
            if value(node).dtype in HALVES and (node in self.inner or (call is not None and call.name == "add"))
        }

        def is_cast(node: Node) -> bool:
            call = calls[node]
            return call is not None and call.name == "cast"

        if not rounded or (rounded == {last} and is_cast(last)):
            return "once"
        weighted = {*self.inner[self.inner.index(normalized) + 1 :]}
        has_one_dtype = self._dtype(input, last) == value(input).dtype == value(normalized).dtype == value(last).dtype
        is_llama = has_one_dtype and weighted and is_cast(normalized) and rounded <= {normalized, *weighted}
        return "llama" if is_llama else None

    def _above_widening(self, node: Any) -> Any:
        above, passed = above_widening(node)
        self._bypassed += passed
        return above

    def _below_narrowing(self, node: Node) -> Node:
        """Returns the cast of the node, if that is its only user, else the node."""
        user = next(iter(node.users), None)
        call = call_of(user)
        if user is None or len(node.users) > 1 or call is None or call.name != "cast":
            return node
        if not widens(value(user), value(node)):
            return node
        self.inner.append(user)
        return user

    def _dividend_and_root(self, node: Node) -> tuple[Node | None, Any]:
        """Returns x and v, if the node computes x / sqrt(v); x is None for 1 / sqrt(v)."""
        arguments = self.take(node, "rsqrt", "div")
        if len(arguments) == 1:
            return None, arguments[0]
        dividend, divisor = arguments
        require(isinstance(dividend, Node) or number(dividend) == 1.0)
        (root,) = self.take(self.above_casts(divisor), "sqrt")
        return dividend if isinstance(dividend, Node) else None, root

    def _mean_square(self, node: Any) -> tuple[Any, Any]:
        """Returns eps and x, if the node computes mean(x * x) + eps over the last dimension."""
        eps: Any = 0.0
        node = self.above_casts(node)
        call = call_of(node)
        if call is not None and call.name == "add":
            a, eps = self.take(node, "add")
            a, eps = (eps, a) if value_of(a) is None else (a, eps)
            require(value_of(eps) is None)
            node = self.above_casts(a)
        squares, dim, keepdim = self._mean(node)
        require(keepdim is True)
        self._dim = self._normalized_dim(dim, squares)
        (x,) = self.take(self.above_casts(squares), "square")
        return eps, x

    def _mean(self, node: Any) -> tuple[Any, ...]:
        call = call_of(node)
        if call is None or call.name != "div":
            return self.take(node, "mean")
        total, size = self.take(node, "div")
        arguments = self.take(self.above_casts(total), "sum")
        dim = self._normalized_dim(arguments[1], arguments[0])
        require(value_of(size) is None and is_equal(value(arguments[0]).shape[dim], size))
        return arguments

    def _normalized_dim(self, dim: Any, input: Node) -> int:
        """Returns the dimension, counted from the end: the last one, or that of channels."""
        dims = value(input).dim()
        (dim,) = dim if isinstance(dim, (list, tuple)) and len(dim) == 1 else (dim,)
        require(type(dim) is int and -dims <= dim < dims)
        from_end: int = dim % dims - dims
        require(from_end == -1 or (dims > 2 and from_end == 1 - dims))
        return from_end

    def _product(self, factor: Node) -> tuple[Node, Any]:
        """Returns the only user of a factor, which must be a product, and the other factor."""
        require(len(factor.users) == 1)
        product = next(iter(factor.users))
        a, b = self.take(product, "mul")
        return product, b if a is factor else a

    def _times_input(self, node: Any, input: Node) -> Weight | None:
        """Returns the weight, if a node computes weight * input; None, if the node is the input."""
        if self._above_widening(node) is input:
            return None
        for weight, x in (arguments := self.take(node, "mul")), arguments[::-1]:
            if self._above_widening(x) is input and (found := self._weight(weight, input)) is not None:
                return found
        raise NoMatch

    def _weighted(self, normalized: Node, input: Node) -> tuple[Node, Weight | None]:
        """Returns the product with a weight, if that is the only user of the normalized input."""
        user = next(iter(normalized.users), None)
        call = call_of(user)
        if user is None or len(normalized.users) > 1 or call is None or call.name != "mul":
            return normalized, None
        a, b = call.arguments
        weight = self._weight(b if a is normalized else a, input)
        if weight is None:
            return normalized, None
        self.inner.append(user)
        return self._below_narrowing(user), weight

    def _biased(self, norm: Node, input: Node) -> tuple[Node, Node] | None:
        """Returns the sum with a bias, if that is the only user of the norm, and the bias."""
        user = next(iter(norm.users), None)
        call = call_of(user)
        if user is None or len(norm.users) > 1 or call is None or call.name != "add":
            return None
        a, b = call.arguments
        bias = b if a is norm else a
        if not self._is_parameter(bias, input) or value(user).dtype != value(norm).dtype:
            return None
        self.inner.append(user)
        return user, bias

    def _weight(self, node: Any, input: Node) -> Weight | None:
        """Returns a weight with one number per column. Other factors are not part of the norm, but may follow it."""
        above, offset, passed = above_offset(node)
        if not self._is_parameter(above, input):
            return None
        self._bypassed += passed
        return Weight(above, offset)

    def _is_parameter(self, node: Any, input: Node) -> bool:
        """Returns whether a node has one number per element of the normalized dimension."""
        parameter, x = value_of(node), value(input)
        if parameter is None or parameter.dtype not in DTYPES or parameter.device != x.device:
            return False
        if not -self._dim <= parameter.dim() <= (1 if self._dim == -1 else x.dim()):
            return False
        sizes = zip(range(-parameter.dim(), 0), parameter.shape, strict=True)
        return all(is_equal(size, x.shape[dim] if dim == self._dim else 1) for dim, size in sizes)
