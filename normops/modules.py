"""Modules that call the operators."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from normops.functional import Activation, Rounding, add_rms_norm, gated_rms_norm, rms_norm


class _Norm(nn.RMSNorm):
    """Extends :class:`torch.nn.RMSNorm` by an offset of the weight, and by groups that are normalized separately."""

    weight_offset: float
    rounding: Rounding
    group_size: int | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        weight_offset: float,
        rounding: Rounding,
        group_size: int | None,
    ) -> None:
        order = f"the order is {type(self).__name__}(normalized_shape, eps, elementwise_affine)"
        if isinstance(eps, bool):
            raise TypeError(f"eps: expected a number or None, but got {eps}: {order}")
        if not isinstance(elementwise_affine, bool):
            raise TypeError(f"elementwise_affine: expected True or False, but got {elementwise_affine}: {order}")
        self.weight_offset = weight_offset  # before reset_parameters, which the base class calls
        self.rounding = rounding
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        shape = self.normalized_shape
        if group_size is not None and (len(shape) != 1 or group_size < 1 or shape[0] % group_size):
            raise ValueError(
                f"group_size: expected a divisor of one normalized dimension, but got {group_size} of {shape}"
            )
        self.group_size = group_size

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - weight_offset``, so that the module starts without scaling."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        """Returns the base class's text, followed by all other arguments that differ from their defaults."""
        others = {"weight_offset": 0.0, "rounding": "once", "group_size": None}
        given = {name: getattr(self, name) for name, default in others.items() if getattr(self, name) != default}
        return super().extra_repr() + "".join(f", {name}={value}" for name, value in given.items())

    def _in_groups(self, size: int, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Returns the shape of a group of columns, and the tensors with their last dimension split into groups."""
        parts = self.normalized_shape[0] // size, size
        return parts[1:], *(tensor if tensor is None else tensor.unflatten(-1, parts) for tensor in tensors)


class RMSNorm(_Norm):
    """Applies :func:`normops.rms_norm` with a learnable weight. Replaces :class:`torch.nn.RMSNorm`.

    The positional arguments and the parameter ``weight`` are those of :class:`torch.nn.RMSNorm`. Each of the two
    modules loads the ``state_dict`` of the other.

    Args:
        normalized_shape: the last dimensions of the input, over which the mean is taken. An ``int`` means one
            dimension.
        eps: see :func:`normops.rms_norm`.
        elementwise_affine: whether the module has a ``weight``, and with ``bias=True`` a ``bias``.
        device: the device of the parameters.
        dtype: the dtype of the parameters, which may differ from that of the input.
        weight_offset: added to the weight; 1.0 is Gemma's ``1 + w``. The weight is initialized to
            ``1 - weight_offset``.
        rounding: see :func:`normops.rms_norm`.
        group_size: the number of columns that are normalized together, such as those of a head; None means all. It
            divides ``normalized_shape``, which must be one dimension. The weight has all columns.
        bias: adds a ``bias`` after the weight, with the weight's shape and dtype. It is initialized to 0.
        dim: the dimension to normalize over, for example 1 for the channels of ``[N, C, H, W]``; ``normalized_shape``
            is then its size. None means the last dimensions.
        activation: applied to the result, see :func:`normops.rms_norm`.

    Shape:
        Input ``[*, *normalized_shape]``, with ``dim`` ``[*, C, *]``; the output has the same shape. With a
        residual of this shape as second argument, the output is a pair: the normalized sum, and the sum, which is the
        residual for the next norm.

    Raises:
        TypeError: if ``eps`` is a bool, or ``elementwise_affine`` is none.
        ValueError: if ``group_size`` does not divide ``normalized_shape``, or ``normalized_shape`` has several
            dimensions; if ``group_size`` is combined with ``dim`` or ``activation``.
        RuntimeError: see :func:`normops.rms_norm`. Also if a module with a ``bias``, a ``dim`` or an ``activation`` is
            called with a residual.

    Example:
        >>> import torch, normops
        >>> norm = normops.RMSNorm(64)
        >>> norm(torch.randn(2, 3, 64)).shape
        torch.Size([2, 3, 64])
        >>> norm.load_state_dict(torch.nn.RMSNorm(64).state_dict())
        <All keys matched successfully>
        >>> output, residual = norm(torch.randn(2, 3, 64), torch.randn(2, 3, 64))
        >>> of_queries = normops.RMSNorm(8 * 64, group_size=64)  # 8 heads, each with a weight
        >>> of_queries(torch.randn(2, 3, 8 * 64)).shape
        torch.Size([2, 3, 512])
        >>> of_channels = normops.RMSNorm(64, dim=1, activation="silu")
        >>> of_channels(torch.randn(2, 64, 5, 5)).shape
        torch.Size([2, 64, 5, 5])
    """

    bias: nn.Parameter | None
    dim: int | None
    activation: Activation | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0,
        rounding: Rounding = "once",
        group_size: int | None = None,
        bias: bool = False,
        dim: int | None = None,
        activation: Activation | None = None,
    ) -> None:
        others = weight_offset, rounding, group_size
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, *others)
        for name, value in {"dim": dim, "activation": activation}.items():
            if value is not None and group_size is not None:
                raise ValueError(f"{name}: expected None in a module with group_size={group_size}, but got {value!r}")
        self.dim, self.activation = dim, activation
        # None is a plain attribute: nn.Module finds a parameter more slowly.
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if bias and elementwise_affine else None

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - weight_offset`` and the bias to 0: the module starts without scaling or shifting."""
        super().reset_parameters()
        bias = getattr(self, "bias", None)  # the base class calls this before the bias exists
        if bias is not None:
            nn.init.zeros_(bias)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor, alpha: float = 1) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None, alpha: float = 1) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the norm of ``x``; with a residual, the norm of the sum ``alpha * x + residual``, and the sum.

        See :func:`normops.rms_norm` and :func:`normops.add_rms_norm`.
        """
        shape, eps, size = self.normalized_shape, self.eps, self.group_size
        weight, bias = self.weight, self.bias
        weight_offset, rounding = self.weight_offset, self.rounding
        if size is not None:
            shape, x, residual, weight, bias = self._in_groups(size, x, residual, weight, bias)
        if residual is None:
            output = rms_norm(
                x,
                shape,
                weight,
                eps,
                weight_offset=weight_offset,
                rounding=rounding,
                bias=bias,
                dim=self.dim,
                activation=self.activation,
            )
            return output if size is None else output.flatten(-2)
        if any(value is not None for value in (bias, self.dim, self.activation)):
            raise RuntimeError("RMSNorm: expected no residual with a bias, a dim or an activation, but got one")
        output, total = add_rms_norm(
            x, residual, shape, weight, eps, weight_offset=weight_offset, rounding=rounding, alpha=alpha
        )
        return (output, total) if size is None else (output.flatten(-2), total.flatten(-2))

    def extra_repr(self) -> str:
        """Returns the base class's text, followed by all other arguments that differ from their defaults."""
        given = {"bias": self.bias is not None, "dim": self.dim, "activation": self.activation}
        others = (f", {name}={value!r}" for name, value in given.items() if value not in (None, False))
        return super().extra_repr() + "".join(others)


class GatedRMSNorm(_Norm):
    """Applies :func:`normops.gated_rms_norm` with a learnable weight: the gated norm of Mamba 2 and linear attention.

    The only parameter is ``weight``. The ``state_dict`` is interchangeable with that of the ``RMSNorm`` in mamba's
    ``layernorm_gated.py`` and of transformers' classes ``...RMSNormGated``.

    Args:
        normalized_shape: the last dimensions of the input, over which the mean is taken. An ``int`` means one
            dimension.
        eps: added to the mean of squares. The default is that of mamba; see :func:`normops.rms_norm` for ``None``.
        elementwise_affine: whether the module has a ``weight``.
        device: the device of the weight.
        dtype: the dtype of the weight, which may differ from that of the input.
        activation: the activation of the gate: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``.
        norm_before_gate: True multiplies the normalized input by the activated gate, as in Qwen3-Next and gated linear
            attention. False multiplies the input before it is normalized, as in transformers' Mamba 2.
        weight_offset: added to the weight, which is initialized to ``1 - weight_offset``.
        rounding: see :func:`normops.rms_norm`.
        group_size: the number of columns that are normalized together, as in mamba; None means all. See
            :class:`RMSNorm`.

    Shape:
        Input and gate ``[*, *normalized_shape]``; the output has the same shape, and the input's dtype. The
        gate has the input's dtype, or one of the two is float32 and the other has 16 bits.

    Raises:
        TypeError: if ``eps`` is a bool, or ``elementwise_affine`` is none.
        ValueError: if ``group_size`` does not divide ``normalized_shape``, or ``normalized_shape`` has several
            dimensions.
        RuntimeError: see :func:`normops.gated_rms_norm`.

    Example:
        >>> import torch, normops
        >>> norm = normops.GatedRMSNorm(64)
        >>> input, gate = torch.randn(2, 3, 128).chunk(2, dim=-1)  # of one projection
        >>> norm(input, gate).shape
        torch.Size([2, 3, 64])
        >>> normops.GatedRMSNorm(64, norm_before_gate=False, group_size=16)(input, gate).shape
        torch.Size([2, 3, 64])
    """

    activation: Activation
    norm_before_gate: bool

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = "silu",
        norm_before_gate: bool = True,
        weight_offset: float = 0,
        rounding: Rounding = "once",
        group_size: int | None = None,
    ) -> None:
        others = weight_offset, rounding, group_size
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, *others)
        self.activation, self.norm_before_gate = activation, norm_before_gate

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]  # torch's takes no gate
        """Returns the gated norm of ``input``. See :func:`normops.gated_rms_norm`."""
        shape, weight, size = self.normalized_shape, self.weight, self.group_size
        if size is not None:
            shape, input, gate, weight = self._in_groups(size, input, gate, weight)
        output = gated_rms_norm(
            input,
            gate,
            shape,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
        )
        return output if size is None else output.flatten(-2)

    def extra_repr(self) -> str:
        """Returns the base class's text, followed by the arguments of the gate."""
        return f"{super().extra_repr()}, activation={self.activation}, norm_before_gate={self.norm_before_gate}"
