"""Reads the graphs that AOTAutograd traces."""

from collections.abc import Callable, Sequence

from torch import fx
from traced_graphs import TracedGraphs, operators


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
    """Asserts that each pass is one operator on every device; the backward also has ``others``."""
    for name in {"cpu", "meta", device}:
        forward, backward = trace_on(name)
        assert backward is not None
        assert computed(forward) == [forward_operator]
        assert computed(backward) == [backward_operator, *others]
