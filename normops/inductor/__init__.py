"""Norms in what torch.compile compiles, as operators of normops."""

from typing import Any


def inductor_options() -> dict[str, Any]:
    """Options of ``torch.compile`` that put normops under the norms of a model that somebody else wrote.

    The model stays as it is. In the graphs that torch.compile makes of it, ``F.rms_norm``, ``torch.nn.RMSNorm`` and
    norms written by hand, such as ``w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`` and its relatives,
    become one operator forward and one backward. The addition of a residual before a norm joins it, across layers, and
    so does the addition to its gradient. What is not recognised is compiled as ever. 16-bit results are rounded once,
    see ``rounding`` of :func:`patch`.

    They can be used with other options, and with those of a mode, ``torch._inductor.list_mode_options(mode)``. Where
    options cannot be given, ``torch.compile(model, backend="normops")`` does the same.

    Returns:
        The options. Inductor's caches, on disk too, keep what was compiled with and without them apart.

    Example:
        >>> import torch, normops
        >>> def norm(x, weight):
        ...     return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> compiled = torch.compile(norm, options=normops.inductor_options())
    """
    from normops.inductor.passes import AfterAutograd, BeforeAutograd  # takes the import of Inductor

    return {"pre_grad_custom_pass": BeforeAutograd(), "post_grad_custom_pre_pass": AfterAutograd()}
