"""The operators as modules."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn

from normops.functional import add_rms_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """Drop-in for :class:`torch.nn.RMSNorm` that runs :func:`normops.rms_norm`.

    It takes the same arguments, has the same parameter (``weight``) and so the same ``state_dict``, in both directions.

    Args:
        normalized_shape: the last dimensions of the input, over which the mean is taken. An ``int`` means one.
        eps: see :func:`normops.rms_norm`.
        elementwise_affine: whether there is a ``weight``.
        device: of the weight.
        dtype: of the weight; it may differ from that of the input.
        weight_offset: added to the weight; 1.0 is Gemma's ``1 + w``. The weight starts at ``1 - weight_offset``.
        groups: the dimensions before those of ``normalized_shape`` that have a weight each: heads, or groups of columns
            that are normalized by themselves. An ``int`` means one. The weight is ``[*groups, *normalized_shape]``.

    Shape:
        Input ``[*, *groups, *normalized_shape]``, output the same. With a second argument, the residual, of the same
        shape, the output is a pair: the normalized sum and the sum, which is the residual of the next norm.

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

    weight_offset: float
    groups: tuple[int, ...]

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        groups: int | Sequence[int] = (),
    ) -> None:
        self.weight_offset = weight_offset  # before reset_parameters, which the base class calls
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.groups = (groups,) if isinstance(groups, int) else tuple(groups)
        if self.groups and elementwise_affine:
            self.weight = nn.Parameter(torch.empty((*self.groups, *self.normalized_shape), device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - weight_offset``, so that the module starts without scaling."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the normalized ``x``, or with a residual the normalized sum and the sum.

        See :func:`normops.rms_norm` and :func:`normops.add_rms_norm`.
        """
        shape, weight, eps, weight_offset = self.normalized_shape, self.weight, self.eps, self.weight_offset
        if residual is None:
            return rms_norm(x, shape, weight, eps, weight_offset=weight_offset)
        return add_rms_norm(x, residual, shape, weight, eps, weight_offset=weight_offset)

    def extra_repr(self) -> str:
        """As in the base class, with ``weight_offset`` and ``groups`` where there are any."""
        base: str = super().extra_repr()
        offset = "" if self.weight_offset == 0.0 else f", weight_offset={self.weight_offset}"
        return base + offset + (f", groups={self.groups}" if self.groups else "")
