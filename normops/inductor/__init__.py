"""Norms in what torch.compile compiles, as operators of normops."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from normops._private_torch import explain

ModelRounding = Literal["once", "original"]


def check_rounding(rounding: object) -> None:
    """Raises a ValueError for what is no rounding."""
    if rounding not in get_args(ModelRounding):
        raise ValueError(f'rounding: expected "once" or "original", but got {rounding!r}')


def inductor_options(
    others: Mapping[str, Any] | None = None, *, rounding: ModelRounding = "once", recompute_norms: bool = False
) -> dict[str, Any]:
    """Options of ``torch.compile`` that put normops under the norms of a model that somebody else wrote.

    The model stays as it is. In the graphs that torch.compile makes of it, ``F.rms_norm``, ``torch.nn.RMSNorm`` and
    norms written by hand, such as ``w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`` and its relatives,
    become one operator forward and one backward. The addition of a residual before a norm joins it, across layers, and
    so does the addition to its gradient. The rotary embedding of queries and keys joins the norms before it, and so do
    scales and shifts of samples or tokens, and residuals. What is not recognised is compiled as ever.

    They can be used with other options, and with those of a mode, ``torch._inductor.list_mode_options(mode)``. Where
    options cannot be given, ``torch.compile(model, backend="normops")`` does the same; among its ``options`` may be
    ``"rounding"`` and ``"recompute_norms"``.

    Inductor has one place each for such passes, ``pre_grad_custom_pass`` and ``post_grad_custom_pre_pass``, and
    ``joint_custom_post_pass`` for ``recompute_norms``. Where one is taken, in ``others`` or else in
    ``torch._inductor.config`` at the time of this call, that pass stays and runs first; ours run on what it leaves.
    What is compiled is then cached if that pass has a ``uuid``.

    Args:
        others: options that go along. Passes of ours among them are replaced.
        rounding: how 16-bit results are rounded. ``"once"``: the exact result, rounded. ``"original"``: where the
            program casts, as in eager mode, see ``rounding`` of :func:`patch`, also for the gradient of an input that
            is cast twice. A norm in an order that the operators do not have is then left as it is, and so are rotations
            of 16 bits, and additions whose bits would change.
        recompute_norms: keeps no outputs of norms for the backward, which computes them again, of what it has for the
            gradients of the norms. See :func:`recompute_norms`, which is for eager code.

    Returns:
        All options. Inductor's caches, on disk too, keep what was compiled with ours, with either rounding, with norms
        recomputed or not, and without them apart.

    Raises:
        ValueError: if ``rounding`` is something else.

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
