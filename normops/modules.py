"""The operators as modules."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from normops.functional import CastingMode, add_rms_norm, gated_rms_norm, rms_norm

Activation = Literal["silu", "swish", "sigmoid"]


class _OffsetRMSNorm(nn.RMSNorm):
    """torch's, with a weight to which something is added."""

    weight_offset: float
    casting_mode: CastingMode

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        weight_offset: float,
        casting_mode: CastingMode,
    ) -> None:
        self.weight_offset = weight_offset  # before reset_parameters, which the base class calls
        self.casting_mode = casting_mode
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - weight_offset``, so that the module starts without scaling."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        """As in the base class, with ``weight_offset`` and ``casting_mode`` where they are not the default."""
        base: str = super().extra_repr()
        offset = "" if self.weight_offset == 0.0 else f", weight_offset={self.weight_offset}"
        return base + offset + ("" if self.casting_mode == "gemma" else f", casting_mode={self.casting_mode}")


class RMSNorm(_OffsetRMSNorm):
    """Drop-in for :class:`torch.nn.RMSNorm` that runs :func:`normops.rms_norm`.

    It takes the same arguments, has the same parameter (``weight``) and so the same ``state_dict``, in both directions.

    Args:
        normalized_shape: the last dimensions of the input, over which the mean is taken. An ``int`` means one.
        eps: see :func:`normops.rms_norm`.
        elementwise_affine: whether there is a ``weight``, and a ``bias`` if that is asked for.
        device: of the weight.
        dtype: of the weight; it may differ from that of the input.
        weight_offset: added to the weight; 1.0 is Gemma's ``1 + w``. The weight starts at ``1 - weight_offset``.
        casting_mode: see :func:`normops.rms_norm`.
        groups: the dimensions before those of ``normalized_shape`` that have a weight each: heads, or groups of columns
            that are normalized by themselves. An ``int`` means one. The weight is ``[*groups, *normalized_shape]``.
        bias: whether there is a ``bias``, of the weight's shape and dtype, which is added after it. It starts at 0.

    Shape:
        Input ``[*, *groups, *normalized_shape]``, output the same. With a second argument, the residual, of the same
        shape, the output is a pair: the normalized sum and the sum, which is the residual of the next norm.

    Raises:
        RuntimeError: as :func:`normops.rms_norm`; if a module with a ``bias`` is called with a residual.

    Example:
        >>> import torch, normops
        >>> norm = normops.RMSNorm(64)
        >>> norm(torch.randn(2, 3, 64)).shape
        torch.Size([2, 3, 64])
        >>> norm.load_state_dict(torch.nn.RMSNorm(64).state_dict())
        <All keys matched successfully>
        >>> output, residual = norm(torch.randn(2, 3, 64), torch.randn(2, 3, 64))
        >>> of_queries = normops.RMSNorm(64, groups=8)  # a weight for each of 8 heads
        >>> of_queries(torch.randn(2, 3, 8, 64)).shape
        torch.Size([2, 3, 8, 64])
    """

    groups: tuple[int, ...]
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        casting_mode: CastingMode = "gemma",
        groups: int | Sequence[int] = (),
        bias: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, casting_mode)
        self.groups = (groups,) if isinstance(groups, int) else tuple(groups)
        if self.groups and elementwise_affine:
            self.weight = nn.Parameter(torch.empty((*self.groups, *self.normalized_shape), device=device, dtype=dtype))
        has_bias = bias and elementwise_affine
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if has_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - weight_offset`` and the bias to 0: the module starts without scaling or shifting."""
        super().reset_parameters()
        bias = getattr(self, "bias", None)  # the base class calls this before there may be one
        if bias is not None:
            nn.init.zeros_(bias)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None, alpha: float = 1.0) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the normalized ``x``, or with a residual the normalized sum ``alpha * x + residual``, and the sum.

        See :func:`normops.rms_norm` and :func:`normops.add_rms_norm`.
        """
        shape, weight, eps = self.normalized_shape, self.weight, self.eps
        weight_offset, casting_mode = self.weight_offset, self.casting_mode
        if residual is None:
            bias = self.bias
            return rms_norm(x, shape, weight, eps, weight_offset=weight_offset, casting_mode=casting_mode, bias=bias)
        if self.bias is not None:
            raise RuntimeError("RMSNorm: expected no residual in a module with a bias, but got one")
        return add_rms_norm(
            x, residual, shape, weight, eps, weight_offset=weight_offset, casting_mode=casting_mode, alpha=alpha
        )

    def extra_repr(self) -> str:
        """As in the base class, with ``weight_offset``, ``groups`` and ``bias`` where there are any."""
        groups = f", groups={self.groups}" if self.groups else ""
        return super().extra_repr() + groups + ("" if self.bias is None else ", bias=True")


class GatedRMSNorm(_OffsetRMSNorm):
    """The gated norm of Mamba 2 and of linear attention: runs :func:`normops.gated_rms_norm`.

    Its parameter (``weight``), and so its ``state_dict``, are those of the ``RMSNorm`` in mamba's
    ``layernorm_gated.py`` and of the classes ``...RMSNormGated`` of transformers, in both directions.

    Args:
        normalized_shape: the last dimensions of the input, over which the mean is taken. An ``int`` means one.
        eps: see :func:`normops.rms_norm`.
        elementwise_affine: whether there is a ``weight``.
        device: of the weight.
        dtype: of the weight; it may differ from that of the input.
        activation: of the gate: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``.
        norm_before_gate: whether the normalized input is multiplied by the activated gate (Qwen3-Next, gated linear
            attention) or the input, before it is normalized (Mamba 2 in transformers).
        weight_offset: added to the weight, which starts at ``1 - weight_offset``.
        casting_mode: see :func:`normops.rms_norm`.
        group_size: how many columns are normalized by themselves, as in mamba; None: all of them. The weight is as
            wide as ``normalized_shape``.

    Shape:
        Input and gate ``[*, *normalized_shape]``, output the same, of the input's dtype. The gate has the input's
        dtype, too, or one of them is float32 and the other has 16 bits.

    Raises:
        ValueError: if ``group_size`` does not divide ``normalized_shape``, or that has several dimensions.

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
    group_size: int | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = "silu",
        norm_before_gate: bool = True,
        weight_offset: float = 0.0,
        casting_mode: CastingMode = "gemma",
        group_size: int | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, casting_mode)
        shape = self.normalized_shape
        if group_size is not None and (len(shape) != 1 or group_size < 1 or shape[0] % group_size):
            raise ValueError(
                f"group_size: expected a divisor of one normalized dimension, but got {group_size} of {shape}"
            )
        self.activation, self.norm_before_gate, self.group_size = activation, norm_before_gate, group_size

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]  # torch's takes no gate
        """Returns the gated, normalized ``input``. See :func:`normops.gated_rms_norm`."""
        shape, weight = self.normalized_shape, self.weight
        if self.group_size is not None:
            parts = shape[0] // self.group_size, self.group_size
            input, gate, shape = input.unflatten(-1, parts), gate.unflatten(-1, parts), parts[1:]
            weight = weight if weight is None else weight.unflatten(0, parts)
        output = gated_rms_norm(
            input,
            gate,
            shape,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            casting_mode=self.casting_mode,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
        )
        return output if self.group_size is None else output.flatten(-2)

    def extra_repr(self) -> str:
        """As in the base class, with the gating, and ``weight_offset`` and ``group_size`` where they are given."""
        gating = f", activation={self.activation}, norm_before_gate={self.norm_before_gate}"
        return super().extra_repr() + gating + ("" if self.group_size is None else f", group_size={self.group_size}")
