"""Norms in what torch.compile compiles, as operators of normops."""

from collections.abc import Mapping
from typing import Any


def inductor_options(others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of ``torch.compile`` that put normops under the norms of a model that somebody else wrote.

    The model stays as it is. In the graphs that torch.compile makes of it, ``F.rms_norm``, ``torch.nn.RMSNorm`` and
    norms written by hand, such as ``w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`` and its relatives,
    become one operator forward and one backward. The addition of a residual before a norm joins it, across layers, and
    so does the addition to its gradient. The rotary embedding of queries and keys joins the norms before it. What is
    not recognised is compiled as ever. 16-bit results are rounded once, see ``rounding`` of :func:`patch`.

    They can be used with other options, and with those of a mode, ``torch._inductor.list_mode_options(mode)``. Where
    options cannot be given, ``torch.compile(model, backend="normops")`` does the same.

    Inductor has one place each for such passes, ``pre_grad_custom_pass`` and ``post_grad_custom_pre_pass``. Where one
    is taken, in ``others`` or else in ``torch._inductor.config`` at the time of this call, that pass stays and runs
    first; ours run on what it leaves. What is compiled is then cached if that pass has a ``uuid``.

    Args:
        others: options that go along.

    Returns:
        All options. Inductor's caches, on disk too, keep what was compiled with and without ours apart.

    Example:
        >>> import torch, normops
        >>> def norm(x, weight):
        ...     return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> compiled = torch.compile(norm, options=normops.inductor_options())
    """
    from normops.inductor.passes import passes_after  # takes the import of Inductor

    options = dict(others or {})
    return {**options, **passes_after(options)}
