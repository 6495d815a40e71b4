"""Derivatives of every order and mode, and the operators' registration."""

from collections.abc import Callable, Iterator

import cases
import pytest
import torch
from cases import FEW_CASES, Case, on
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import normops

ops = torch.ops.normops


def leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_()


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_opcheck_forward(case: Case, device: str) -> None:
    arguments = (leaf(on(device, case.input())), case.normalized_shape, leaf(on(device, case.weight())), case.eps)
    torch.library.opcheck(ops.rms_norm.default, arguments, {"weight_offset": case.weight_offset})


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_opcheck_backward(case: Case, device: str) -> None:
    arguments = (
        leaf(on(device, case.grad_output())),
        leaf(on(device, case.input())),
        case.normalized_shape,
        leaf(on(device, case.weight())),
        case.eps,
    )
    keywords = {"weight_offset": case.weight_offset, "grad_residual": leaf(on(device, case.grad_residual()))}
    torch.library.opcheck(ops.rms_norm_backward.default, arguments, keywords)


@pytest.mark.parametrize("output_mask", [(True, False), (False, True)])
def test_opcheck_masked(output_mask: tuple[bool, bool], device: str) -> None:
    case = FEW_CASES[0]
    arguments = (
        on(device, case.grad_output()),
        on(device, case.input()),
        case.normalized_shape,
        on(device, case.weight()),
    )
    torch.library.opcheck(ops.rms_norm_backward.default, arguments, {"output_mask": list(output_mask)})


def test_opcheck_out(device: str) -> None:
    case = FEW_CASES[0]
    input, weight = on(device, case.input()), on(device, case.weight())
    assert input is not None
    assert weight is not None
    torch.library.opcheck(ops.rms_norm.out, (input, case.normalized_shape, weight), {"out": torch.empty_like(input)})
    torch.library.opcheck(
        ops.rms_norm_backward.out,
        (on(device, case.grad_output()), input, case.normalized_shape, weight),
        {"grad_input": torch.empty_like(input), "grad_weight": torch.empty_like(weight)},
    )


def doubles(*shapes: tuple[int, ...], device: str) -> Iterator[Tensor]:
    for seed, shape in enumerate(shapes):
        yield cases.values(shape, torch.float64, seed).to(device).requires_grad_()


@pytest.mark.parametrize(
    ("shape", "normalized_shape", "weight_shape"),
    [
        ((3, 5), (5,), (5,)),
        ((2, 3, 4, 2), (4, 2), (4, 2)),
        ((4,), (4,), (4,)),
        ((2, 3, 4), (4,), (3, 4)),
        ((2, 2, 1, 2), (2,), (2, 2, 1, 2)),
    ],
)
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("call", [ops.rms_norm, normops.rms_norm])
def test_gradcheck_forward_operator(
    call: Callable[..., Tensor],
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    has_weight: bool,
    device: str,
) -> None:
    def norm(x: Tensor, w: Tensor | None = None) -> Tensor:
        return call(x, normalized_shape, w, cases.EPS, weight_offset=1.0)

    inputs = tuple(doubles(shape, weight_shape, device=device))[: 1 + has_weight]
    assert torch.autograd.gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, inputs)


@pytest.mark.parametrize("weight_shape", [(5,), (2, 5)])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("output_mask", [(True, True), (True, False), (False, True)])
def test_gradcheck_backward_operator(
    output_mask: tuple[bool, bool], has_weight: bool, weight_shape: tuple[int, ...], device: str
) -> None:
    if output_mask == (False, True) and not has_weight:
        pytest.skip("computes nothing")

    def norm_backward(dy: Tensor, x: Tensor, s: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
        gradients = ops.rms_norm_backward(
            dy, x, (5,), w, cases.EPS, weight_offset=1.0, grad_residual=s, output_mask=output_mask
        )
        return tuple(g for g in gradients if g is not None)

    inputs = tuple(doubles(*[(3, 2, 5)] * 3, weight_shape, device=device))[: 3 + has_weight]
    assert torch.autograd.gradcheck(norm_backward, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm_backward, inputs)


def reference_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + cases.EPS) * w


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian], ids=lambda t: t.__name__
)
def test_func_transforms(transform: Callable[..., Callable[..., tuple[Tensor, Tensor]]], device: str) -> None:
    x, w = (t.detach() for t in doubles((3, 5), (5,), device=device))
    reduces = transform is torch.func.grad

    def through(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: norm(x, w).pow(3).sum() if reduces else norm(x, w)

    actual = transform(through(lambda x, w: normops.rms_norm(x, 5, w, cases.EPS)), argnums=(0, 1))(x, w)
    expected = transform(through(reference_norm), argnums=(0, 1))(x, w)
    torch.testing.assert_close(actual, expected)


def test_jvp_of_jvp(device: str) -> None:
    primals = tuple(t.detach() for t in doubles((3, 5), (3, 5), (5,), device=device))
    tangents = tuple(t.flip(0) for t in primals)

    def twice(norm: Callable[..., Tensor]) -> object:
        return torch.func.jvp(lambda *t: torch.func.jvp(norm, t, tangents)[1], primals, tangents)

    def fused(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        y, h = normops.add_rms_norm(normops.rms_norm(x, 5, w, cases.EPS), residual, 5, w, cases.EPS)
        return y * h

    def reference(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        h = reference_norm(x, w) + residual
        return reference_norm(h, w) * h

    torch.testing.assert_close(twice(fused), twice(reference))


def test_third_derivative(device: str) -> None:
    x, w = doubles((2, 3), (3,), device=device)

    def third(norm: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        gradient = norm(x, w).pow(3).sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(gradient, x, create_graph=True)
            gradient = gradient.square().sum()
        return torch.autograd.grad(gradient, (x, w))

    torch.testing.assert_close(third(lambda x, w: normops.rms_norm(x, 3, w, cases.EPS)), third(reference_norm))


class OutputMasks(TorchDispatchMode):
    """Collects what rms_norm_backward is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is ops.rms_norm_backward.default:
            self.masks.append(args[7] if len(args) > 7 else (kwargs or {}).get("output_mask", [True, True]))
        return func(*args, **(kwargs or {}))


def test_only_the_gradients_that_are_needed_are_computed(device: str) -> None:
    x, w = (cases.values(shape, torch.float32).to(device) for shape in ((4, 8), (8,)))
    for needed in ([True, False], [False, True], [True, True]):
        a, b = x.clone().requires_grad_(needed[0]), w.clone().requires_grad_(needed[1])
        with OutputMasks() as seen:
            normops.rms_norm(a, 8, b).sum().backward()
        assert seen.masks == [needed]
        assert [a.grad is not None, b.grad is not None] == needed


def test_an_input_changed_after_the_forward_is_noticed(device: str) -> None:
    x = cases.values((4, 8), torch.float32).to(device).requires_grad_()
    h = x * 1
    y = normops.rms_norm(h, 8)
    ops.rms_norm.out(x.detach(), (8,), out=h.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_autograd(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    x, w = (t.detach() for t in doubles((3, 5), (5,), device=device))

    def gradients() -> list[Tensor | None]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        (first,) = torch.autograd.grad(normops.rms_norm(a, 5, b, cases.EPS).pow(3).sum(), a, create_graph=True)
        first.square().sum().backward()
        return [a.grad, b.grad]

    expected = gradients()
    compiler = torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with compiled_autograd._enable(compiler):
        actual = gradients()
    torch.testing.assert_close(actual, expected)
