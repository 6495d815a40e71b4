"""Compares the graphs that AOTAutograd traces on several devices."""

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.operator_schemas import normalize_function
from traced_graphs import TracedGraphs, operators


def devices(device: str) -> tuple[str, ...]:
    return ("cpu", "meta") if device == "cpu" else ("cpu", "meta", device)


def canonical(graph: fx.GraphModule) -> list[str]:
    """Returns the graph's lines with numbers for names, arguments completed from schemas, and without devices."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args, kwargs = node.args, node.kwargs
        if isinstance(node.target, torch._ops.OpOverload):
            normalized = normalize_function(node.target, args, kwargs, normalize_to_only_use_kwargs=True)
            assert normalized is not None
            args, kwargs = normalized
        shown = fx.map_arg((args, dict(sorted(kwargs.items()))), lambda n: numbers[n])
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{numbers[node]} = {node.op} {target} {shown}")
    return lines


def computed(graph: fx.GraphModule) -> list[str]:
    """Returns the operators except for those that query a size or detach an output that autograd saves."""
    return [name for name in operators(graph) if not name.startswith(("aten.sym_size", "aten.detach"))]


def computed_besides_views(graph: fx.GraphModule) -> list[str]:
    """Returns the operators of computed() except for views and arithmetic on sizes."""
    return [name for name in computed(graph) if not name.startswith(("aten.view.", "<built-in function"))]


def assert_one_operator_each_way(
    trace_on: Callable[[str], TracedGraphs],
    device: str,
    forward_operator: str,
    backward_operator: str = "normops.rms_norm_backward.default",
    *,
    others: Sequence[str] = (),
) -> None:
    """Asserts that each pass is one operator (and ``others`` in the backward) and that all devices trace the same."""
    graphs = {name: trace_on(name) for name in devices(device)}
    for forward, backward in graphs.values():
        assert backward is not None
        assert computed(forward) == [forward_operator]
        assert computed(backward) == [backward_operator, *others]
    expected = graphs["cpu"]
    for forward, backward in graphs.values():
        assert canonical(forward) == canonical(expected.forward)
        assert backward is not None
        assert expected.backward is not None
        assert canonical(backward) == canonical(expected.backward)
