"""What AOTAutograd traces: one fused operator forward, one backward, nothing else, the same on every device."""

import pytest
import torch
from graphs import assert_one_operator_each_way
from torch import Tensor
from traced_graphs import TracedGraphs, operators, trace

import normops
from reference import cases


def traced(device: str, weight_shape: tuple[int, ...] | None, dynamic: bool) -> TracedGraphs:
    input = cases.values((6, 3, 16), torch.bfloat16).to(device).requires_grad_()
    weight = None if weight_shape is None else torch.ones(weight_shape, device=device, requires_grad=True)

    def norm(input: Tensor, weight: Tensor | None) -> Tensor:
        return normops.rms_norm(input, 16, weight, 1e-5, weight_offset=0.5)

    return trace(norm, input, weight, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("weight_shape", [None, (16,), (3, 16)])
def test_one_operator_each_way(weight_shape: tuple[int, ...] | None, dynamic: bool, device: str) -> None:
    assert_one_operator_each_way(lambda name: traced(name, weight_shape, dynamic), device, "normops.rms_norm.default")


class Block(torch.nn.Module):
    """What surrounds a norm in a model: Inductor may fuse all of it but the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = normops.RMSNorm(64, eps=1e-5, weight_offset=1.0)
        self.linear = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.silu(self.linear(self.norm(x))) * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_equals_eager(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        x = cases.values((rows, 64), torch.float32, rows).to(device)
        results = []
        for call in (block, compiled):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            output = call(leaf)
            output.square().sum().backward()
            results.append([output, leaf.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)


def test_inductor_equals_eager_bit_for_bit_on_the_norm_alone(device: str) -> None:
    torch._dynamo.reset()
    norm = normops.RMSNorm(48, eps=1e-5).to(device)
    compiled = torch.compile(norm, fullgraph=True)
    x = cases.values((7, 48), torch.bfloat16).to(device).requires_grad_()
    gradient = cases.values((7, 48), torch.bfloat16, 1).to(device)
    eager_output, compiled_output = norm(x), compiled(x)
    assert torch.equal(eager_output, compiled_output)
    parameters = (x, norm.weight)
    eager = torch.autograd.grad(eager_output, parameters, gradient)
    for a, b in zip(eager, torch.autograd.grad(compiled_output, parameters, gradient), strict=True):
        assert torch.equal(a, b)


def test_out_overload_compiles_to_the_functional_operator(device: str) -> None:
    def norm_into(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.normops.rms_norm.out(x, [8], None, 1e-5, out=out)
        return out + 1

    x = cases.values((4, 8), torch.float32).to(device)
    eager_out, compiled_out = torch.empty_like(x), torch.empty_like(x)
    eager = norm_into(x, eager_out)
    torch._dynamo.reset()
    compiled = torch.compile(norm_into, fullgraph=True)(x, compiled_out)
    assert torch.equal(compiled, eager)
    assert torch.equal(compiled_out, eager_out)
    graphs = trace(norm_into, x, torch.empty_like(x))
    assert operators(graphs.forward)[:1] == ["normops.rms_norm.default"]
