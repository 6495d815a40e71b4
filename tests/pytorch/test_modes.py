"""Calls under the profiler, inference mode, function modes, transforms and tracing."""

import pytest
import torch
from assertions import assert_same_bits
from torch import Tensor
from torch.overrides import TorchFunctionMode

import normops
from reference import cases

ops = torch.ops.normops


def problem(device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = (cases.values((5, 64), torch.float32, seed).to(device).requires_grad_() for seed in range(2))
    return x, residual, cases.values((64,), torch.float32, 2).to(device).requires_grad_()


def train(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, h = normops.add_rms_norm(normops.rms_norm(x, 64, w), residual, 64, w)
    return y.detach(), *torch.autograd.grad((y * h).sum(), (x, residual, w))


def test_profiler_names_operators_and_autograd_nodes(device: str) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        train(*problem(device))
    shapes = {event.name: event.input_shapes for event in profile.events()}
    x, w = [5, 64], [64]
    assert shapes["normops::rms_norm"] == [x, [], w, [], [], [], []]
    assert shapes["normops::add_rms_norm"] == [x, x, [], w, [], [], [], []]
    assert shapes["normops::rms_norm_backward"][:4] == [x, x, [], w]
    assert {"RmsNormBackward", "AddRmsNormBackward"} <= set(shapes)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["normops::rms_norm_backward"] == 2


def test_inference_tensors_outside_inference_mode(device: str) -> None:
    x, residual, w = problem(device)
    with torch.inference_mode():
        inference_x, inference_w = x.clone(), w.clone()
    with torch.no_grad():
        assert_same_bits((normops.rms_norm(inference_x, 64, inference_w),), (normops.rms_norm(x, 64, w),))
    for arguments in ((x, 64, inference_w), (inference_x, 64, w)):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            normops.rms_norm(*arguments)
    y, _ = normops.add_rms_norm(inference_x, residual, 64, w)  # saves the sum, which is no inference tensor
    assert_same_bits(
        torch.autograd.grad(y.sum(), w), torch.autograd.grad(normops.add_rms_norm(x, residual, 64, w)[0].sum(), w)
    )


def test_inplace_on_inference_tensor_requires_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = cases.values((5, 64), torch.float32).to(device)
        assert normops.rms_norm_(x, 64).is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"):
        normops.rms_norm_(x, 64)


def test_writes_are_functionalized_under_other_transforms(device: str) -> None:
    x, _, w = (tensor.detach() for tensor in problem(device))

    def norm(x: Tensor) -> Tensor:
        return normops.rms_norm_(x.clone(), 64, w)

    def written(x: Tensor) -> Tensor:
        return (x * ops.rms_norm.out(x.detach(), [64], out=torch.empty_like(x.detach()))).sum()

    functionalize, grad = torch.func.functionalize, torch.func.grad
    assert_same_bits([torch.vmap(functionalize(norm))(x)], [norm(x)])
    assert_same_bits([grad(functionalize(written))(x)], [normops.rms_norm(x, 64)])


def test_function_mode_can_replace_the_operator() -> None:
    class Twice(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is ops.rms_norm.default else result

    x = torch.ones(2, 4)
    with Twice():
        doubled = normops.RMSNorm(4)(x)
    assert torch.equal(doubled, normops.RMSNorm(4)(x) * 2)


def test_symbolic_trace_holds_the_operator() -> None:
    model = torch.nn.Sequential(normops.RMSNorm(8, 1e-3, weight_offset=1.0))
    traced = torch.fx.symbolic_trace(model)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [ops.rms_norm.default]
    x = cases.values((3, 8), torch.float32)
    assert torch.equal(traced(x), model(x))
