"""How the operators run on :class:`torch.distributed.tensor.DTensor`: what is kept sharded, what is communicated.

normops imports this module when ``torch.distributed.tensor`` is imported, by whomever; nothing needs to be called.

Rows are independent of each other, so **shards of rows stay where they are**: where ``input`` is ``Shard(d)`` and ``d``
is not among the dimensions of ``normalized_shape``, the outputs are ``Shard(d)``, too, and nothing is communicated;
``grad_weight`` is then ``Partial()``, a sum that is still to be taken over the ranks, by whoever needs it. A ``weight``
of shape ``[*groups, *normalized_shape]`` and its gradient are sharded as ``input`` is on the dimensions that they have
of it: heads beside heads, and nothing is communicated. **All else is replicated first**: a sharded normalized dimension
is gathered, an ``input`` that is ``Partial()`` is summed up, a ``weight`` that is sharded otherwise is gathered. Of
several arguments with the shape of ``input``, the first one that is sharded by rows on a dimension of the mesh decides
for all. ``normalized_shape`` is that of the whole tensor, and so of its shards.

``rms_norm_`` and ``add_rms_norm_`` cannot change how the tensors that they write to are sharded, and refuse where they
would have to. The ``.out`` overloads take no DTensor.

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
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.distributed.tensor.parallel import SequenceParallel as _SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Module

ops = torch.ops.normops

Placements = tuple[Placement, ...]

# The arguments with the shape of input; the first ones decide first.
_ROWS = ("input", "gate", "residual", "grad_output", "grad_residual")


@cache
def _names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _by_name(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_names(op), args, strict=False)), **kwargs}


def _output_mask(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple(arguments.get("output_mask", (True,) * len(op._schema.returns)))


def _row_placements(specs: Mapping[str, DTensorSpec], normalized_shape: Sequence[int]) -> Placements:
    given = [specs[name] for name in _ROWS if name in specs]
    row_dims = given[0].ndim - len(normalized_shape)

    def decide(placements: Placements) -> Placement:
        shards = (p for p in placements if isinstance(p, (Shard, _StridedShard)) and p.dim < row_dims)
        return next(shards, Replicate())

    return tuple(map(decide, zip(*(spec.placements for spec in given), strict=True)))


def _of_weight(rows: Placement, first_dim: int, otherwise: Placement) -> Placement:
    """The placement of the weight, or its gradient, whose dimensions are those of the rows from ``first_dim`` on."""
    if rows.is_replicate():
        return Replicate()
    assert isinstance(rows, (Shard, _StridedShard))
    if rows.dim < first_dim:
        return otherwise
    if isinstance(rows, _StridedShard):
        return _StridedShard(rows.dim - first_dim, split_factor=rows.split_factor)
    return Shard(rows.dim - first_dim)


def _strategy(schema: OpSchema) -> OpStrategy:
    """The one way to run an operator: all that has the shape of input sharded alike, by rows or not at all."""
    arguments = _by_name(schema.op, schema.args_schema, schema.kwargs_schema)
    specs = {
        name: value.strategies[0].output_spec for name, value in arguments.items() if isinstance(value, OpStrategy)
    }
    mesh = schema.get_mesh_from_args()
    rows = _row_placements(specs, arguments["normalized_shape"])
    others = {}
    if "weight" in specs:
        first_dim = specs["input"].ndim - specs["weight"].ndim
        others["weight"] = tuple(_of_weight(p, first_dim, Replicate()) for p in rows)
        others["grad_weight"] = tuple(_of_weight(p, first_dim, Partial()) for p in rows)

    def placed(name: str) -> DTensorSpec:
        return DTensorSpec(mesh, others.get(name, rows))

    for argument in schema.op._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and specs[argument.name].placements != rows:
            name = schema.op._schema.name.removeprefix("normops::")
            raise RuntimeError(
                f"{name}: expected {argument.name}, which is written to, to be placed as {rows}, but got "
                f"{specs[argument.name].placements}"
            )

    exists = _output_mask(schema.op, arguments)
    outputs = tuple(
        placed(r.name) if wanted and (r.name != "grad_weight" or "weight" in specs) else None
        for r, wanted in zip(schema.op._schema.returns, exists, strict=True)
    )
    inputs = [placed(name) for name in specs if name != "grad_residual"]
    return OpStrategy([OpSpec(outputs[0] if len(outputs) == 1 else outputs or None, inputs)])


def _run_backward(op_call: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Runs a backward as PyTorch would, were its tensor and its list among the keyword arguments not there.

    PyTorch does not redistribute keyword arguments, and a list among them is no key of its cache.
    """
    arguments = _by_name(op_call, args, kwargs)
    kwargs = {**kwargs, "output_mask": _output_mask(op_call, arguments)}
    grad_residual = arguments.get("grad_residual")
    if isinstance(grad_residual, DTensor):
        specs = {name: value._spec for name, value in arguments.items() if isinstance(value, DTensor)}
        rows = _row_placements(specs, arguments["normalized_shape"])
        if grad_residual.placements != rows:
            kwargs["grad_residual"] = grad_residual.redistribute(placements=rows)
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op_call, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op_call, args, info)
    assert info.output_sharding is not None
    return dispatcher.wrap(results, info.output_sharding.output_spec)


# What else than the placements of tensors decides, and so belongs to the key of PyTorch's cache: normalized_shape, at
# this position, and whatever follows it.
register_op_strategy([ops.rms_norm.default, ops.rms_norm_.default], RuntimeSchemaInfo(1))(_strategy)
register_op_strategy([ops.add_rms_norm.default, ops.add_rms_norm_.default], RuntimeSchemaInfo(2))(_strategy)
register_op_strategy(
    ops.rms_norm_backward.default, RuntimeSchemaInfo(2, static_kwargkey=["grad_residual", "output_mask"])
)(_strategy)
register_op_strategy(ops.gated_rms_norm.default, RuntimeSchemaInfo(2))(_strategy)
register_op_strategy(ops.gated_rms_norm_backward.default, RuntimeSchemaInfo(3, static_kwargkey=["output_mask"]))(
    _strategy
)
for _op in (ops.rms_norm_backward.default, ops.gated_rms_norm_backward.default):
    DTensor._op_dispatcher._custom_op_handlers[_op] = _run_backward


class SequenceParallel(_SequenceParallel):
    """:class:`torch.distributed.tensor.parallel.SequenceParallel` for norms that also add to a residual stream.

    It takes the same arguments. PyTorch's passes on the first argument of a module only: a norm that is called with a
    residual would leave it out. This one shards all arguments and all outputs on the sequence dimension. For norms that
    are called without a residual, both do.

    Example:
        >>> from normops.sharding import SequenceParallel
        >>> plan = {"norm": SequenceParallel()}  # for parallelize_module(model, mesh, plan)
    """

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: Placements, mod: Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        prepare: Callable[..., Any] = _SequenceParallel._prepare_input_fn
        return tuple(x if x is None else prepare(sequence_sharding, mod, (x,), device_mesh) for x in inputs)

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        if isinstance(outputs, tuple):
            return tuple(_SequenceParallel._prepare_output_fn(use_local_output, mod, o, device_mesh) for o in outputs)
        return _SequenceParallel._prepare_output_fn(use_local_output, mod, outputs, device_mesh)
