"""Runs the operators on a :class:`torch.distributed.tensor.DTensor` whose normalized dimensions are sharded.

No rank has a whole row. Each rank sums its part (``rms_norm_stats``), **the ranks reduce one number per row**, and each
rank normalizes its part (``rms_norm_from_stats``). The output is sharded like ``input``, and so are the weight and its
gradient. The backward recomputes the statistic, as on one device, and reduces two numbers per row in one message.
Before that, every rank checks the global arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from normops import _C
from normops._operators import FUNCTIONAL, ROWS, SUMS, Operator, by_name, name_of, results_of, wanted

_ops = torch.ops.normops
_Arguments = Mapping[str, Any]
_Placements = tuple[Placement, ...]


def _is_shard(placement: Placement) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, (Shard, _StridedShard))


def _sharded_rows(arguments: _Arguments) -> _Placements | None:
    """Returns the placements of rows if normalized dimensions are sharded and all tensors share the mesh, else None."""
    if arguments.get("bias") is not None:
        return None
    mesh = arguments["input"].device_mesh if isinstance(arguments["input"], DTensor) else None
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if not all(isinstance(tensor, DTensor) and tensor.device_mesh == mesh for tensor in tensors):
        return None
    rows = [arguments[name] for name in ROWS if arguments.get(name) is not None]
    row_dims = arguments["input"].ndim - len(arguments["normalized_shape"])

    def decide(placements: _Placements) -> Placement:
        shards = sorted(filter(_is_shard, placements), key=lambda shard: shard.dim >= row_dims)  # row dimensions first
        return next(iter(shards), Replicate())

    decided = tuple(map(decide, zip(*(tensor.placements for tensor in rows), strict=True)))
    return decided if any(_is_shard(shard) and shard.dim >= row_dims for shard in decided) else None


class _Parts:
    """Converts the arguments to this rank's parts, and results of the parts to DTensors."""

    def __init__(self, arguments: _Arguments, rows: _Placements) -> None:
        self._input: DTensor = arguments["input"]
        self._of_weight: torch.Size | None = None if arguments.get("weight") is None else arguments["weight"].shape
        self._rows = rows
        self._row_dims = self._input.ndim - len(arguments["normalized_shape"])
        self.size = prod(arguments["normalized_shape"])
        self.local = {name: self._local(name, value) for name, value in arguments.items()}
        self.local["normalized_shape"] = self.local["input"].shape[self._row_dims :]
        """The arguments of the same operator on this rank's part."""

    def of(self, *names: str) -> dict[str, Any]:
        """Returns the named arguments that the call has."""
        return {name: self.local[name] for name in names if name in self.local}

    def whole(self, name: str, value: Tensor | None) -> DTensor | None:
        """Returns the DTensor with this part."""
        if value is None:
            return None
        shape = tuple(self._input.shape)
        if name == "grad_weight":
            assert self._of_weight is not None
            shape = tuple(self._of_weight)
        elif name in SUMS:  # one sum, or several stacked
            shape = (*shape[: self._row_dims], *value.shape[self._row_dims :])
        stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
        placements = self._placements(name, Partial())
        return DTensor.from_local(
            value, self._input.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def reduced(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Reduces sums over parts of rows to sums over rows, in one message."""
        together = self.whole("square_sum", torch.stack(sums, -1))
        assert together is not None
        placements = self._placements("square_sum", Replicate())
        of_rows: Tensor = together.redistribute(placements=placements).to_local()
        return of_rows.unbind(-1)

    def _local(self, name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(placements=self._placements(name, Replicate())).to_local()

    def _placements(self, name: str, otherwise: Placement) -> _Placements:
        """Returns the placements of a tensor; ``otherwise`` where it lacks the sharded dimension."""
        return tuple(self._placement(name, placement, otherwise) for placement in self._rows)

    def _placement(self, name: str, rows: Placement, otherwise: Placement) -> Placement:
        if not _is_shard(rows):
            return rows
        if name in SUMS:
            return rows if rows.dim < self._row_dims else otherwise
        if name not in ("weight", "grad_weight"):
            return rows
        assert self._of_weight is not None
        dim = rows.dim - (self._input.ndim - len(self._of_weight))
        if dim < 0 or self._of_weight[dim] != self._input.shape[rows.dim]:
            return otherwise
        return _StridedShard(dim, split_factor=rows.split_factor) if isinstance(rows, _StridedShard) else Shard(dim)


_NORM = ("normalized_shape", "weight", "eps", "weight_offset", "rounding")
_Results = tuple[Tensor | None, ...]


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _of_sums(op: Operator, parts: _Parts) -> _Results:
    """Runs an operator whose sums over rows are sums over their parts."""
    return _as_tuple(op(**parts.local))


def _casts(parts: _Parts) -> bool:
    return bool(parts.local.get("rounding") == "llama")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _normalized(parts: _Parts, h: Tensor, dtype: torch.dtype, square_sum: Tensor | None = None) -> Tensor:
    """Returns the norm of parts of rows, rounded to a dtype. ``square_sum`` is reduced here unless it is given."""
    if square_sum is None:
        (square_sum,) = parts.reduced(_ops.rms_norm_stats(h, parts.local["normalized_shape"]))
    of_norm = parts.of(*_NORM)
    weight = of_norm.get("weight")
    if not _casts(parts) or h.dtype == dtype or weight is None:
        return _ops.rms_norm_from_stats(input=h, square_sum=square_sum, row_size=parts.size, **of_norm).to(dtype)
    of_norm["weight"] = None
    normalized = _ops.rms_norm_from_stats(input=h, square_sum=square_sum, row_size=parts.size, **of_norm)
    scale = weight.to(h.dtype) + parts.local.get("weight_offset", 0.0)
    return (normalized.to(dtype) * scale).to(dtype)


def _gradients(
    parts: _Parts, grad_output: Tensor, h: Tensor, mask: Sequence[bool], residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``h``, a part of the normalized rows, and of the weight, and the sum of squares."""
    sums = _ops.rms_norm_backward_stats(grad_output, h, **parts.of(*_NORM))
    square_sum, dot = parts.reduced(*sums)
    gradients = _ops.rms_norm_backward_from_stats(
        grad_output,
        h,
        square_sum,
        dot,
        **parts.of(*_NORM),
        grad_residual=residual,
        output_mask=mask,
        row_size=parts.size,
    )
    return *gradients, square_sum


def _rms_norm(op: Operator, parts: _Parts) -> _Results:
    input = parts.local["input"]
    return (_normalized(parts, input, input.dtype),)


def _rms_norm_backward(op: Operator, parts: _Parts) -> _Results:
    mask, residual = parts.local.get("output_mask", (True, True, True)), parts.local.get("grad_residual")
    gradients = _gradients(parts, parts.local["grad_output"], parts.local["input"], mask[:2], residual)
    return *gradients[:2], None


def _add_rms_norm(op: Operator, parts: _Parts) -> _Results:
    input, residual, alpha = parts.local["input"], parts.local["residual"], parts.local.get("alpha", 1.0)
    h = residual + input * alpha if _casts(parts) else torch.add(residual, input, alpha=alpha)
    return _normalized(parts, h, input.dtype), h


def _activated(parts: _Parts) -> tuple[Tensor, Tensor]:
    """Returns the activated gate and its slope."""
    gate = _wide(parts.local["gate"])
    s, c = gate.sigmoid(), (-gate).sigmoid()
    if parts.local.get("activation", "silu") == "sigmoid":
        return s, s * c
    return gate * s, s + gate * s * c


def _gated_rms_norm(op: Operator, parts: _Parts) -> _Results:
    input, (activated, _) = parts.local["input"], _activated(parts)
    if parts.local.get("norm_before_gate", True):
        h = input if _casts(parts) else _wide(input)
        return ((_normalized(parts, h, h.dtype) * activated).to(input.dtype),)
    return (_normalized(parts, _wide(input) * activated, input.dtype),)


def _gated_rms_norm_backward(op: Operator, parts: _Parts) -> _Results:
    input, grad_output = parts.local["input"], parts.local["grad_output"]
    for_input, for_gate, for_weight = parts.local.get("output_mask", (True, True, True))
    activated, slope = _activated(parts)
    x, dy = _wide(input), _wide(grad_output)
    grad_input: Tensor | None
    if parts.local.get("norm_before_gate", True):
        h = input if _casts(parts) else x
        grad_input, grad_weight, square_sum = _gradients(
            parts, (dy * activated).to(h.dtype), h, (for_input, for_weight)
        )
        grad_gate = dy * _normalized(parts, h, h.dtype, square_sum) * slope if for_gate else None
    else:
        through, grad_weight, _ = _gradients(parts, grad_output, x * activated, (for_input or for_gate, for_weight))
        grad_input = through * activated if for_input else None
        grad_gate = through * x * slope if for_gate else None
    return (
        None if grad_input is None else grad_input.to(input.dtype),
        None if grad_gate is None else grad_gate.to(parts.local["gate"].dtype),
        grad_weight,
    )


_Rule = Callable[[Operator, _Parts], _Results]
_RULES: dict[str, _Rule] = {
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "add_rms_norm": _add_rms_norm,
    "gated_rms_norm": _gated_rms_norm,
    "gated_rms_norm_backward": _gated_rms_norm_backward,
    "rms_norm_stats": _of_sums,
    "rms_norm_from_stats": _of_sums,
    "rms_norm_backward_stats": _of_sums,
    "rms_norm_backward_from_stats": _of_sums,
}
"""Excludes rms_norm_rope, whose pairs of columns may be on two ranks. It gathers rows, and so do norms with a bias."""


def _outside(op: Operator, arguments: _Arguments) -> _Results:
    """Returns the results on a rank outside the mesh: empty tensors of the right dtypes."""
    on_meta = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return tuple(torch.empty(0, dtype=tensor.dtype) for tensor in _as_tuple(op(**on_meta)))


def _register(op: Operator, rule: _Rule) -> None:
    check = getattr(_C, f"check_{name_of(op)}")

    def of_parts(_: type, func: Operator, types: object, args: Any, kwargs: Any) -> Any:
        arguments = by_name(op, args, kwargs or {})
        rows = _sharded_rows(arguments)
        if func is not op or rows is None:
            return NotImplemented
        check(*args, **(kwargs or {}))  # global tensors: their parts may be valid on all ranks, or on some
        with torch.no_grad():
            parts = _Parts(arguments, rows)
            has_part = arguments["input"].device_mesh.get_coordinate() is not None
            values = rule(op, parts) if has_part else _outside(op, arguments)
            results = tuple(
                parts.whole(name, value) if exists else arguments["input"].new_empty(0)
                for name, exists, value in zip(results_of(op), wanted(op, arguments), values, strict=True)
            )
        return results if len(results) > 1 else results[0]

    torch.library.register_torch_dispatch(f"normops::{name_of(op)}", DTensor, of_parts)


for _op in FUNCTIONAL:
    if name_of(_op) in _RULES:
        _register(_op, _RULES[name_of(_op)])
