"""Recomputes outputs of norms in the backward instead of storing them."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _saved_tensors_hooks_get_disabled_error_message, _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from normops import _C
from normops._private_torch import explain


@contextmanager
def recompute_norms() -> Generator[None]:
    """Recomputes norm outputs in the backward instead of storing them, inside a ``with`` block or a decorated function.

    A linear layer saves its input, which is often the output of a norm. Inside the block, the backward recomputes this
    output from the tensors that the norm saves for its own backward: once, for all operators that need it. Gradients
    have the same bits. This applies to the outputs of ``rms_norm``, ``gated_rms_norm``, ``channel_rms_norm``,
    ``rms_norm_rope`` and ``rms_norm_from_stats``, to the first output of ``add_rms_norm``, and to views of these. It
    covers functions, operators, modules, patched models and :func:`override_torch`.

    The block must contain the forward: the norm, and the operators that save its output. The backward may run outside.
    A checkpoint that runs its body again in a backward does not see a block around this backward. The block copies the
    weight and the bias of each norm. It stores an output as usual in these cases:

    * The output has been written to in place.
    * Its norm does not save its input, because only the bias requires a gradient.
    * The copies would not be smaller than the output.
    * The output is a view of a subclass of ``Tensor``, such as ``values()`` of a nested tensor.

    The block installs hooks on saved tensors in the current thread. Hooks around the block receive the tensors that are
    not recomputed. Hooks inside it, including those of activation checkpointing, handle the tensors saved inside them.
    The block does not notice writes that autograd does not see, such as those to ``output.data``. Inside
    :func:`torch.func.grad`, which forbids such hooks, the block does nothing. A transform of ``torch.func`` that
    forbids them raises torch's error if it runs inside the block.

    A function of ``torch.compile`` that Inductor compiles in a call inside of the block recomputes norms
    in its own graphs, also when it is called outside later. A function that is compiled already does not, and neither
    does a function whose code contains the block. Graphs do not recompute a norm that a checkpoint decides about, the
    norm of a sum in another dtype, or ``rms_norm_from_stats``.

    Example:
        >>> import torch, normops
        >>> model = torch.nn.Sequential(normops.RMSNorm(64), torch.nn.Linear(64, 64))
        >>> with normops.recompute_norms():
        ...     loss = model(torch.randn(8, 64, requires_grad=True)).sum()
        >>> loss.backward()
        >>> compiled = torch.compile(model)
        >>> with normops.recompute_norms():
        ...     loss = compiled(torch.randn(8, 64, requires_grad=True)).sum()  # compiles
        >>> loss.backward()
    """
    if torch.compiler.is_compiling() or _saved_tensors_hooks_get_disabled_error_message() is not None:
        yield
        return
    keep, give = _top_saved_tensors_default_hooks(False) or (_keep, _give)

    block, outer = _C.enter_recompute_block()

    def pack(tensor: Tensor) -> _Packed:
        if not _C.RecomputedOutput.is_recomputed(tensor, block):
            return give, keep(tensor)
        output = _C.RecomputedOutput.of(tensor)
        # Hooks around the block, like those of a checkpoint, count their tensors: they never receive these outputs.
        return (_give, _keep(tensor)) if output is None else (_C.RecomputedOutput.tensor, output)

    try:
        with saved_tensors_hooks(pack, _unpack), _in_graphs():
            yield
    finally:
        _C.leave_recompute_block(outer)


@contextmanager
def _in_graphs() -> Generator[None]:
    """Makes Inductor recompute norms in the graphs that it compiles meanwhile. torch.compile imports Dynamo."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with explain("normops.recompute_norms"):
        from torch._inductor import config

        from normops.recompute_graphs import RecomputeNorms

    before: Any = config.joint_custom_post_pass
    if isinstance(before, RecomputeNorms):
        yield
        return
    others = before if isinstance(before, (list, tuple)) else [] if before is None else [before]
    # config.patch() would leave a class to the garbage collector at each call.
    config.joint_custom_post_pass = RecomputeNorms(*others)
    try:
        yield
    finally:
        config.joint_custom_post_pass = before


_Packed = tuple[Callable[[Any], Tensor], Any]


_restore_untraced: Callable[[_Packed], Tensor] | None = None


def _unpack(packed: _Packed) -> Tensor:
    """Restores a tensor. Compiled autograd would trace this, but versions of tensors have no meaning in a trace."""
    global _restore_untraced
    if "torch._dynamo" not in sys.modules:
        return _restore(packed)
    if _restore_untraced is None:
        _restore_untraced = torch.compiler.disable(_restore, reason="normops.recompute_norms restores a saved tensor")
    return _restore_untraced(packed)


def _restore(packed: _Packed) -> Tensor:
    restore, saved = packed
    return restore(saved)


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor and its version, as torch saves them without hooks: detached, as its node must not own it."""
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
