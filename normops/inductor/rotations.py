"""Fuses norms with the rotary embeddings of their results, in a graph of Dynamo's."""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from normops._operators import by_name
from normops.inductor import ModelRounding
from normops.inductor.calls import (
    HALVES,
    applied,
    call_of,
    called,
    dims_permuted_by,
    have_one_shape,
    is_contiguous,
    is_equal,
    is_reshape,
    order_in_memory,
    other_call_of,
    slice_of,
    value_of,
)
from normops.inductor.effects import IS_RECORDED, subgraphs
from normops.inductor.search import NoMatch, Search, may_be_computed_at, require, value

_NORM, _ROTATED_NORM = torch.ops.normops.rms_norm.default, torch.ops.normops.rms_norm_rope.default


class _Columns(NamedTuple):
    """The columns ``start``, ``start + step``, ... of a node's value."""

    base: Node
    start: Any
    step: Any
    size: Any


class _Tables(NamedTuple):
    """The nodes of cos and sin."""

    cos: Node
    sin: Node
    views: tuple[tuple[Node, ...], tuple[Node, ...]] = ((), ())
    """The nodes that add dimensions to cos, and those that add dimensions to sin."""
    unused: frozenset[Node] = frozenset()
    """The nodes that these tables replace."""


class _Rotation(NamedTuple):
    """A norm, the rotation of its result, and how the operator replaces the last node."""

    norm: Node
    views: tuple[Node, ...]
    """Reshapes of whole rows between the norm and the rotation."""
    dims: tuple[int, ...]
    """For each dimension of the rotated tensor, its index after the reshapes."""
    order: tuple[int, ...]
    """The dimensions of the rotated tensor in the order of the result's memory."""
    tables: _Tables
    interleaved: bool
    rotary_dim: int | None
    rotary_offset: int
    last: Node
    nodes: frozenset[Node]


def join_rotations(graph: Graph, rounding: ModelRounding) -> None:
    """Fuses each norm with the rotation that alone uses its result into one operator, also in bodies.

    A model rounds rotated 16-bit values several times, in an order that the operator does not support.
    """
    for node in list(graph.nodes):
        for body in subgraphs(node):
            join_rotations(body.graph, rounding)
            body.recompile()
        if (rotation := _match(node)) is not None and (rounding == "once" or value(rotation.norm).dtype not in HALVES):
            _join(rotation)


def _match(node: Node) -> _Rotation | None:
    """Returns the rotation of which a node is the sum ``x * cos + turned(x) * sin``."""
    call = call_of(node)
    if call is None or call.name != "add":
        return None
    for straight, turned in permutations(call.arguments):
        for (x, cos), (y, sin) in product(_factors(straight), _factors(turned)):
            try:
                return _Search().match(node, (straight, turned), (x, cos), (y, sin))
            except NoMatch:
                continue
    return None


def _factors(node: Any) -> list[tuple[Any, ...]]:
    call = call_of(node)
    return [*permutations(call.arguments)] if call is not None and call.name == "mul" else []


class _Search(Search):
    """Reads the graph from the sum up to the norm, and down to the node with all columns."""

    def match(
        self, total: Node, products: tuple[Node, Node], straight: tuple[Any, Any], turned: tuple[Any, Any]
    ) -> _Rotation:
        (x, cos), (y, sin) = straight, turned
        self.inner += (total, *products)
        columns = self._columns(x)
        require(columns.step == 1)
        interleaved = self._turn(y, x, columns)
        norm, views, dims = self._above(columns.base)
        arguments = by_name(_NORM, norm.args, norm.kwargs)
        require(arguments.get("bias") is None)
        input, weight = value(arguments["input"]), value_of(arguments.get("weight"))
        last = self._whole(total, columns, input.dtype)
        order = order_in_memory(value(last), 1)
        if order is None or not isinstance(columns.start, int):
            raise NoMatch
        self._check_values(x, total, last, columns, input)
        tables = self._tables(cos, sin, value(x), input.dtype)
        # A node of which only the size is used is not computed once the graph is functional.
        self.require_uses_within(last, but=("size",))
        require(may_be_computed_at(last, self.inner))
        # The views of the norm's result apply to its input only if that is contiguous.
        require(not views or is_contiguous(input))
        is_moved = bool(views) or any(dims[i] != at for at, i in enumerate(order))
        shape: Any = arguments["normalized_shape"]
        require(isinstance(shape, (list, tuple)) and len(shape) == 1)
        require(arguments.get("weight") is None or (weight is not None and (weight.dim() == 1 or not is_moved)))
        rotary_dim = columns.size if isinstance(columns.size, int) else None
        if interleaved and rotary_dim is not None:
            narrow = _of_pairs(tables, rotary_dim)
            if narrow is not None and may_be_computed_at(last, {*self.inner, *narrow.unused}):
                tables = narrow
        nodes = frozenset(self.inner)
        return _Rotation(norm, views, dims, order, tables, interleaved, rotary_dim, columns.start, last, nodes)

    def _columns(self, node: Any) -> _Columns:
        """Returns the columns in a node's value, cast or not."""
        require(value(node).dim() > 0)
        start, step, size = 0, 1, value(node).shape[-1]
        while True:
            if (call := call_of(node)) is not None and call.name == "cast":
                (node,) = self.take(node, "cast")
            elif isinstance(node, Node) and (part := slice_of(node)) is not None:
                self.inner += part.nodes
                node, start, step = part.source, part.start + part.step * start, part.step * step
            else:
                return _Columns(node, start, step, size)

    def _turn(self, node: Any, x: Any, columns: _Columns) -> bool:
        """Returns whether columns are turned interleaved: the second one of each pair, negated, before the first."""
        node = self.above_casts(node)
        is_flattened = isinstance(node, Node) and is_reshape(node)
        if is_flattened:
            require(have_one_shape(value(node), value(x)))
            self.inner.append(node)
            node = node.args[0]
        parts, dim = self.take(node, "stack" if is_flattened else "cat", read=other_call_of)
        require(dim in (-1, value(node).dim() - 1) and len(parts) == 2)
        (negated,) = self.take(self.above_casts(parts[0]), "neg", read=other_call_of)
        half = columns.size // 2
        pairs = self._columns(parts[1]), self._columns(negated)
        starts = columns.start, columns.start + (1 if is_flattened else half)
        for part, start in zip(pairs, starts, strict=True):
            require(part.base is columns.base and is_equal(part.step, 2 if is_flattened else 1))
            require(is_equal(part.start, start) and is_equal(part.size, half))
        require(is_equal(2 * half, columns.size))
        return is_flattened

    def _above(self, node: Any) -> tuple[Node, tuple[Node, ...], tuple[int, ...]]:
        """Returns the norm above the views, the reshapes in between, and the order of dimensions after these."""
        dims, views = tuple(range(value(node).dim())), list[Node]()
        while node.target is not _NORM:
            above = node.args[0] if node.args else None
            is_copy = node.op == "call_method" and node.target == "contiguous" and len(node.args) == 1
            if not is_copy and (permuted := dims_permuted_by(node)) is not None:
                require(not views)
                dims = tuple(permuted[dim] for dim in dims)
            elif not is_copy:
                require(is_reshape(node) and is_equal(value(above).shape[-1], value(node).shape[-1]))
                views.insert(0, node)
            require(value(node).dim() > 0 and dims[-1:] == (len(dims) - 1,))
            self.inner.append(node)
            node = above
            value(node)
        self.inner.append(node)
        return node, tuple(views), dims

    def _whole(self, total: Node, columns: _Columns, dtype: torch.dtype) -> Node:
        """Returns the node with all columns of the norm's result, also those that are not rotated, in its dtype."""
        last, before = self._below_cast(total, dtype), len(self.inner)
        width = value(columns.base).shape[-1]
        try:
            last = self._below_cast(self._cat(last, columns, width), dtype)
        except NoMatch:
            require(is_equal(columns.size, width))
            del self.inner[before:]
        require(value(last).dtype == dtype)
        return last

    def _below_cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Returns the cast of the node to this dtype, if that is its only user, else the node."""
        user = next(iter(node.users), None)
        call = call_of(user)
        if user is None or len(node.users) > 1 or call is None or call.name != "cast" or value(user).dtype != dtype:
            return node
        self.inner.append(user)
        return user

    def _cat(self, rotated: Node, columns: _Columns, width: Any) -> Node:
        """Returns the concatenation of the rotated columns and the others, each in its place."""
        require(len(rotated.users) == 1)
        node = next(iter(rotated.users))
        parts, dim = self.take(node, "cat", read=other_call_of)
        require(dim in (-1, value(node).dim() - 1))
        end: Any = 0
        for part in parts:
            of_base = columns if part is rotated else self._columns(part)
            require(of_base.base is columns.base and of_base.step == 1 and is_equal(of_base.start, end))
            end = end + of_base.size
        require(is_equal(end, width) and sum(part is rotated for part in parts) == 1)
        return node

    def _check_values(self, x: Any, total: Node, last: Node, columns: _Columns, input: Tensor) -> None:
        """Requires that no step computes in another dtype, shape, or device than the operator would."""
        require(have_one_shape(value(x), value(total)))
        require(have_one_shape(value(columns.base), value(last)))
        wide = torch.promote_types(input.dtype, torch.float32)
        tensors = [value_of(node) for node in self.inner]  # None for a call that splits a tensor
        require(all(each is None or each.dtype in (input.dtype, wide) for each in tensors))
        require(input.device.type in ("cpu", "cuda"))

    def _tables(self, cos: Any, sin: Any, x: Tensor, dtype: torch.dtype) -> _Tables:
        """Returns cos and sin, if the operator supports them; it computes no gradients of them in one pass."""
        c, s = value(cos), value(sin)
        require(c.dtype == s.dtype and c.dtype in (dtype, torch.promote_types(dtype, torch.float32)))
        require(have_one_shape(c, s) and 0 < c.dim() <= x.dim() and is_equal(c.shape[-1], x.shape[-1]))
        leading = zip(reversed(c.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        require(all(is_equal(size, 1) or is_equal(size, of_x) for size, of_x in leading))
        require(c.device == s.device == x.device and not c.requires_grad and not s.requires_grad)
        return _Tables(cos, sin)


def _of_pairs(tables: _Tables, rotary_dim: int) -> _Tables | None:
    """Returns tables with one column for each pair, if the program repeats each column for both columns of a pair."""
    of_cos, of_sin = (_above_repeat(table, rotary_dim) for table in tables[:2])
    if of_cos is None or of_sin is None:
        return None
    (cos, cos_views, cos_repeat), (sin, sin_views, sin_repeat) = of_cos, of_sin
    return _Tables(cos, sin, (cos_views, sin_views), frozenset((*cos_views, *sin_views, cos_repeat, sin_repeat)))


def _above_repeat(node: Node, rotary_dim: int) -> tuple[Node, tuple[Node, ...], Node] | None:
    """Returns the input of ``repeat_interleave(2, -1)``, the nodes that add dimensions to its result, and its node."""
    views: list[Node] = []
    while node.target in ("unsqueeze", torch.unsqueeze) and node.args and isinstance(above := node.args[0], Node):
        views.insert(0, node)
        node = above
    call, x = other_call_of(node), value_of(node)
    if call is None or call.name != "repeat" or x is None or x.shape[-1] != rotary_dim:
        return None
    source, repeats, dim = call.arguments
    half = value_of(source)
    if repeats != 2 or half is None or half.dim() == 0 or dim not in (-1, half.dim() - 1):
        return None
    # A dimension that is added at the end would replace the columns.
    is_last = all(value(view).shape[-1] == rotary_dim for view in views)
    return (source, tuple(views), node) if is_last and half.shape[-1] * 2 == rotary_dim else None


def _join(rotation: _Rotation) -> None:
    norm, last, tables = rotation.norm, rotation.last, rotation.tables
    arguments = by_name(_NORM, norm.args, norm.kwargs)
    order, graph = rotation.order, norm.graph
    with graph.inserting_before(last):
        arguments["input"] = _permuted(
            _viewed(arguments["input"], rotation.views), [rotation.dims[dim] for dim in order]
        )
        for name, table, views in zip(("cos", "sin"), tables[:2], tables.views, strict=True):
            arguments[name] = _permuted(_viewed(table, views), order)
        flags = {
            "weight_offset": arguments.get("weight_offset", 0.0),
            "rounding": arguments.get("rounding", "once"),
            "interleaved": rotation.interleaved,
            "rotary_dim": rotation.rotary_dim,
            "rotary_offset": rotation.rotary_offset,
        }
        names = ("input", "cos", "sin", "normalized_shape", "weight", "eps")
        result = graph.call_function(_ROTATED_NORM, tuple(map(arguments.get, names)), flags)
        y = value(last)
        result.meta |= {IS_RECORDED: y.requires_grad, "example_value": y.permute(order)}
        result = _permuted(result, [order.index(dim) for dim in range(len(order))])
    result.meta |= last.meta
    last.replace_all_uses_with(result)
    for node in sorted({*rotation.nodes, *tables.unused}, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _viewed(node: Node, views: Sequence[Node]) -> Node:
    """Applies the same views to the node's value."""
    for view in views:
        x = value(node)
        viewed = node.graph.create_node(view.op, view.target, (node, *view.args[1:]), view.kwargs)
        viewed.meta["example_value"] = applied(view, x)
        node = viewed
    return node


def _permuted(node: Node, dims: Sequence[int]) -> Node:
    """Permutes the dimensions of the node's value; missing ones are added in front."""
    x = value(node)
    if list(dims) == sorted(dims):
        return node
    while x.dim() < len(dims):
        node = called("unsqueeze", node, 0)
        x = value(node)
    return called("permute", node, tuple(dims))
