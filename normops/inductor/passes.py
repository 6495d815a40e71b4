"""Defines the passes that Inductor calls with the graphs that it compiles."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, custom_graph_pass, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from normops.functional import Rounding
from normops.inductor import ModelRounding, inductor_options
from normops.inductor.activations import join_activations
from normops.inductor.calls import (
    DTYPES,
    NORMOPS_NORMS,
    NORMS,
    arguments_of_norm,
    called,
    length,
    order_in_memory,
    specialize_what_is_above,
    specialized,
    value_of,
)
from normops.inductor.effects import (
    IS_COPY,
    IS_RECORDED,
    changes_views,
    may_write,
    memory_of,
    memory_written_by,
    shares_memory,
    subgraphs,
)
from normops.inductor.handwritten import match_norm
from normops.inductor.modulations import join_modulations
from normops.inductor.recompute import recompute_norms
from normops.inductor.residuals import fuse_additions
from normops.inductor.rotations import join_rotations

_normops = torch.ops.normops

# The whole package, because the passes depend on the schemas and on the tensor classes that support the operators.
_SOURCES = tuple(str(path) for path in sorted(Path(__file__).parents[1].rglob("*.py")))


_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
"""torch's class of passes with the argument ``is_inference``; None in a torch without it."""


class _Pass(_InferenceAware or CustomGraphPass):  # type: ignore[misc]
    """A pass of normops, which first runs the passes that it replaces in Inductor's slot."""

    def __init__(self, *before: Any, rounding: ModelRounding = "once") -> None:
        self.before = before
        self.rounding = rounding

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for other in self.before:
            if _InferenceAware is not None and isinstance(other, _InferenceAware):
                other(graph, is_inference)
            else:
                other(graph)
        self.change(graph)

    def change(self, graph: Graph) -> None:
        """Changes the graph; does nothing in this class."""

    def uuid(self) -> Any:
        """Returns the key by which Inductor's caches distinguish these passes from others and from none.

        Returns None, which disables caching, if one of the other passes has no key.
        """
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before]
        ours = get_hash_for_files(_SOURCES, f"{type(self).__name__} {self.rounding}")
        return None if None in others else (ours, *others)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and (self.rounding, self.before) == (other.rounding, other.before)

    def __hash__(self) -> int:
        return hash((type(self), self.rounding, self.before))


class BeforeAutograd(_Pass):
    """Replaces norms and the operations after them by operators, before AOTAutograd traces forward and backward."""

    def change(self, graph: Graph) -> None:
        """Changes a graph of Dynamo's, with its subgraphs."""
        if any(map(changes_views, graph.nodes)):
            return
        replace_norms(graph, self.rounding)
        join_rotations(graph, self.rounding)
        join_modulations(graph, self.rounding)
        join_activations(graph, self.rounding)
        keep_what_is_written(graph)


class AfterAutograd(_Pass):
    """Fuses additions before norms, and to their gradients, with the norms' operators."""

    def change(self, graph: Graph) -> None:
        """Changes a graph of ATen's."""
        fuse_additions(graph, self.rounding)


class BeforePartition(_Pass):
    """Recomputes outputs of norms in the backward."""

    def change(self, graph: Graph) -> None:
        """Changes a graph of ATen's that contains forward and backward."""
        recompute_norms(graph)


_PASSES = {"pre_grad_custom_pass": BeforeAutograd, "post_grad_custom_pre_pass": AfterAutograd}


_RECOMPUTE = "joint_custom_post_pass"


def passes_after(options: Mapping[str, Any], rounding: ModelRounding, recomputes: bool) -> dict[str, Any]:
    """Returns the options with our passes, which run after those of other options, or else of Inductor's config."""
    passes: dict[str, type[_Pass]] = dict(_PASSES)
    if recomputes or is_recomputing(options):
        passes[_RECOMPUTE] = BeforePartition if recomputes else _Pass
    return {
        name: ours(*_without_ours(options.get(name, getattr(config, name))), rounding=rounding)
        for name, ours in passes.items()
    }


def is_recomputing(options: Mapping[str, Any]) -> bool:
    """Returns whether options, or else Inductor's config, have our pass for recomputation."""
    return isinstance(options.get(_RECOMPUTE, getattr(config, _RECOMPUTE)), BeforePartition)


def _without_ours(passes: Any) -> list[Any]:
    passes = passes if isinstance(passes, (list, tuple)) else () if passes is None else (passes,)
    return [each for given in passes for each in (given.before if isinstance(given, _Pass) else (given,))]


def replace_norms(graph: Graph, rounding: ModelRounding) -> None:
    """Replaces torch's own norms and handwritten norms, also in the bodies of higher-order operators."""
    for node in list(graph.nodes):
        for body in subgraphs(node):
            replace_norms(body.graph, rounding)
            body.recompile()
        if node.target in NORMS:
            _replace_norm_of_torch(node)
        elif node.users and (match := match_norm(node)) is not None:
            x = value_of(match.input)
            assert x is not None
            of_norm = match.rounding if rounding == "original" else "once"
            if x.device.type not in ("cpu", "cuda") or of_norm is None or _is_written_as_view(match.last, 1):
                continue
            size = x.shape[match.dim]
            with graph.inserting_before(match.last):
                shape = [size if isinstance(size, int) else graph.call_method("size", (match.input, match.dim))]
            weight, weight_offset = match.weight or (None, 0.0)
            options = (match.eps, weight_offset, of_norm, match.dim, match.bias)
            _compute_instead(match.last, match.input, match.dtype, shape, weight, *options)
            for inner in sorted(match.nodes, reverse=True):
                if not inner.users:
                    graph.erase_node(inner)


def keep_what_is_written(graph: Graph) -> None:
    """Copies arguments of replaced norms to which later nodes may write.

    The operator saves its arguments for the backward. The replaced code usually saves casts and products, so that the
    program may write to the arguments. Inductor removes the copies once the graph is functional. Inputs of the graph
    are therefore not copied: they are still written in place, and autograd raises an error.
    """
    inputs = [memory_of(node) for node in graph.nodes if node.op == "placeholder"]
    _keep(graph, set(), set().union(*inputs))


def _keep(graph: Graph, written: set[Any], inputs: set[Any]) -> None:
    for node in reversed(list(graph.nodes)):
        for body in subgraphs(node):
            # A body may run several times, so all its writes may also happen later.
            _keep(body.graph, written | memory_written_by(node), inputs)
            body.recompile()
        if _is_recorded(node):
            # Copies made in a body are not repeated for the whole graph: Inductor calls a pass with the body first.
            for argument in node.all_input_nodes:
                if (
                    value_of(argument) is not None
                    and shares_memory(argument, written)
                    and not memory_of(argument) <= inputs
                ):
                    with graph.inserting_before(node):
                        copy = graph.call_method("clone", (argument,))
                        copy.meta[IS_COPY] = True
                        node.replace_input_with(argument, copy)
        written = written | memory_written_by(node)


def _is_recorded(node: Node) -> bool:
    """Returns whether a node is an operator of normops, from a pass or the program, that saves its arguments."""
    value = value_of(node)
    is_of_program = node.target in NORMOPS_NORMS and value is not None and value.requires_grad
    return is_of_program or node.meta.get(IS_RECORDED, False)


def _replace_norm_of_torch(node: Node) -> None:
    # torch's norm computes in a wider dtype, including the product with a weight of any dtype, and rounds once.
    input, shape, weight, eps = arguments_of_norm(node)
    x, w, y = value_of(input), value_of(weight), value_of(node)
    if x is None or y is None or x.device.type not in ("cpu", "cuda") or order_in_memory(y, length(shape)) is None:
        return
    if any(tensor is not None and tensor.dtype not in DTYPES for tensor in (x, w, y)):
        return
    if _is_written_as_view(node, length(shape)):
        return
    # torch makes eps a constant even if the program computes it, and its caches may return code for another eps.
    specialize_what_is_above(eps)
    number = specialized(eps)
    if eps is None or (number is not None and math.isfinite(number)):
        dtype = torch.promote_types(x.dtype, y.dtype)
        _compute_instead(node, input, dtype, shape, weight, number, 0.0, "once")
        node.graph.erase_node(node)


def _is_written_as_view(node: Node, normalized_dims: int) -> bool:
    """Returns whether a node writes to the norm's result, and a view would replace it: autograd may forbid that."""
    y = value_of(node)
    order = () if y is None else order_in_memory(y, normalized_dims) or ()
    return list(order) != sorted(order) and any(map(may_write, node.users))


def _compute_instead(
    node: Node,
    input: Node,
    dtype: torch.dtype,
    normalized_shape: Any,
    weight: Node | None,
    eps: float | None,
    weight_offset: float,
    rounding: Rounding,
    dim: int = -1,
    bias: Node | None = None,
) -> None:
    """Replaces a node by normops, which computes in ``dtype``. The result has the strides of the node's."""
    x, y, graph = value_of(input), value_of(node), node.graph
    assert x is not None
    assert y is not None
    order = order_in_memory(y, length(normalized_shape) if dim == -1 else y.dim())
    assert order is not None
    is_permuted = list(order) != sorted(order)
    with graph.inserting_before(node):
        if x.dtype != dtype:
            input = called("to", input, dtype)
        if is_permuted:
            input = called("permute", input, order)
        options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding}
        operator = _normops.rms_norm.default
        if dim != -1:
            operator = _normops.channel_rms_norm.default
            weight, bias = (each if each is None else called("flatten", each) for each in (weight, bias))
            options |= {"bias": bias, "dim": dim}
        result = graph.call_function(operator, (input, normalized_shape, weight, eps), options)
        x = input.meta["example_value"]
        result.meta |= {IS_RECORDED: y.requires_grad, "example_value": x.new_empty(x.shape)}
        if is_permuted:
            result = graph.call_method("permute", (result, tuple(map(order.index, range(len(order))))))
        result = result if y.dtype == dtype else graph.call_method("to", (result, y.dtype))
    result.meta |= node.meta
    node.replace_all_uses_with(result)


def backend(
    graph: GraphModule, inputs: Sequence[Tensor], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles a graph with Inductor and :func:`inductor_options`, for ``torch.compile(model, backend="normops")``.

    Args:
        graph: the graph that Dynamo traced.
        inputs: the inputs of the graph.
        mode: see :func:`torch.compile`.
        options: options of Inductor; see :func:`inductor_options` for passes among them. ``"rounding"`` and
            ``"recompute_norms"`` are the arguments of :func:`inductor_options`; by default they are those of normops'
            passes among the options.

    Returns:
        The compiled graph.
    """
    all_options = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    given = next((each.rounding for each in all_options.values() if isinstance(each, _Pass)), "once")
    rounding = all_options.pop("rounding", given)
    recomputes = all_options.pop("recompute_norms", is_recomputing(all_options))
    patches = inductor_options(all_options, rounding=rounding, recompute_norms=recomputes)
    return compile_fx(graph, inputs, config_patches=patches)
