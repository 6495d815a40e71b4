"""What Inductor calls with the graphs that it compiles."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from normops.inductor import inductor_options
from normops.inductor.calls import DTYPES, NORMS, order_in_memory, specialized, value_of
from normops.inductor.handwritten import match_norm
from normops.inductor.residuals import fuse_additions

_SOURCES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


class _Pass(CustomGraphPass):
    def uuid(self) -> Any:
        """By which Inductor's caches keep apart what was compiled with other passes, or none."""
        return get_hash_for_files(_SOURCES, type(self).__name__)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class BeforeAutograd(_Pass):
    """Norms become operators of normops, so that autograd makes one of each, forward and backward."""

    def __call__(self, graph: Graph) -> None:
        """Changes a graph of Dynamo's, with what is under it."""
        # The body of a higher-order operator, such as a checkpointed layer, is a module of its own.
        for module in [] if graph.owning_module is None else graph.owning_module.modules():
            if isinstance(module, GraphModule) and module.graph is not graph:
                replace_norms(module.graph)
                module.recompile()
        replace_norms(graph)


class AfterAutograd(_Pass):
    """Additions join the norms."""

    def __call__(self, graph: Graph) -> None:
        """Changes a graph of ATen's."""
        fuse_additions(graph)


def replace_norms(graph: Graph) -> None:
    """Those of torch, and those written by hand."""
    for node in list(graph.nodes):
        if node.target in NORMS:
            _replace_norm_of_torch(node)
        elif node.users and (match := match_norm(node)) is not None:
            x = value_of(match.input)
            assert x is not None
            if x.device.type not in ("cpu", "cuda"):
                continue
            size = x.shape[-1]
            with graph.inserting_before(match.last):
                shape = [size if isinstance(size, int) else graph.call_method("size", (match.input, -1))]
            weight, weight_offset = match.weight or (None, 0.0)
            _compute_instead(match.last, match.input, match.dtype, shape, weight, match.eps, weight_offset)
            for inner in sorted(match.nodes, reverse=True):
                if not inner.users:
                    graph.erase_node(inner)


def _replace_norm_of_torch(node: Node) -> None:
    parameters = ("input", "normalized_shape", "weight", "eps")
    arguments: dict[str, Any] = dict.fromkeys(parameters) | dict(zip(parameters, node.args, strict=False)) | node.kwargs
    input, shape, weight, eps = (arguments[name] for name in parameters)
    x, w, y = value_of(input), value_of(weight), value_of(node)
    if x is None or y is None or x.device.type not in ("cpu", "cuda") or order_in_memory(y, _length(shape)) is None:
        return
    if any(tensor is not None and tensor.dtype not in DTYPES for tensor in (x, w, y)):
        return
    number = specialized(eps)
    if eps is None or (number is not None and math.isfinite(number)):
        dtype = torch.promote_types(x.dtype, y.dtype)
        _compute_instead(node, input, dtype, shape, weight, number, 0.0)
        node.graph.erase_node(node)


def _length(shape: Any) -> int:
    return len(shape.meta["example_value"] if isinstance(shape, Node) else shape)


def _compute_instead(
    node: Node,
    input: Node,
    dtype: torch.dtype,
    normalized_shape: Any,
    weight: Node | None,
    eps: float | None,
    weight_offset: float,
) -> None:
    """Computes in a dtype that is none narrower than the input's and the result's, into the strides of the result."""
    x, y, graph = value_of(input), value_of(node), node.graph
    assert x is not None
    assert y is not None
    order = order_in_memory(y, _length(normalized_shape))
    assert order is not None
    is_permuted = list(order) != sorted(order)
    with graph.inserting_before(node):
        input = input if x.dtype == dtype else graph.call_method("to", (input, dtype))
        input = graph.call_method("permute", (input, order)) if is_permuted else input
        arguments = (input, normalized_shape, weight, eps)
        result = graph.call_function(torch.ops.normops.rms_norm.default, arguments, {"weight_offset": weight_offset})
        if is_permuted:
            result = graph.call_method("permute", (result, tuple(map(order.index, range(len(order))))))
        result = result if y.dtype == dtype else graph.call_method("to", (result, y.dtype))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)


def backend(
    graph: GraphModule, inputs: Sequence[Tensor], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """What ``torch.compile(model, backend="normops")`` calls: Inductor with :func:`inductor_options`.

    Args:
        graph: what Dynamo traced.
        inputs: of the graph.
        mode: as that of torch.compile.
        options: Inductor's, besides.
    """
    of_mode = list_mode_options(mode) if mode else {}
    return compile_fx(graph, inputs, config_patches={**of_mode, **(options or {}), **inductor_options()})
