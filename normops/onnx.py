"""Translates the operators for :func:`torch.onnx.export`."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["translation_table"]

# A tensor of the exported graph: an onnx_ir.Value. torch.onnx does not support that class as an annotation.
Value = Any


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the ``custom_translation_table`` with which ``torch.onnx.export`` exports the operators of normops.

    From version 23 of ONNX's operators on, each norm becomes one ``RMSNormalization``. With an older ``opset_version``,
    such as torch's default, it becomes its formula. Further operators follow or precede it:

    * A weight that broadcasts, or one per group, is a ``Mul`` after the norm; with ``rounding="llama"`` and 16-bit
      inputs each weight is. A ``bias`` is an ``Add`` after that.
    * The residual of ``add_rms_norm`` is an ``Add`` before the norm, and ``alpha`` a ``Mul`` before that.
    * The gate of ``gated_rms_norm`` is a ``Sigmoid`` and one ``Mul``, with silu two, before or after the norm.
    * The dimension of ``channel_rms_norm`` needs a ``Transpose`` before and after the norm; its activation follows the
      norm.
    * The rotation of ``rms_norm_rope`` is products and sums after the norm.
    * ``rms_norm_stats`` is a ``ReduceSumSquare``, and ``rms_norm_from_stats`` its formula.

    Sizes are dynamic where the exported program has dynamic sizes. The model computes as in PyTorch: in float32, or in
    float64 for float64 inputs, and it rounds once or as ``rounding`` says. ``RMSNormalization`` alone would round
    16-bit tensors twice, and requires a weight of the input's dtype. Therefore other dtypes are converted before and
    after it; a weight that is a parameter is converted once, in the export.

    ONNX stores ``eps`` as a float32, also for float64 inputs, and cannot compute a product and a sum with one rounding.
    With an ``alpha`` other than 1, the sum may have one more rounding error of the dtype of the computation.

    Returns:
        The functions that translate ``torch.ops.normops.rms_norm.default``, ``add_rms_norm``, ``gated_rms_norm``,
        ``channel_rms_norm``, ``rms_norm_rope``, ``rms_norm_stats`` and ``rms_norm_from_stats``. An exported program
        contains no other operators of normops, except for backwards, which have no translation.

    Raises:
        ImportError: if onnxscript is not installed.

    Example:
        >>> import torch, normops
        >>> from normops.onnx import translation_table
        >>> model, example = normops.RMSNorm(64).eval(), torch.randn(8, 64)
        >>> options = {"dynamo": True, "opset_version": 23, "verbose": False}
        >>> program = torch.onnx.export(model, (example,), custom_translation_table=translation_table(), **options)
        >>> [node.op_type for node in program.model.graph]
        ['RMSNormalization']
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ImportError(
            "expected onnxscript to be installed for the export to ONNX, but it is not: pip install onnxscript"
        )
    ops = torch.ops.normops
    return {
        ops.rms_norm.default: _rms_norm,
        ops.add_rms_norm.default: _add_rms_norm,
        ops.gated_rms_norm.default: _gated_rms_norm,
        ops.channel_rms_norm.default: _channel_rms_norm,
        ops.rms_norm_rope.default: _rms_norm_rope,
        ops.rms_norm_stats.default: _rms_norm_stats,
        ops.rms_norm_from_stats.default: _rms_norm_from_stats,
    }


def _rms_norm(
    input: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Value | None = None,
) -> Value:
    compute = _compute_type(input.dtype)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    output = _norm_of_rows(input, steps, len(normalized_shape), weight, eps, weight_offset, bias)
    return _cast(output, compute, input.dtype)


def _norm_of_rows(
    rows: Value,
    steps: "_RoundedSteps",
    dims: int,
    weight: Value | None,
    eps: float | None,
    weight_offset: float,
    bias: Value | None,
) -> Value:
    """Returns the norm with the bias, in the type of the computation."""
    from onnxscript import opset18

    output = _normalize(_cast(rows, steps.dtype, steps.compute), steps, dims, weight, eps, weight_offset)
    if bias is None:
        return output
    return opset18.Add(steps.rounded(output), _cast(bias, bias.dtype, steps.compute))


def _add_rms_norm(
    input: Value,
    residual: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    alpha: float = 1.0,
) -> tuple[Value, Value]:
    from onnxscript import opset18

    compute = _compute_type(input.dtype)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    branch = _cast(input, input.dtype, compute)
    if alpha != 1.0:
        branch = steps.rounded(opset18.Mul(branch, _constant(alpha, compute)))
    total = opset18.Add(branch, _cast(residual, residual.dtype, compute))
    residual_out = _cast(total, compute, residual.dtype)
    h = _cast(residual_out, residual.dtype, compute)
    output = _normalize(h, steps, len(normalized_shape), weight, eps, weight_offset)
    return _cast(output, compute, input.dtype), residual_out


def _gated_rms_norm(
    input: Value,
    gate: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> Value:
    from onnxscript import opset18

    compute = _compute_type(input.dtype)
    h, g = _cast(input, input.dtype, compute), _cast(gate, gate.dtype, compute)
    activated = _activated(g, activation)
    if not norm_before_gate:
        h = opset18.Mul(h, activated)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    output = _normalize(h, steps, len(normalized_shape), weight, eps, weight_offset)
    if norm_before_gate:
        output = opset18.Mul(steps.rounded(output), activated)
    return _cast(output, compute, input.dtype)


def _channel_rms_norm(
    input: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    bias: Value | None = None,
    *,
    dim: int,
    activation: str = "identity",
) -> Value:
    from onnxscript import opset18

    others = [axis for axis in range(len(input.shape)) if axis != len(input.shape) + dim]
    to_rows = (*others, len(input.shape) + dim)
    to_channels = tuple(to_rows.index(axis) for axis in range(len(to_rows)))
    compute = _compute_type(input.dtype)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    rows = input if dim == -1 else opset18.Transpose(input, perm=to_rows)
    output = _norm_of_rows(rows, steps, 1, weight, eps, weight_offset, bias)
    if activation != "identity":
        output = _activated(steps.rounded(output), activation)
    output = _cast(output, compute, input.dtype)
    return output if dim == -1 else opset18.Transpose(output, perm=to_channels)


def _activated(value: Value, activation: str) -> Value:
    from onnxscript import opset18

    sigmoid = opset18.Sigmoid(value)
    return sigmoid if activation == "sigmoid" else opset18.Mul(value, sigmoid)


def _rms_norm_rope(
    input: Value,
    cos: Value,
    sin: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Value:
    from onnxscript import opset18

    def ints(*numbers: int) -> Value:
        return opset18.Constant(value_ints=numbers)

    compute = _compute_type(input.dtype)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    h = steps.rounded(_normalize(_cast(input, input.dtype, compute), steps, 1, weight, eps, weight_offset))
    columns = cos.shape[-1]
    rotary_dim = columns if rotary_dim is None else rotary_dim
    half, end = rotary_dim // 2, rotary_offset + rotary_dim
    first = (0, rotary_dim, 2) if interleaved else (0, half, 1)
    second = (1, rotary_dim, 2) if interleaved else (half, rotary_dim, 1)

    def part(value: Value, begin: int, end: int, step: int = 1) -> Value:
        return opset18.Slice(value, ints(begin), ints(end), ints(-1), ints(step))

    def of_pair(table: Value) -> tuple[Value, Value]:
        table = _cast(table, table.dtype, compute)
        return (part(table, *first), part(table, *second)) if columns == rotary_dim else (table, table)

    rows = part(h, rotary_offset, end)
    a, b = part(rows, *first), part(rows, *second)
    (cos_a, cos_b), (sin_a, sin_b) = of_pair(cos), of_pair(sin)
    turned_a = opset18.Sub(opset18.Mul(a, cos_a), opset18.Mul(b, sin_a))
    turned_b = opset18.Add(opset18.Mul(b, cos_b), opset18.Mul(a, sin_b))
    if interleaved:
        pairs = [opset18.Unsqueeze(turned, ints(-1)) for turned in (turned_a, turned_b)]
        rotated = opset18.Reshape(opset18.Concat(*pairs, axis=-1), opset18.Shape(rows))
    else:
        rotated = opset18.Concat(turned_a, turned_b, axis=-1)
    last = 2**63 - 1  # ONNX clamps it to the number of columns
    output = opset18.Concat(part(h, 0, rotary_offset), rotated, part(h, end, last), axis=-1)
    return _cast(output, compute, input.dtype)


def _rms_norm_stats(input: Value, normalized_shape: Sequence[Any]) -> Value:
    from onnxscript import opset18

    h = _cast(input, input.dtype, _compute_type(input.dtype))
    return opset18.ReduceSumSquare(h, _last(len(normalized_shape)), keepdims=0)


def _rms_norm_from_stats(
    input: Value,
    square_sum: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    *,
    row_size: int | Value,
) -> Value:
    from onnxscript import ir, opset18

    compute = _compute_type(input.dtype)
    steps = _RoundedSteps(input.dtype, compute, rounding)
    columns = _constant(row_size, compute) if isinstance(row_size, int) else _cast(row_size, ir.DataType.INT64, compute)
    mean = opset18.Unsqueeze(opset18.Div(square_sum, columns), _last(len(normalized_shape)))
    h = _cast(input, input.dtype, compute)
    output = _normalize(h, steps, len(normalized_shape), weight, eps, weight_offset, mean)
    return _cast(output, compute, input.dtype)


class _RoundedSteps(NamedTuple):
    """Defines how intermediate results of an output are rounded."""

    dtype: int
    compute: int
    mode: str

    @property
    def rounds(self) -> bool:
        return self.mode == "llama" and self.dtype != self.compute

    def rounded(self, value: Value) -> Value:
        return _cast(_cast(value, self.compute, self.dtype), self.dtype, self.compute) if self.rounds else value


def _normalize(
    h: Value,
    steps: "_RoundedSteps",
    dims: int,
    weight: Value | None,
    eps: float | None,
    weight_offset: float,
    mean: Value | None = None,
) -> Value:
    """Returns one RMSNormalization, or the formula if ``mean`` is given or the opset lacks that operator."""
    from onnxscript import evaluator, opset18, opset23

    compute = steps.compute
    scale: Value = None if weight is None else _scale(weight, weight_offset, compute)
    recorder: Any = evaluator.default()  # torch.onnx's, which knows the requested opset version
    # torch.onnx cannot write versions after 25, and leaves the model at 18.
    is_one_operator = mean is None and recorder.opset.version in (23, 24, 25)
    # ONNX's scale has no groups, and is applied before any rounding.
    is_after = weight is not None and (not is_one_operator or len(weight.shape) > dims or steps.rounds)
    if is_one_operator:
        of_columns = scale
        if scale is None or is_after:
            of_columns = opset18.Expand(_constant(1.0, compute), opset18.Shape(h, start=-dims))
        output = opset23.RMSNormalization(h, of_columns, axis=-dims, epsilon=_eps(eps, compute), stash_type=compute)
    else:
        if mean is None:
            mean = opset18.ReduceMean(opset18.Mul(h, h), _last(dims))
        # Not Add: torch.onnx removes an addition of a tiny eps, such as that of float64.
        variance = opset18.Sum(mean, _constant(_eps(eps, compute), compute))
        output = opset18.Mul(h, opset18.Reciprocal(opset18.Sqrt(variance)))
    return opset18.Mul(steps.rounded(output), scale) if is_after else output


def _scale(weight: Value, weight_offset: float, compute: int) -> Value:
    from onnxscript import opset18

    scale = _cast(weight, weight.dtype, compute)
    return scale if weight_offset == 0.0 else opset18.Add(scale, _constant(weight_offset, compute))


def _eps(eps: float | None, compute: int) -> float:
    from onnxscript import ir

    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if compute == ir.DataType.DOUBLE else torch.float32).eps


def _last(dims: int) -> Value:
    """Returns the axes of the last dimensions."""
    from onnxscript import opset18

    return opset18.Constant(value_ints=tuple(range(-dims, 0)))


def _constant(number: float, dtype: int) -> Value:
    from onnxscript import ir, opset18

    return opset18.Constant(value=ir.to_proto(ir.tensor(number, dtype=ir.DataType(dtype))))


def _compute_type(input_type: int) -> int:
    from onnxscript import ir

    return ir.DataType.DOUBLE if input_type == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _cast(value: Value, source: int, target: int) -> Value:
    from onnxscript import opset18

    return value if source == target else opset18.Cast(value, to=target)
