"""vmap rules: one call of an operator for the whole batch, where PyTorch would make one call per sample.

A batch is one more dimension of rows. Where every sample has its own weight, or its own gradient of it, the batch is a
dimension of the weight, too: the first of its groups, which stands right before the others in the other arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo, custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils._pytree import tree_map

from normops import _C

_ops = torch.ops.normops
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


_OptionalBatch = _Batch | None
_Shape = Sequence[int]


def _tensor(batch: _OptionalBatch) -> Tensor | None:
    return None if batch is None else batch.tensor


def _sample(batch: _OptionalBatch) -> Tensor | None:
    return None if batch is None else batch.sample()


def _before(weight: Tensor, batch: _Batch) -> Tensor:
    """The samples along the dimension that is the first one of a weight for each."""
    return batch.unshared().movedim(0, batch.unshared().dim() - weight.dim())


def _first(weight: Tensor, result: Tensor) -> Tensor:
    """The way back."""
    return result.movedim(result.dim() - weight.dim(), 0).contiguous()


def _rms_norm(
    input: _Batch,
    normalized_shape: _Shape,
    weight: _OptionalBatch = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    _C.check_rms_norm(input.sample(), normalized_shape, _sample(weight), eps)
    if weight is None or weight.is_shared:
        return _ops.rms_norm(input.tensor, normalized_shape, _tensor(weight), eps, weight_offset=weight_offset)
    w = weight.tensor
    return _first(w, _ops.rms_norm(_before(w, input), normalized_shape, w, eps, weight_offset=weight_offset))


def _rms_norm_(input: _Batch, *args: Any, **kwargs: Any) -> None:
    _check_target("rms_norm_", "input", input)
    input.tensor.copy_(_rms_norm(input, *args, **kwargs))


def _add_rms_norm(
    input: _Batch,
    residual: _Batch,
    normalized_shape: _Shape,
    weight: _OptionalBatch = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _C.check_add_rms_norm(input.sample(), residual.sample(), normalized_shape, _sample(weight), eps)
    if weight is None or weight.is_shared:
        x, r = input.unshared(), residual.unshared()
        return _ops.add_rms_norm(x, r, normalized_shape, _tensor(weight), eps, weight_offset=weight_offset)
    w = weight.tensor
    x, r = _before(w, input), _before(w, residual)
    y, h = _ops.add_rms_norm(x, r, normalized_shape, w, eps, weight_offset=weight_offset)
    return _first(w, y), _first(w, h)


def _add_rms_norm_(input: _Batch, residual: _Batch, *args: Any, **kwargs: Any) -> None:
    _check_target("add_rms_norm_", "input", input)
    _check_target("add_rms_norm_", "residual", residual)
    output, residual_out = _add_rms_norm(input, residual, *args, **kwargs)
    input.tensor.copy_(output)
    residual.tensor.copy_(residual_out)


def _gated_rms_norm(
    input: _Batch,
    gate: _Batch,
    normalized_shape: _Shape,
    weight: _OptionalBatch = None,
    eps: float | None = None,
    **keywords: Any,
) -> Tensor:
    activation = keywords.get("activation", "silu")
    _C.check_gated_rms_norm(input.sample(), gate.sample(), normalized_shape, _sample(weight), eps, activation)
    if weight is None or weight.is_shared:
        x, g = input.unshared(), gate.unshared()
        return _ops.gated_rms_norm(x, g, normalized_shape, _tensor(weight), eps, **keywords)
    w = weight.tensor
    return _first(w, _ops.gated_rms_norm(_before(w, input), _before(w, gate), normalized_shape, w, eps, **keywords))


def _rms_norm_backward(
    grad_output: _Batch,
    input: _Batch,
    normalized_shape: _Shape,
    weight: _OptionalBatch = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    grad_residual: _OptionalBatch = None,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    _C.check_rms_norm_backward(
        grad_output.sample(), input.sample(), normalized_shape, _sample(weight), eps, _sample(grad_residual)
    )
    rows = grad_output, input, grad_residual
    keywords = {"weight_offset": weight_offset, "output_mask": output_mask}
    if weight is None or (weight.is_shared and not output_mask[1]):
        dy, x, residual = (None if batch is None else batch.unshared() for batch in rows)
        return _ops.rms_norm_backward(dy, x, normalized_shape, _tensor(weight), eps, grad_residual=residual, **keywords)
    w = weight.unshared()
    dy, x, residual = (None if batch is None else _before(w, batch) for batch in rows)
    grad_input, grad_weight = _ops.rms_norm_backward(
        dy, x, normalized_shape, w, eps, grad_residual=residual, **keywords
    )
    return None if grad_input is None else _first(w, grad_input), grad_weight


def _gated_rms_norm_backward(
    grad_output: _Batch,
    input: _Batch,
    gate: _Batch,
    normalized_shape: _Shape,
    weight: _OptionalBatch = None,
    eps: float | None = None,
    *,
    output_mask: Sequence[bool] = (True, True, True),
    **keywords: Any,
) -> tuple[Tensor | None, ...]:
    activation = keywords.get("activation", "silu")
    _C.check_gated_rms_norm_backward(
        grad_output.sample(), input.sample(), gate.sample(), normalized_shape, _sample(weight), eps, activation
    )
    rows = grad_output, input, gate
    keywords["output_mask"] = output_mask
    if weight is None or (weight.is_shared and not output_mask[2]):
        unshared = (batch.unshared() for batch in rows)
        return _ops.gated_rms_norm_backward(*unshared, normalized_shape, _tensor(weight), eps, **keywords)
    w = weight.unshared()
    *of_rows, grad_weight = _ops.gated_rms_norm_backward(
        *(_before(w, batch) for batch in rows), normalized_shape, w, eps, **keywords
    )
    return *(None if gradient is None else _first(w, gradient) for gradient in of_rows), grad_weight


def _check_target(op: str, name: str, target: _Batch) -> None:
    if target.is_shared:
        raise RuntimeError(
            f"{op}: expected {name}, which is written to, to be batched like the other arguments under vmap, "
            "but got one tensor for all samples"
        )


def _register(op: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Like torch.library.register_vmap, which takes no operator with a tensor among its keywords.

    The rule has the operator's arguments and returns its results, batched along their first dimension.
    """

    def call(args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def batched(info: VmapInfo, dims: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def to_batch(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return _Batch(value if dim is None else value.movedim(dim, 0), dim is None, info.batch_size)

        args_batches = [to_batch(*pair) for pair in zip(args, dims[0], strict=True)]
        kwargs_batches = {name: to_batch(value, dims[1][name]) for name, value in kwargs.items()}
        result = rule(*args_batches, **kwargs_batches)
        if op._schema.is_mutable:
            return (args[0], dims[0][0]) if op._schema.returns else (None, None)
        return result, tree_map(lambda value: None if value is None else 0, result)

    def dispatched(keys: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, batched, call, args, kwargs)  # type: ignore[arg-type]

    _library.impl(op, dispatched, "FuncTorchBatched", with_keyset=True)


_register(_ops.rms_norm.default, _rms_norm)
_register(_ops.rms_norm_.default, _rms_norm_)
_register(_ops.rms_norm_backward.default, _rms_norm_backward)
_register(_ops.add_rms_norm.default, _add_rms_norm)
_register(_ops.add_rms_norm_.default, _add_rms_norm_)
_register(_ops.gated_rms_norm.default, _gated_rms_norm)
_register(_ops.gated_rms_norm_backward.default, _gated_rms_norm_backward)
