"""Outputs of norms that are not kept for the backward: it computes them again."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _saved_tensors_hooks_get_disabled_error_message, _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from normops import _C


@contextmanager
def recompute_norms() -> Generator[None]:
    """Keeps no outputs of normops' norms for the backward, for the time of a ``with`` block or of a decorated function.

    Linear layers save their input, which mostly is the output of a norm. Here the backward computes it again, from what
    the norm keeps for its own backward: once for all who need it. Gradients have the same bits. That goes for
    ``rms_norm``, ``gated_rms_norm``, ``channel_rms_norm``, ``rms_norm_rope``, ``rms_norm_from_stats`` and the first
    output of ``add_rms_norm``, whether called as functions, operators, modules, in patched models or under
    :func:`override_torch`, and for views of their outputs.

    Put the forward into the block: both the norm and the operators that save its output. The backward may be in it or
    not. For each output that it recomputes, normops copies the weight and the bias. An output is stored as usual if it
    has been written to in place, if its norm does not save its input (the bias alone requires a gradient), if the
    copies would not be smaller than the output, or if the weight or the bias was freed or written to before an operator
    saved the output. Views of subclasses of ``Tensor``, such as ``values()`` of a nested tensor, are stored, too.

    The block works by hooks on saved tensors, for the thread that enters it. What is not computed again is left to
    hooks around the block, if there are any. Hooks inside it, those of activation checkpointing among them, see to
    what is saved in them. Writes that autograd does not see, such as those to ``output.data``, are not seen here. Where
    torch refuses such hooks, within ``torch.func.grad``, the block does nothing; around a transform of ``torch.func``
    that takes none, torch says so.

    Around code that torch.compile has compiled, it is for what happens between the graphs. In a graph it does nothing:
    there, :func:`inductor_options` and the backend ``"normops"`` have an option ``recompute_norms``.

    Example:
        >>> import torch, normops
        >>> model = torch.nn.Sequential(normops.RMSNorm(64), torch.nn.Linear(64, 64))
        >>> with normops.recompute_norms():
        ...     loss = model(torch.randn(8, 64, requires_grad=True)).sum()
        >>> loss.backward()
    """
    if torch.compiler.is_compiling() or _saved_tensors_hooks_get_disabled_error_message() is not None:
        yield
        return
    keep, give = _top_saved_tensors_default_hooks(False) or (_keep, _give)

    block, outer = _C.enter_recompute_block()

    def pack(tensor: Tensor) -> tuple[Callable[[Any], Tensor], Any]:
        if not _C.RecomputedOutput.is_recomputed(tensor, block):
            return give, keep(tensor)
        output = _C.RecomputedOutput.of(tensor)
        # Hooks around the block, like those of a checkpoint, count what they are given: they never get these outputs.
        return (_give, _keep(tensor)) if output is None else (_C.RecomputedOutput.tensor, output)

    def unpack(packed: tuple[Callable[[Any], Tensor], Any]) -> Tensor:
        restore, saved = packed
        return restore(saved)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _C.leave_recompute_block(outer)


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    """As torch keeps it where there are no hooks. A node may not keep its own output, which has its history."""
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def _give(kept: tuple[Tensor, int]) -> Tensor:
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead. Hint: without normops.recompute_norms(), torch says which operation computed it."
        )
    return tensor
