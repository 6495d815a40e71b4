"""Assertions about results and errors."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    # Cloned, because a tensor with one element counts as contiguous with any stride.
    copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (actual, expected))
    flat = (tensor.reshape(-1).view(torch.uint8) for tensor in copies)
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(*flat)


def assert_same_bits(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None], message: object = "") -> None:
    """Compares two sequences of equal length, tensor by tensor; None matches None only."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None), message
        assert a is None or b is None or same_bits(a, b), message


def message_of(call: Callable[[], object]) -> str:
    """Returns the first line of the error that a call raises."""
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value).splitlines()[0]
