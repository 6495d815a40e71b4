"""Runs the operators on nested tensors of jagged layout: sequences of several lengths, packed in one tensor of values.

The normalized dimensions come after the ragged one, and the weight has only such dimensions or is nested. The norm of
the nested tensor is then the norm of its values. normops imports this module once nested tensors are used. Derivatives
and ``torch.compile`` work as for the operators.

Example:
    >>> import torch, normops
    >>> x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    >>> [tuple(sequence.shape) for sequence in normops.rms_norm(x, 8).unbind()]
    [(2, 8), (3, 8)]
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nested._internal.ops import extract_kwargs, raggedness_matches, register_jagged_func

from normops._operators import (
    BROADCAST,
    FUNCTIONAL,
    ROWS,
    SUMS,
    TENSORS,
    Operator,
    arguments_of,
    by_name,
    name_of,
    of_argument,
    results_of,
    wanted,
)


def _check(
    name: str,
    rows: Mapping[str, NestedTensor],
    broadcast: Mapping[str, Tensor],
    normalized_shape: Sequence[int],
    dim: int,
) -> None:
    input = rows["input"]
    dims = input.dim() - input._ragged_idx  # the ragged dimension and those after it
    if dim != -1:
        raise RuntimeError(
            f"{name}: expected dim to be -1, the last dimension of input, which is nested, but got {dim}"
        )
    if len(normalized_shape) >= dims:
        raise RuntimeError(
            f"{name}: expected normalized_shape to be dimensions behind the ragged one of input, whose shape is "
            f"{list(input.shape)}, but got {list(normalized_shape)}"
        )
    for argument, tensor in broadcast.items():
        if not tensor.is_nested and tensor.dim() >= dims:
            raise RuntimeError(
                f"{name}: expected {argument} to be nested as input is, or to have dimensions behind the ragged one "
                f"of input, whose shape is {list(input.shape)}, but got {list(tensor.shape)}"
            )
    nested = {argument: tensor for argument, tensor in broadcast.items() if tensor.is_nested}
    for argument, tensor in {**rows, **nested}.items():
        if not tensor.is_nested or not raggedness_matches(input, tensor.shape):
            raise RuntimeError(
                f"{name}: expected {argument} to have the sequences of input, whose shape is {list(input.shape)}, "
                f"but got {list(tensor.shape)}"
            )


def _check_sums(op: Operator, results: Iterable[str], shared: Collection[str]) -> None:
    """Refuses sums over the values of an input with holes between its sequences."""
    for result in results:
        if of_argument(result) in shared:
            raise RuntimeError(
                f"{name_of(op)}: expected input to be a nested tensor without holes, over all of whose values "
                f"{result} is summed, but got one with lengths"
            )


def _like(input: NestedTensor, values: Tensor) -> Tensor:
    return NestedTensor(values, **extract_kwargs(input))


def _register(op: Operator) -> None:
    def of_values(op: Operator, *args: Any, **kwargs: Any) -> Any:
        arguments = by_name(op, args, kwargs)
        rows = {name: arguments[name] for name in (*ROWS, *SUMS) if arguments.get(name) is not None}
        broadcast = {name: arguments[name] for name in BROADCAST if arguments.get(name) is not None}
        _check(name_of(op), rows, broadcast, arguments["normalized_shape"], arguments.get("dim", -1))
        nested = {name: tensor for name, tensor in {**rows, **broadcast}.items() if tensor.is_nested}
        shared = broadcast.keys() - nested
        if rows["input"].lengths() is not None:
            _check_sums(op, compress(results_of(op), wanted(op, arguments)), shared)
        results = op(**arguments | {name: tensor._values for name, tensor in nested.items()})
        if isinstance(results, Tensor):
            return _like(rows["input"], results)
        return tuple(
            _like(rows["input"], value) if exists and of_argument(name) not in shared else value
            for name, exists, value in zip(results_of(op), wanted(op, arguments), results, strict=True)
        )

    of_values.__name__ = name_of(op)  # torch's own messages begin with it
    names = arguments_of(op)
    first = names[: names.index("normalized_shape")]
    nested = ", ".join(f"{name}: {'jt_all' if name in (*ROWS, *SUMS) else 'any'}" for name in first)
    register_jagged_func(op, f"{nested}, normalized_shape: any, ...")(of_values)


for _op in FUNCTIONAL:
    _register(_op)
TENSORS.add(NestedTensor)
