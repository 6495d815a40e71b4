"""Assertions about results and errors."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import oracle
from reference.oracle import Bounded


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


def assert_within(
    results: Iterable[Tensor | None],
    expected: Iterable[Bounded | None],
    message: object = "",
    *,
    accepts_infinite_bounds: bool = False,
) -> None:
    """Compares results with the oracle's bounds; None matches None only. Bounds may be infinite, or NaN by
    multiplication with 0, where an argument is not finite: any number is then accepted."""
    for index, (result, bounded) in enumerate(zip(results, expected, strict=True)):
        assert (result is None) == (bounded is None), message
        if result is None or bounded is None:
            continue
        if accepts_infinite_bounds:
            bounded = bounded._replace(bound=np.nan_to_num(bounded.bound, nan=np.inf, posinf=np.inf))
        oracle.assert_within(result, bounded, f"result {index} {message}")


def message_of(call: Callable[[], object], error: type[Exception] = RuntimeError) -> str:
    """Returns the first line of the error that a call raises."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value).splitlines()[0]
