"""Replaces norms in the graphs of torch.compile by operators of normops."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from normops._private_torch import explain

ModelRounding = Literal["once", "original"]


def check_rounding(rounding: object) -> None:
    """Raises a ValueError for an unknown rounding."""
    if rounding not in get_args(ModelRounding):
        raise ValueError(f'rounding: expected "once" or "original", but got {rounding!r}')


def inductor_options(
    others: Mapping[str, Any] | None = None, *, rounding: ModelRounding = "once", recompute_norms: bool = False
) -> dict[str, Any]:
    """Returns options of ``torch.compile`` that replace the norms of a compiled model by operators of normops.

    The model itself is unchanged. In its graphs, the passes replace each norm by one operator forward and one backward:
    ``F.rms_norm``, ``torch.nn.RMSNorm`` and handwritten norms, such as variants of
    ``w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))``. They also fuse other operations:

    * the addition of a residual before a norm, also from another layer, and the addition to its gradient;
    * the rotary embedding of queries and keys;
    * scales and shifts of samples or tokens, and residuals after a norm;
    * the bias and the SiLU or sigmoid after a norm over dimension 1, the channels of contiguous images. Such norms
      include ``F.normalize(x, dim=1) * C**0.5``, whose values are equal except for positions with a norm near 1e-12.

    Unrecognised code is compiled as without normops. The options can be combined with others, and with those of a mode,
    ``torch._inductor.list_mode_options(mode)``. ``torch.compile(model, backend="normops")`` does the same without
    options; its ``options`` may include ``"rounding"`` and ``"recompute_norms"``.

    Inductor has one slot for each kind of pass: ``pre_grad_custom_pass``, ``post_grad_custom_pre_pass``, and
    ``joint_custom_post_pass`` for ``recompute_norms``. If a slot is taken, in ``others`` or in
    ``torch._inductor.config`` at the time of this call, that pass runs first, and normops' pass runs on its result.
    Inductor then caches compiled code only if that pass has a ``uuid``.

    Args:
        others: further options for ``torch.compile``. Passes of normops among them are replaced.
        rounding: how 16-bit results are rounded. ``"once"`` rounds the exact result. ``"original"`` rounds where the
            program casts, as in eager mode, also for the gradient of an input that is cast twice; see :func:`patch`. It
            leaves a norm unchanged if the operators do not support its order of rounding, and also 16-bit rotations,
            and additions whose bits would change.
        recompute_norms: recomputes the outputs of norms in the backward instead of storing them, from the tensors that
            the gradients of the norms need. :func:`recompute_norms` does this in eager mode.

    Returns:
        All options, for the argument ``options`` of ``torch.compile``. Inductor's caches, also those on disk,
        distinguish code that was compiled without these options, with either rounding, and with or without
        recomputation.

    Raises:
        ValueError: if ``rounding`` is neither ``"once"`` nor ``"original"``.

    Example:
        >>> import torch, normops
        >>> def norm(x, weight):
        ...     return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> compiled = torch.compile(norm, options=normops.inductor_options())
    """
    check_rounding(rounding)
    with explain("normops.inductor_options"):
        from normops.inductor.passes import passes_after  # imports Inductor

    options = dict(others or {})
    return {**options, **passes_after(options, rounding, recompute_norms)}
