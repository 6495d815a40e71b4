"""Registers vmap rules: one call of an operator for the whole batch, instead of one call per sample.

The batch is the first dimension of the rows. If each sample has its own weight, or its own gradient of the weight, the
batch is also the weight's first dimension. The weight then broadcasts over the dimensions in between.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normops import _C
from normops._operators import (
    BROADCAST,
    FUNCTIONAL,
    INPLACE,
    TABLES,
    Operator,
    arguments_of,
    name_of,
    of_argument,
    results_of,
    wanted,
    written_by,
)

_library = torch.library.Library("normops", "IMPL")


class _Batch(NamedTuple):
    """A tensor argument for all samples: one per sample, along the first dimension, or one that they share."""

    tensor: Tensor
    is_shared: bool
    size: int

    def sample(self) -> Tensor:
        if self.is_shared:
            return self.tensor
        return self.tensor[0] if self.size else self.tensor.new_empty(self.tensor.shape[1:])

    def unshared(self) -> Tensor:
        return self.tensor.expand(self.size, *self.tensor.shape) if self.is_shared else self.tensor

    def of_dims(self, dims: int) -> "_Batch":
        """Returns an unshared batch whose samples have ``dims`` dimensions: those of size 1 are added in front."""
        samples = self.unshared()
        first = (None,) * (dims + 1 - samples.dim())
        return _Batch(samples[(slice(None), *first)], False, self.size)


def _whole(op: Operator, arguments: dict[str, Any]) -> dict[str, Any]:
    """Checks the arguments for one sample, and returns those of a call for all samples."""
    check = getattr(_C, f"check_{name_of(op)}")
    check(**{name: value.sample() if isinstance(value, _Batch) else value for name, value in arguments.items()})

    is_wanted = dict(zip(results_of(op), wanted(op, arguments), strict=True))
    dims = arguments["input"].sample().dim()
    # A kernel sums both gradients if weight and bias have one shape.
    sums_bias = is_wanted.get("grad_bias", False)

    def whole(name: str, value: Any) -> Any:
        if not isinstance(value, _Batch):
            return value
        if name not in BROADCAST:
            return value.unshared()
        is_summed = is_wanted.get(f"grad_{name}", False) or (name == "weight" and sums_bias)
        return value.tensor if value.is_shared and name not in TABLES and not is_summed else value.of_dims(dims).tensor

    return {name: whole(name, value) for name, value in arguments.items()}


def _call(op: Operator, arguments: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Returns the operator's results, batched along their first dimension, and the batch dimension of each."""

    def of_samples(name: str, value: Tensor) -> Tensor:
        argument = arguments.get(of_argument(name))
        if of_argument(name) not in BROADCAST or not isinstance(argument, _Batch):
            return value
        return value.reshape(argument.size, *argument.sample().shape)

    outputs = op(**_whole(op, arguments))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    are_wanted = wanted(op, arguments)
    results = zip(results_of(op), outputs, are_wanted, strict=True)
    return (
        tuple(of_samples(name, value) if is_wanted else value for name, value, is_wanted in results),
        tuple(0 if is_wanted else None for is_wanted in are_wanted),
    )


def _check_target(op: str, name: str, target: _Batch) -> None:
    if target.is_shared:
        raise RuntimeError(
            f"{op}: expected {name}, which is written to, to be batched like the other arguments under vmap, "
            "but got one tensor for all samples"
        )


def _register(op: Operator, functional: Operator) -> None:
    def rule(info: Any, dims: Sequence[int | None], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def to_batch(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return _Batch(value if dim is None else value.movedim(dim, 0), dim is None, info.batch_size)

        arguments = {name: to_batch(*pair) for name, *pair in zip(arguments_of(op), args, dims, strict=False)} | kwargs
        for name in written_by(op):
            _check_target(name_of(op), name, arguments[name])
        if written_by(op):
            op(**_whole(functional, arguments))
            return (args[0], dims[0]) if results_of(op) else (None, None)
        results, result_dims = _call(functional, arguments)
        return (results, result_dims) if len(results) > 1 else (results[0], result_dims[0])

    torch.library.register_vmap(f"normops::{name_of(op)}", rule, lib=_library)


for _op in FUNCTIONAL:
    _register(_op, _op)
for _op, _functional in INPLACE.items():
    _register(_op, _functional)
