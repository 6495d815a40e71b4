"""Compares a patched module with its original: values, gradients and strides, for inputs of many layouts."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 64


def assert_alike(
    actual: Any, expected: Any, where: str, dtype: torch.dtype = torch.float32, least: float = 0.0
) -> None:
    """Allows several roundings to the coarsest of the input's dtype, the result's dtype and float32. If terms cancel,
    the error is relative to the largest element, or to ``least`` if that is larger.
    """
    assert type(actual) is type(expected), where
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), where
        for each, other in zip(actual, expected, strict=True):
            assert_alike(each, other, where, dtype)
    if not isinstance(expected, Tensor):
        return
    assert (actual.dtype, actual.shape, actual.requires_grad) == (
        expected.dtype,
        expected.shape,
        expected.requires_grad,
    ), where
    if not expected.numel():
        return
    largest = max(least, float(expected.detach().double().abs().nan_to_num().max()))
    eps = max(torch.finfo(each).eps for each in (dtype, expected.dtype, torch.float32))
    torch.testing.assert_close(
        actual.detach().double(),
        expected.detach().double(),
        rtol=4 * eps,
        atol=16 * eps * largest,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


def layouts(width: int) -> Iterator[Tensor]:
    """Yields inputs of many shapes and layouts, with the same numbers in every call."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    yield from (
        randn(*shape, width) for shape in ((), (1,), (64,), (3, 1), (2, 5), (2, 1, 3), (4, 4, 2, 3), (2, 1, 2, 1, 3))
    )
    yield 1e-4 * randn(5, width)
    yield 1e3 * randn(5, width)
    yield torch.zeros(2, width)
    yield randn(0, width)
    yield randn(5, 2 * width)[:, width:]
    yield randn(5, width, 2)[..., 0]
    yield randn(width, 5).t()
    yield randn(2, 5, 4 * width).view(2, 5, 4, width).transpose(1, 2)
    yield randn(1, 5, 4 * width).view(1, 5, 4, width).transpose(1, 2)
    yield randn(2, 3, width, 4).permute(0, 3, 1, 2)
    yield randn(2, width, 3).transpose(1, 2)
    yield randn(5, 1, width).expand(5, 3, width)
    yield randn(1, 4, width).expand(5, 4, width)
    # Channels in dimension 1.
    yield from (randn(2, width, *shape) for shape in ((3, 4), (5,), (2, 3, 2), (1, 3), (1, 1), (1, 2, 2), (4, 3, 3)))
    yield from (randn(2, *shape, width).movedim(-1, 1) for shape in ((3, 4), (2, 3, 2), (3,), (1, 2, 2), (1, 1)))
    yield 1e-4 * randn(2, width, 3, 2)
    yield torch.zeros(2, width, 2, 2)
    yield randn(0, width, 2, 2)
    yield randn(2, width, 3, 8)[..., ::2]
    yield randn(2, 2 * width, 3, 3)[:, ::2]
    yield randn(1, width, 3, 3).expand(3, width, 3, 3)
    yield randn(3, 4, width, 2).permute(3, 2, 0, 1)


def outcome(module: nn.Module, tensors: tuple[Tensor, ...]) -> tuple[Any, list[Tensor | None]]:
    """Returns the result, or the type of the error, and the gradients."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    try:
        result = module(*leaves)
        if not result.requires_grad:
            return result, []
        upstream = torch.linspace(-1.0, 2.0, result.numel()).view(result.shape).to(result.dtype)
        return result, list(torch.autograd.grad(result, (*leaves, *parameters), upstream, allow_unused=True))
    except Exception as error:
        return type(error), []


def inputs_of(module: nn.Module, *, some: bool, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    is_gated = len(inspect.signature(type(module).forward).parameters) > 2
    for i, x in enumerate(layouts(SIZE)):
        if some and i not in (2, 4, 6, 15, 21, 23):
            continue
        yield (x.to(dtype), 3 * x.to(dtype).flip(0) + 0.5) if is_gated and x.dim() else (x.to(dtype),)
    weight = next(iter(module.parameters()), None)
    if not some and weight is not None and weight.dim() > 1:
        yield (torch.linspace(-2.0, 3.0, 2 * weight.numel()).view(2, *weight.shape).to(dtype),)


def assert_is_what_it_was(patched: nn.Module, original: nn.Module, *, some: bool = False) -> None:
    for training in (False, True):
        for module in (patched, original):
            module.train(training)
        for dtype in (torch.float32, torch.bfloat16):
            for tensors in inputs_of(original, some=some, dtype=dtype):
                where = f"{tuple(tensors[0].shape)}, {tensors[0].stride()}, {dtype}, training={training}"
                (actual, grads), (expected, other_grads) = outcome(patched, tensors), outcome(original, tensors)
                assert_alike(actual, expected, where, dtype)
                if isinstance(expected, Tensor):
                    assert actual.stride() == expected.stride(), f"{where}: strides"
                # Gradients of a nearly open gate come from 1 - sigmoid, which cancels.
                is_gated = len(tensors) > 1 and isinstance(expected, Tensor) and expected.numel() > 0
                least = float(expected.detach().abs().nan_to_num().max()) if is_gated else 0.0
                # A module whose result has 16 bits rounds gradients to them, the original more often.
                rounded = expected.dtype if isinstance(expected, Tensor) and expected.dtype.itemsize == 2 else dtype
                assert len(grads) == len(other_grads), where
                for grad, other in zip(grads, other_grads, strict=True):
                    assert (grad is None) == (other is None), where
                    assert_alike(grad, other, f"{where}: gradients", rounded, least)
