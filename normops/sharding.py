"""Runs the operators on :class:`torch.distributed.tensor.DTensor` without communication where rows are sharded.

normops imports this module when ``torch.distributed.tensor`` is imported. No call is needed.

**Sharded rows need no communication**, because rows are independent. If ``input`` is ``Shard(d)``, and ``d`` is not
among the dimensions of ``normalized_shape``, the outputs are ``Shard(d)``, too. ``grad_weight`` is then ``Partial()``:
its consumer reduces it over the ranks. ``weight``, ``bias``, ``cos`` and ``sin`` broadcast over ``input``. If they have
the sharded dimension, they and their gradients are sharded like ``input``: weights of heads, shifts of samples,
positions of a sequence.

**Sharded normalized dimensions stay sharded**, except for rotations and norms with a bias: :mod:`normops.sharded_rows`.

**All other placements are replicated first**: an ``input`` that is ``Partial()`` is reduced, and a weight with another
sharding is gathered. If several arguments have the shape of ``input``, the first one whose rows are sharded on a
dimension of the mesh determines the placement of all. ``normalized_shape`` is that of the whole tensor, and so of its
shards.

**Errors** are those of whole tensors. Every rank raises them before any communication, so no rank waits for another
one.

``rms_norm_``, ``add_rms_norm_`` and ``rms_norm_rope_`` cannot change the sharding of the tensors that they write to,
and raise an error if they would have to. The ``.out`` overloads do not support DTensor.

Example:
    >>> import torch, normops
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> x = distribute_tensor(torch.randn(4, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
    >>> normops.rms_norm(x, 8).placements
    (Shard(dim=0),)
    >>> destroy_process_group()
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import SequenceParallel as _SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Module, Parameter

from normops import sharded_rows as sharded_rows
from normops._arguments import as_shape, call, check_numbers
from normops._operators import (
    BROADCAST,
    FUNCTIONAL,
    INPLACE,
    ROWS,
    TENSORS,
    arguments_of,
    by_name,
    name_of,
    normalized_dims,
    results_of,
    wanted,
    written_by,
)
from normops.functional import Rounding

__all__ = ["HiddenParallel", "SequenceParallel", "rms_norm_from_stats", "rms_norm_stats"]

Placements = tuple[Placement, ...]


def _row_placements(specs: Mapping[str, DTensorSpec], normalized: range) -> Placements:
    given = [specs[name] for name in ROWS if name in specs]  # in order of precedence

    def decide(placements: Placements) -> Placement:
        shards = (p for p in placements if isinstance(p, (Shard, _StridedShard)) and p.dim not in normalized)
        return next(shards, Replicate())

    return tuple(map(decide, zip(*(spec.placements for spec in given), strict=True)))


def _of_broadcast(
    rows: Placement, spec: DTensorSpec, input: DTensorSpec, normalized: range, otherwise: Placement
) -> Placement:
    """Returns the placement of a tensor that broadcasts over rows, or of its gradient: that of a shared dimension."""
    if rows.is_replicate():
        return Replicate()
    assert isinstance(rows, (Shard, _StridedShard))
    of_row = rows.dim if rows.dim < normalized.start else rows.dim - len(normalized)
    dim = of_row - (input.ndim - spec.ndim)
    if dim < 0 or spec.shape[dim] != input.shape[rows.dim]:
        return otherwise
    return _StridedShard(dim, split_factor=rows.split_factor) if isinstance(rows, _StridedShard) else Shard(dim)


def _strategy(schema: OpSchema) -> OpStrategy:
    """Returns the only strategy: tensors with the shape of input are all sharded by the same rows, or replicated."""
    arguments = by_name(schema.op, schema.args_schema, schema.kwargs_schema)
    specs = {
        name: value.strategies[0].output_spec for name, value in arguments.items() if isinstance(value, OpStrategy)
    }
    mesh = schema.get_mesh_from_args()
    normalized = normalized_dims(arguments, specs["input"].ndim)
    rows = _row_placements(specs, normalized)
    others: dict[str, Placements] = {}
    for name in BROADCAST:
        for of_it, otherwise in ((name, Replicate()), (f"grad_{name}", Partial())) if name in specs else ():
            others[of_it] = tuple(_of_broadcast(p, specs[name], specs["input"], normalized, otherwise) for p in rows)

    def placed(name: str) -> DTensorSpec:
        return DTensorSpec(mesh, others.get(name, rows))

    for name in written_by(schema.op):
        if specs[name].placements != rows:
            raise RuntimeError(
                f"{name_of(schema.op)}: expected {name}, which is written to, to be placed as {rows}, but got "
                f"{specs[name].placements}"
            )

    outputs = tuple(
        placed(name) if exists else DTensorSpec(mesh, (Replicate(),) * mesh.ndim)
        for name, exists in zip(results_of(schema.op), wanted(schema.op, arguments), strict=True)
    )
    return OpStrategy([OpSpec(outputs[0] if len(outputs) == 1 else outputs or None, [placed(name) for name in specs])])


for _op in (*FUNCTIONAL, *INPLACE):
    # The cache's key has all arguments. A miss checks the arguments, as whole tensors, before any communication.
    register_op_strategy(_op, RuntimeSchemaInfo(static_argnum=0, static_kwargkey=list(arguments_of(_op))))(_strategy)
TENSORS.update((DTensor, AsyncCollectiveTensor))


def _place_arguments(module: Module, place: Callable[[Tensor], DTensor]) -> Module:
    """Places the tensors that a module is called with, by position or by keyword."""

    def placed(value: Any) -> Any:
        return place(value) if isinstance(value, Tensor) else value

    def before_call(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(placed, args)), {name: placed(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(before_call, with_kwargs=True)
    return module


class SequenceParallel(_SequenceParallel):
    """Extends :class:`torch.distributed.tensor.parallel.SequenceParallel` to norms that are called with a residual.

    PyTorch's class passes only a module's first argument on, so the norm would get no residual. This class shards all
    tensors that the module is called with, by position or by keyword, and all outputs, on the sequence dimension. It
    takes the same arguments. Norms without a residual work with both classes.

    Example:
        >>> from normops.sharding import SequenceParallel
        >>> plan = {"norm": SequenceParallel()}  # for parallelize_module(model, mesh, plan)
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        def place(tensor: Tensor) -> DTensor:
            prepare: Callable[..., DTensor] = _SequenceParallel._prepare_input_fn
            return prepare(self.sequence_sharding, None, (tensor,), device_mesh)  # it names the module in an error

        replicate = partial(_SequenceParallel._replicate_module_fn, self)
        to_local: Any = partial(self._prepare_output_fn, self.use_local_output)
        distribute_module(module, device_mesh, replicate, None, to_local)
        return _place_arguments(module, place)

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        if isinstance(outputs, tuple):
            return tuple(_SequenceParallel._prepare_output_fn(use_local_output, mod, o, device_mesh) for o in outputs)
        return _SequenceParallel._prepare_output_fn(use_local_output, mod, outputs, device_mesh)


class HiddenParallel(ParallelStyle):
    """Normalizes rows of which each rank has some columns, such as the outputs of a ``ColwiseParallel`` layer.

    Each tensor that the module is called with, by position or by keyword, contains this rank's columns of a larger
    tensor. All ranks have the same number of columns. The parameters are sharded in the same way. The forward
    communicates one number per row.

    Args:
        use_local_output: True returns this rank's columns as tensors, False returns DTensors.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel
        >>> from normops.sharding import HiddenParallel
        >>> plan = {"query": ColwiseParallel(), "query_norm": HiddenParallel()}  # for parallelize_module(block, ...)
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        def place(tensor: Tensor) -> DTensor:
            if isinstance(tensor, DTensor):
                return tensor
            return DTensor.from_local(tensor, device_mesh, [Shard(tensor.ndim - 1)], run_check=False)

        to_own: Any = self._to_own  # torch's annotation says that its result is unused
        distribute_module(module, device_mesh, self._shard, None, to_own)
        return _place_arguments(module, place)

    @staticmethod
    def _shard(_: str, module: Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, [Shard(parameter.ndim - 1)])
            module.register_parameter(name, Parameter(sharded, requires_grad=parameter.requires_grad))

    def _to_own(self, _: Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if not self.use_local_output:
            return outputs
        return tuple(o.to_local() for o in outputs) if isinstance(outputs, tuple) else outputs.to_local()


def rms_norm_stats(input: Tensor, normalized_shape: int | Sequence[int]) -> Tensor:
    r"""Computes the sum of squares of each row, or of a part of each row: the first step of :func:`normops.rms_norm`.

    .. math:: s = \sum_j x_j^2

    With tensor parallelism, each rank has some columns of every row: reduce the result over the ranks, and pass it to
    :func:`rms_norm_from_stats`. Without a reduction in between, the two steps return the bits of
    :func:`normops.rms_norm`. The function is differentiable.

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        normalized_shape: the last dimensions of ``input``, over which the sum is taken. An ``int`` means one dimension.

    Returns:
        A contiguous tensor with the leading dimensions of ``input``: float32, or float64 for float64 inputs.

    Raises:
        RuntimeError: see :func:`normops.rms_norm`.

    Example:
        >>> import torch
        >>> from normops.sharding import rms_norm_stats
        >>> rms_norm_stats(torch.tensor([[3.0, 4.0]]), 2)
        tensor([25.])
    """
    return call(torch.ops.normops.rms_norm_stats.default, input, as_shape(normalized_shape))


def rms_norm_from_stats(
    input: Tensor,
    square_sum: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    row_size: int,
    weight_offset: float = 0,
    rounding: Rounding = "once",
) -> Tensor:
    r"""Normalizes rows, or parts of rows, with given sums of squares: the second step of :func:`normops.rms_norm`.

    .. math:: y = \frac{x}{\sqrt{\text{square\_sum} / \text{row\_size} + \epsilon}} \cdot (w + \text{weight\_offset})

    With tensor parallelism, ``input`` and ``weight`` are the columns of this rank. ``square_sum`` is the sum of
    :func:`rms_norm_stats` over the ranks, and ``row_size`` the number of columns of all ranks. The function is
    differentiable in ``input``, ``square_sum`` and ``weight``. With a differentiable reduction, so is the whole norm.

    Args:
        input: shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64; any strides.
        square_sum: the leading dimensions of ``input``; float32, or float64 for float64 inputs.
        normalized_shape: the last dimensions of ``input``. An ``int`` means one dimension.
        weight: see :func:`normops.rms_norm`.
        eps: see :func:`normops.rms_norm`.
        row_size: the number of elements of a whole row, at least as many as ``normalized_shape`` has.
        weight_offset: see :func:`normops.rms_norm`.
        rounding: see :func:`normops.rms_norm`.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``input``.

    Raises:
        RuntimeError: see :func:`normops.rms_norm`.
        TypeError: see :func:`normops.rms_norm`.

    Example:
        >>> import torch
        >>> from normops.sharding import rms_norm_from_stats, rms_norm_stats
        >>> left, right = torch.tensor([[3.0]]), torch.tensor([[4.0]])
        >>> square_sum = rms_norm_stats(left, 1) + rms_norm_stats(right, 1)
        >>> rms_norm_from_stats(left, square_sum, 1, eps=0.0, row_size=2)
        tensor([[0.8485]])
    """
    check_numbers("rms_norm_from_stats", eps=eps, weight_offset=weight_offset)
    return call(
        torch.ops.normops.rms_norm_from_stats.default,
        input,
        square_sum,
        as_shape(normalized_shape),
        weight,
        eps,
        weight_offset=weight_offset,
        rounding=rounding,
        row_size=row_size,
    )
