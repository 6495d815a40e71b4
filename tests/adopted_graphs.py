"""Compiles functions with the passes of normops and records the graphs, without generating code."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from traced_graphs import operators

from normops.inductor import ModelRounding
from normops.inductor.passes import AfterAutograd, BeforeAutograd, BeforePartition


class Graphs(NamedTuple):
    of_dynamo: list[str]
    """Dynamo's graph, before and after the passes."""
    forward: list[str]
    """The operators of all graphs."""
    backward: list[str]


def compiled_with_passes(
    fn: Callable[..., Any], *, dynamic: bool = False, rounding: ModelRounding = "once", recompute_norms: bool = False
) -> tuple[Callable[..., Any], Graphs]:
    """Returns the function, compiled without graph breaks, and its graphs, which are recorded when it runs."""
    graphs = Graphs([], [], [])

    def after_autograd(names: list[str]) -> Callable[[fx.GraphModule, list[Tensor]], Any]:
        def compiler(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
            AfterAutograd(rounding=rounding)(graph.graph)
            graph.graph.lint()
            graph.recompile()
            names.extend(operators(graph))
            return make_boxed_func(graph)

        return compiler

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if recompute_norms:
            BeforePartition()(joint.graph)
            joint.graph.lint()
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    aot = aot_autograd(
        fw_compiler=after_autograd(graphs.forward),
        bw_compiler=after_autograd(graphs.backward),
        partition_fn=partition,
    )

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.of_dynamo.append(str(graph.graph))
        BeforeAutograd(rounding=rounding)(graph.graph)
        graph.graph.lint()
        graph.recompile()
        graphs.of_dynamo.append(str(graph.graph))
        return aot(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), graphs


def norms(names: list[str]) -> list[str]:
    """Returns the operators of normops among ``names``, without their overloads."""
    return [name.split(".")[1] for name in names if name.startswith("normops.")]


def biased(graphs: Graphs) -> int:
    """Counts the norms that received a bias."""
    return sum("rms_norm.default" in line and "bias: %" in line for line in graphs.of_dynamo[-1].splitlines())
