"""Returns the graphs that torch.compile passes to a compiler backend.

`trace` compiles a function with AOTAutograd, runs it forward and backward once and returns the two graphs;
`operators` lists the operators of a graph. Nothing is computed on the "meta" device, so a model can be traced there
without the hardware it is meant for:

    layer = normops.RMSNorm(64, device="meta")
    graphs = trace(layer, torch.randn(8, 64, device="meta", requires_grad=True))
    operators(graphs.forward)  # ['normops.rms_norm.default']
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd


class TracedGraphs(NamedTuple):
    forward: fx.GraphModule
    backward: fx.GraphModule | None


def trace(fn: Callable[..., Tensor | tuple[Tensor, ...]], *args: object, dynamic: bool = False) -> TracedGraphs:
    """Returns the graphs of `fn(*args)`; the backward one is None if no output requires a gradient.

    Gradients accumulate in the leaves that `fn` uses, as in any backward pass.
    """
    graphs: dict[str, fx.GraphModule] = {}

    def keep_as(name: str) -> Callable[[fx.GraphModule, list[Any]], Any]:
        def compiler(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
            graphs[name] = graph
            return make_boxed_func(graph)

        return compiler

    # Code compiled by an earlier call would be reused without calling the compilers.
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep_as("forward"), bw_compiler=keep_as("backward"))
    output = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    differentiable = [tensor for tensor in (output if isinstance(output, tuple) else (output,)) if tensor.requires_grad]
    if differentiable:
        # The backward graph is compiled only when it is first run.
        torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    return TracedGraphs(graphs["forward"], graphs.get("backward"))


def operators(graph: fx.GraphModule) -> list[str]:
    """Returns the names of the operators that `graph` calls, in order, without the unpacking of tuples."""
    calls = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return [str(target) for target in calls if target is not operator.getitem]
