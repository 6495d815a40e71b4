"""vmap rules: one call of an operator for the whole batch, where PyTorch would make one call per sample.

A batch is one more dimension of rows. Only what an operator has one of per call, the weight and its gradient, is dealt
with outside it where every sample has its own: in the type that the operator computes in, and rounded where it rounds.
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

    def samples(self) -> Sequence[Tensor]:
        return self.unshared().unbind()

    def is_large(self) -> bool:
        """Whether a call per sample takes less time than the passes over memory that one for all would need besides.

        Compiled, those passes are fused with what stands around them.
        """
        if self.is_shared or not self.size or torch.compiler.is_compiling():
            return False
        return self.tensor.numel() >= self.size << 15


_OptionalBatch = _Batch | None
_Shape = Sequence[int]


def _tensor(batch: _OptionalBatch) -> Tensor | None:
    return None if batch is None else batch.tensor


def _sample(batch: _OptionalBatch) -> Tensor | None:
    return None if batch is None else batch.sample()


def _unshared(batch: _OptionalBatch) -> Tensor | None:
    return None if batch is None else batch.unshared()


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _scale(weight: _Batch, weight_offset: float, input: Tensor) -> Tensor:
    """What each sample's rows are multiplied by, in the type computed in; ``input`` has the batch."""
    sizes = weight.tensor.shape
    scale = weight.tensor.reshape(sizes[0], *[1] * (input.dim() - len(sizes)), *sizes[1:]).to(_compute_dtype(input))
    return scale + weight_offset if weight_offset else scale


def _normalize(input: Tensor, normalized_shape: _Shape, eps: float | None) -> Tensor:
    """Without a weight, not rounded from the type computed in."""
    return _ops.rms_norm(input.to(_compute_dtype(input)), normalized_shape, None, eps)


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
    if input.is_large():
        pairs = zip(input.samples(), weight.samples(), strict=True)
        return torch.stack([_ops.rms_norm(x, normalized_shape, w, eps, weight_offset=weight_offset) for x, w in pairs])
    x = input.tensor[None] if input.is_shared else input.tensor
    output = _normalize(x, normalized_shape, eps) * _scale(weight, weight_offset, x)
    return output.to(x.dtype)


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
    x, r = input.unshared(), residual.unshared()
    if weight is None or weight.is_shared:
        return _ops.add_rms_norm(x, r, normalized_shape, _tensor(weight), eps, weight_offset=weight_offset)
    h = x + r  # of the wider of the two types, which is the residual's
    of_sum = _Batch(h, False, input.size)
    return _rms_norm(of_sum, normalized_shape, weight, eps, weight_offset=weight_offset).to(x.dtype), h


def _add_rms_norm_(input: _Batch, residual: _Batch, *args: Any, **kwargs: Any) -> None:
    _check_target("add_rms_norm_", "input", input)
    _check_target("add_rms_norm_", "residual", residual)
    output, residual_out = _add_rms_norm(input, residual, *args, **kwargs)
    input.tensor.copy_(output)
    residual.tensor.copy_(residual_out)


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
    dy, x, residual = grad_output.unshared(), input.unshared(), _unshared(grad_residual)
    keywords = {"weight_offset": weight_offset, "output_mask": output_mask}
    if weight is None or (weight.is_shared and not output_mask[1]):
        return _ops.rms_norm_backward(dy, x, normalized_shape, _tensor(weight), eps, grad_residual=residual, **keywords)
    if input.is_large():
        residuals = [None] * input.size if residual is None else residual.unbind()
        samples = zip(dy.unbind(), x.unbind(), weight.samples(), residuals, strict=True)
        results = [
            _ops.rms_norm_backward(dy, x, normalized_shape, w, eps, grad_residual=residual, **keywords)
            for dy, x, w, residual in samples
        ]
        of_inputs, of_weights = zip(*results, strict=True)
        grad_input = torch.stack(of_inputs) if output_mask[0] else None
        grad_weight = torch.stack(of_weights) if output_mask[1] else None
        return grad_input, grad_weight

    compute = _compute_dtype(x)
    grad_input = grad_weight = None
    if output_mask[0] and weight.is_shared:
        grad_input, _ = _ops.rms_norm_backward(
            dy,
            x,
            normalized_shape,
            weight.tensor,
            eps,
            weight_offset=weight_offset,
            grad_residual=residual,
            output_mask=[True, False],
        )
    elif output_mask[0]:
        # A weight is to grad_input a factor of grad_output.
        grad_input, _ = _ops.rms_norm_backward(
            dy.to(compute) * _scale(weight, weight_offset, x),
            x.to(compute),
            normalized_shape,
            None,
            eps,
            grad_residual=None if residual is None else residual.to(compute),
            output_mask=[True, False],
        )
        grad_input = grad_input.to(x.dtype)
    if output_mask[1]:
        terms = dy.to(compute) * _normalize(x, normalized_shape, eps)
        row_dims = range(1, x.dim() - len(normalized_shape))
        grad_weight = (terms.sum(tuple(row_dims)) if row_dims else terms).to(weight.tensor.dtype)
    return grad_input, grad_weight


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
