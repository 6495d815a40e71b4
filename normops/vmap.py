"""The rule of vmap: one call of an operator for the whole batch, where PyTorch would make one call per sample.

A batch is one more dimension of rows, before the others. Where every sample has its own weight, or its own gradient of
it, the batch is a dimension of the weight, too, which broadcasts over those between.
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
    """A tensor argument for all samples: one each, along the first dimension, or one that they share."""

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
        """With so many dimensions of a sample, of which the first ones have size 1."""
        samples = self.unshared()
        first = (None,) * (dims + 1 - samples.dim())
        return _Batch(samples[(slice(None), *first)], False, self.size)


def _call(op: Operator, arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The operator's results, batched along their first dimension."""
    check = getattr(_C, f"check_{name_of(op)}")
    check(**{name: value.sample() if isinstance(value, _Batch) else value for name, value in arguments.items()})

    results = dict(zip(results_of(op), wanted(op, arguments), strict=True))
    dims = arguments["input"].sample().dim()

    def whole(name: str, value: Any) -> Any:
        if not isinstance(value, _Batch):
            return value
        if name not in BROADCAST:
            return value.unshared()
        is_one = value.is_shared and name not in TABLES and not results.get(f"grad_{name}", False)
        return value.tensor if is_one else value.of_dims(dims).tensor

    def of_samples(name: str, value: Tensor | None) -> Tensor | None:
        argument = arguments.get(of_argument(name))
        if value is None or of_argument(name) not in BROADCAST or not isinstance(argument, _Batch):
            return value
        return value.reshape(argument.size, *argument.sample().shape)

    outputs = op(**{name: whole(name, value) for name, value in arguments.items()})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(of_samples(name, value) for name, value in zip(results, outputs, strict=True))


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
        targets = [arguments[name] for name in written_by(op)]
        for name, target in zip(written_by(op), targets, strict=True):
            _check_target(name_of(op), name, target)
        results = _call(functional, arguments)
        if targets:
            for target, result in zip(targets, results, strict=True):
                target.tensor.copy_(result)
            return (args[0], dims[0]) if results_of(op) else (None, None)
        result_dims = tuple(None if value is None else 0 for value in results)
        return (results, result_dims) if len(results) > 1 else (results[0], result_dims[0])

    torch.library.register_vmap(f"normops::{name_of(op)}", rule, lib=_library)


for _op in FUNCTIONAL:
    _register(_op, _op)
for _op, _functional in INPLACE.items():
    _register(_op, _functional)
