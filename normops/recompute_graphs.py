"""Recomputes outputs of norms in the backward, in the joint graph of forward and backward that AOTAutograd traces."""

import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from normops._operators import FUNCTIONAL, by_name, name_of

_normops = torch.ops.normops
_NORMS = (
    _normops.rms_norm.default,
    _normops.gated_rms_norm.default,
    _normops.channel_rms_norm.default,
    _normops.rms_norm_rope.default,
)
_BACKWARDS = tuple(op for op in FUNCTIONAL if name_of(op).endswith("_backward"))


class RecomputeNorms(CustomGraphPass):
    """The pass for Inductor's option ``joint_custom_post_pass``; first runs the passes that it replaces there."""

    def __init__(self, *before: Any) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        """Changes a graph of ATen's that contains forward and backward."""
        for other in self.before:
            other(graph)
        recompute_norms(graph)

    def uuid(self) -> Any:
        """Returns the key of the passes in Inductor's caches; None, which disables caching, if another one has none."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before]
        return None if None in others else (get_hash_for_files((__file__,)), *others)


def recompute_norms(graph: Graph) -> None:
    """Marks the norms whose input the backward needs anyway: the partitioner recomputes these in the backward."""
    backward = _after_tangents(graph)
    for node in list(graph.nodes):
        if "recompute" in node.meta:  # a checkpoint decides
            continue
        if node.target in _NORMS and _takes_what_is_kept(by_name(node.target, node.args, node.kwargs)):
            _mark(node)
        elif node.target is _normops.add_rms_norm.default:
            _normalize_sum_again(node, backward)


def _mark(norm: Node) -> None:
    # The number identifies a region to recompute. The results of the region before it are stored.
    norm.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": sys.maxsize}


def _takes_what_is_kept(norm: Mapping[str, Any]) -> bool:
    """Returns whether the norm's input is saved, and also a residual that it adds, which is as large as the output."""
    input, bias = norm["input"], norm.get("bias")
    is_residual = bias is not None and statically_known_true(bias.meta["val"].numel() == input.meta["val"].numel())
    return _is_kept(input) and not (is_residual and not _is_kept(bias))


def _is_kept(input: Any) -> bool:
    return any(user.target in _BACKWARDS or (_is_view(user) and _is_kept(user)) for user in input.users)


def _is_view(node: Node) -> bool:
    return getattr(node.target, "is_view", False)


def _after_tangents(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _normalize_sum_again(norm: Node, backward: set[Node]) -> None:
    """Gives the backward the norm of the sum, which equals the output if both have the same dtype."""
    parts = {part.args[1]: part for part in norm.users if part.target is operator.getitem}
    if 0 not in parts or 1 not in parts or not _is_kept(parts[1]):
        return
    output, total = parts[0], parts[1]
    if output.meta["val"].dtype != total.meta["val"].dtype:
        return
    options = by_name(_normops.add_rms_norm.default, norm.args, norm.kwargs)
    arguments = total, options["normalized_shape"], options.get("weight"), options.get("eps")
    options = {name: value for name, value in options.items() if name in ("weight_offset", "rounding")}
    with norm.graph.inserting_after(max(output, total)):
        again = norm.graph.call_function(_normops.rms_norm.default, arguments, options)
    again.meta |= output.meta
    _mark(again)
    _use_instead(output, again, backward)
    if not again.users:
        norm.graph.erase_node(again)


def _use_instead(old: Node, new: Node, backward: set[Node]) -> None:
    """Replaces a node in the backward only, which gets its own views."""
    for user in list(old.users):
        if user in backward:
            user.replace_input_with(old, new)
        elif _is_view(user):
            with user.graph.inserting_after(max(user, new)):
                view = user.graph.node_copy(user, lambda node: new if node is old else node)
            _use_instead(user, view, backward)
            if not view.users:
                user.graph.erase_node(view)
