"""Recognises an RMSNorm in the graph of a module's forward, if the graph computes nothing else.

The norm itself is found by the same code as in the passes for torch.compile. Before and after it may be groups of
columns, a gate and casts. The graph is refused if any other operation remains.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from normops.adoption.following import Run, TracedFloat
from normops.adoption.reasons import Unfit
from normops.inductor.calls import (
    DTYPES,
    NORMS,
    UNIT_NORMS,
    Call,
    arguments_of_norm,
    arguments_of_unit_norm,
    call_of,
    is_reshape,
    number,
    value_of,
)
from normops.inductor.handwritten import match_norm
from normops.inductor.search import widens


class Gating(NamedTuple):
    """How a gate is applied."""

    activation: str
    norm_before_gate: bool


class Structure(NamedTuple):
    """The RMSNorm that a graph computes."""

    eps: str | float | None
    """The name of the attribute, if the graph uses its number unchanged; else the number. None is F.rms_norm's."""
    weight: str | None
    """The name of the parameter."""
    weight_offset: float
    bias: str | None
    """The name of the parameter that is added after the weight."""
    normalized_dims: int
    group_size: int | None
    """The number of elements that are normalized together, if these are not all of the normalized dimensions."""
    gating: Gating | None


def structure_of(run: Run) -> Structure:
    """Returns the RMSNorm that one call of a forward computed.

    Raises:
        Unfit: with the reason, if it computed more than an RMSNorm, or something else.
    """
    return _Reading(run).read()


def check_alike(run: Run, other: Run) -> None:
    """Checks that two calls computed the same, except for dtypes.

    Raises:
        Unfit: with the reason, if not, or if a cast of the second call loses more than both its input and its result.
    """
    if _but_for_casts(run) != _but_for_casts(other):
        raise Unfit("computes something else than in float32")
    for node in other.graph.nodes:
        if (call := call_of(node)) is not None and call.name == "cast":
            _check_cast(other, call.arguments[0], node)


def _but_for_casts(run: Run) -> list[Any]:
    numbers: dict[Node, int] = {}
    calls: list[Any] = []
    for node in run.graph.nodes:
        call = call_of(node)
        if call is not None and call.name == "cast":
            numbers[node] = numbers[call.arguments[0]]
            continue
        numbers[node] = len(calls)
        arguments = (node.args, node.kwargs) if call is None else call.arguments
        names = [each.attribute for each in (*node.args, *node.kwargs.values()) if isinstance(each, TracedFloat)]
        calls.append(
            (node.op, call.name if call else node.target, map_arg(arguments, lambda n: f"%{numbers[n]}"), names)
        )
    return [*calls, numbers[run.result]]


def _check_cast(run: Run, before: Node, after: Node) -> None:
    """Refuses a cast that loses more than both the input's dtype and the result's."""
    ends = (run.arguments[0], run.result)
    if not _widens(before, after) and not _is_wide(after) and not any(_widens(end, after) for end in ends):
        raise Unfit(f"rounds to {str(_value(after).dtype).removeprefix('torch.')} on the way")


class _Core(NamedTuple):
    """The norm itself, without the operations before and after it in the graph."""

    input: Node
    last: Node
    nodes: frozenset[Node]
    eps: Any
    weight: Node | None
    weight_offset: float
    normalized_dims: int
    scale: float = 1.0
    """The factor that must follow: the norm then divides by the root of the mean, not of the sum."""


class _Reading:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._x, *gates = run.arguments
        self._gate = gates[0] if gates else None
        self._shape = _value(self._x).shape
        self._read: set[Node] = set()
        self._parameters = {node: name for name, node in run.parameters.items()}
        self._weight: str | None = None
        self._weight_offset = 0.0
        self._bias: str | None = None
        self._gating: Gating | None = None
        self._scale = 1.0

    def read(self) -> Structure:
        run = self._run
        for node in run.graph.nodes:
            is_norm = node.target in (*NORMS, *UNIT_NORMS)
            if node.op != "placeholder" and call_of(node) is None and not is_reshape(node) and not is_norm:
                raise Unfit(f"calls {_named(node)}, which is no part of {self._sought}")
            if _value(node).dtype not in DTYPES:
                raise Unfit(f"computes in {str(_value(node).dtype).removeprefix('torch.')}")
        if _value(run.result).shape != self._shape:
            raise Unfit("returns something else than a tensor of its input's shape")
        core = self._core()
        self._read |= core.nodes
        self._scale = core.scale
        for node in core.nodes:
            if (call := call_of(node)) is not None and call.name == "cast":
                _check_cast(run, call.arguments[0], node)
        if core.weight is not None:
            self._found_weight(core.weight, core.weight_offset)
        self._above(core.input, core.normalized_dims)
        self._below(core.last)
        if self._scale != 1.0:
            raise Unfit(f"multiplies the rows of unit length not by {self._scale:g}, the root of their width")
        others = [node for node in run.graph.nodes if node.op != "placeholder" and node not in self._read]
        if others:
            raise Unfit(f"computes more than {self._sought}: {_named(others[0])}")
        for name in run.parameters:
            if name not in (self._weight, self._bias):
                raise Unfit(f"does not use its {name}")
        if self._gate is not None and self._gating is None:
            raise Unfit(f"computes something else than {self._sought}")
        size = _value(core.input).shape[-1]
        is_grouped = core.normalized_dims == 1 and size != self._shape[-1]
        eps = core.eps.attribute if isinstance(core.eps, TracedFloat) and self._is_once(core.eps) else core.eps
        eps = eps if isinstance(eps, str) or eps is None else number(eps)
        group_size = size if is_grouped else None
        affine = self._weight, self._weight_offset, self._bias
        return Structure(eps, *affine, core.normalized_dims, group_size, self._gating)

    @property
    def _sought(self) -> str:
        return "an RMSNorm" if self._gate is None else "a gated RMSNorm"

    def _is_once(self, eps: TracedFloat) -> bool:
        """Returns whether eps is the only use of its attribute in the graph."""
        arguments = [each for node in self._run.graph.nodes for each in (*node.args, *node.kwargs.values())]
        return [getattr(each, "attribute", None) for each in arguments].count(eps.attribute) == 1

    def _core(self) -> _Core:
        found = [core for node in self._run.graph.nodes if (core := _core_at(node)) is not None]
        if len(found) != 1:
            raise Unfit(f"computes something else than {self._sought}")
        return found[0]

    def _above(self, node: Node, dims: int) -> None:
        """Reads the operations between the input and the normalized tensor."""
        groups = _value(node).shape
        while node is not self._x:
            call = call_of(node)
            self._read.add(node)
            if call is not None and call.name == "cast":
                _check_cast(self._run, call.arguments[0], node)
                (node,) = call.arguments
            elif is_reshape(node):
                node = self._reshaped(node)
            elif call is not None and call.name == "mul" and (factors := self._gated(call)) is not None:
                node, activation = factors
                self._gating = Gating(activation, norm_before_gate=False)
            else:
                raise Unfit(f"computes something else than {self._sought}: {_named(node)} before the norm")
        size = groups[-1]
        if groups != self._shape and (self._shape[-1] % size != 0 or size == 1 or dims > 1):
            raise Unfit(f"normalizes {size} elements of rows of {self._shape[-1]}")

    def _below(self, node: Node) -> None:
        """Reads the operations between the norm and the result."""
        while node is not self._run.result:
            if len(node.users) != 1:
                raise Unfit(f"computes something else than {self._sought}: uses {_named(node)} twice")
            (user,) = node.users
            call = call_of(user)
            self._read.add(user)
            if call is not None and call.name == "cast":
                _check_cast(self._run, node, user)
            elif is_reshape(user):
                self._reshaped(user)
            elif call is not None and call.name == "mul":
                a, b = call.arguments
                self._multiplied(node, b if a is node else a)
            elif call is not None and call.name == "add" and self._gate is None:
                a, b = call.arguments
                self._added(node, b if a is node else a)
            else:
                raise Unfit(f"computes something else than {self._sought}: {_named(user)} after the norm")
            node = user

    def _multiplied(self, node: Node, factor: Any) -> None:
        scale = number(factor)
        if self._scale != 1.0 and scale is not None and math.isclose(scale, self._scale):
            self._scale = 1.0
            return
        activation = self._activation(factor)
        if activation is not None and self._gating is None and _value(factor).shape == _value(node).shape:
            self._gating = Gating(activation, norm_before_gate=True)
            return
        weight, offset = self._parameter_above(factor)
        if weight is None or self._weight is not None:
            raise Unfit(f"multiplies by something else than {'a weight' if self._gate is None else 'weight and gate'}")
        if self._bias is not None:
            raise Unfit("adds a bias before the weight")
        self._check_fits(node, factor, "weight")
        self._weight, self._weight_offset = self._parameters[weight], offset

    def _added(self, node: Node, summand: Any) -> None:
        if number(summand) == 0.0:
            return
        bias, offset = self._parameter_above(summand)
        if bias is None or offset != 0.0 or self._bias is not None:
            raise Unfit("adds something else than a bias")
        self._check_fits(node, summand, "bias")
        self._bias = self._parameters[bias]

    def _check_fits(self, node: Node, other: Node, what: str) -> None:
        """Refuses a parameter that does not have one number for each column."""
        shape, rows = _value(other).shape, _value(node).shape
        if shape != rows[len(rows) - len(shape) :] or shape.numel() % self._shape[-1] != 0:
            raise Unfit(f"has a {what} of shape {tuple(shape)} for rows of {rows[-1]}")

    def _found_weight(self, node: Node, offset: float) -> None:
        weight, inner_offset = self._parameter_above(node)
        if weight is None:
            raise Unfit(f"multiplies by something else than its weight: {_named(node)}")
        self._weight, self._weight_offset = self._parameters[weight], offset + inner_offset

    def _parameter_above(self, node: Any) -> tuple[Node | None, float]:
        """Returns the parameter and the offset, if a node computes only their sum; else None."""
        offset: float | None = None
        passed = []
        while isinstance(node, Node) and node not in self._parameters:
            call = call_of(node)
            passed.append(node)
            if call is not None and call.name == "cast" and _widens(call.arguments[0], node):
                (node,) = call.arguments
            elif is_reshape(node):
                node = self._reshaped(node)
            elif call is not None and call.name == "add" and offset is None:
                a, b = call.arguments
                node, constant = (a, b) if isinstance(a, Node) else (b, a)
                offset = number(constant)
                if offset is None:
                    return None, 0.0
            else:
                return None, 0.0
        if not isinstance(node, Node):
            return None, 0.0
        self._read.update(passed)
        return node, offset or 0.0

    def _gated(self, call: Call) -> tuple[Node, str] | None:
        """Returns the other factor and the gate's activation, if the activated gate is a factor of a product."""
        for factor, other in (call.arguments, call.arguments[::-1]):
            if not isinstance(other, Node) or self._gating is not None:
                return None
            if (activation := self._activation(factor)) is not None:
                return other, activation
        return None

    def _activation(self, node: Any) -> str | None:
        """Returns the activation, if a node computes that of the gate and nothing else."""
        activation = None
        passed = []
        while isinstance(node, Node) and node is not self._gate:
            call = call_of(node)
            passed.append(node)
            if call is not None and call.name in ("silu", "sigmoid") and activation is None:
                activation = call.name
                (node,) = call.arguments
            elif call is not None and call.name == "cast" and (_widens(call.arguments[0], node) or _is_wide(node)):
                (node,) = call.arguments
            elif is_reshape(node):
                node = self._reshaped(node)
            else:
                return None
        if self._gate is None or node is not self._gate or activation is None:
            return None
        self._read.update(passed)
        return activation

    def _reshaped(self, node: Node) -> Node:
        (input,) = node.all_input_nodes or (None,)
        if input is None or _value(input).dtype != _value(node).dtype:
            raise Unfit(f"calls {_named(node)} for something else than another shape")
        return input


def _core_at(node: Node) -> _Core | None:
    if node.target in UNIT_NORMS:
        return _unit_norm(node)
    if node.target not in NORMS:
        match = match_norm(node)
        if match is None or match.dim != -1:
            return None
        weight, offset = match.weight or (None, 0.0)
        eps = match.eps_argument
        return _Core(match.input, match.last, match.nodes, eps, weight, offset, 1)
    input, shape, weight, eps = arguments_of_norm(node)
    return _Core(input, node, frozenset((node,)), eps, weight, 0.0, len(shape))


def _unit_norm(node: Node) -> _Core:
    """Returns the core of F.normalize, whose eps is a lower bound of the divisor, not a summand of the mean."""
    given = arguments_of_unit_norm(node)
    input, eps = given["input"], number(given["eps"])
    if number(given["p"]) != 2.0 or given["dim"] not in (-1, _value(input).dim() - 1) or eps is None:
        raise Unfit("normalizes other dimensions, or another norm")
    size = _value(input).shape[-1]
    return _Core(input, node, frozenset((node,)), eps**2 / size, None, 0.0, 1, math.sqrt(size))


def _value(node: Any) -> Tensor:
    value = value_of(node)
    if value is None:
        raise Unfit("computes something else than strided tensors")
    return value


def _widens(before: Node, after: Node) -> bool:
    return widens(_value(before), _value(after))


def _is_wide(node: Node) -> bool:
    """Returns whether a node's dtype is at least float32, in which most modules compute for inputs of all dtypes."""
    return _value(node).dtype in (torch.float32, torch.float64)


def _named(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
