"""Compiled graphs recompute outputs of norms in the backward instead of storing them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from assertions import assert_same_bits
from norms_between_layers import FUNCTIONS, first, gradients, problem
from profiles import operators_run
from sampling import marked
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import normops
from normops.recompute_graphs import RecomputeNorms
from reference.operators import Operator, of_rows


def compiled_block(operator: Operator) -> Callable[..., Tensor]:
    """Returns a norm between linear layers, whose other operations have the same bits compiled as eager."""
    norm = of_rows(operator, 16)

    def call(x: Tensor, other: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        y = first(norm(x @ matrix, other, weight))
        return (y.view(-1, 16) @ (matrix * 3)).square() + (y @ (matrix + 1)).view(-1, 16)

    return call


def saved_bytes(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Returns the result of a call, and the bytes of saved tensors that are no leaves."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(), sum(storages.values())


def compiled_in(context: Callable[[], Any], fn: Callable[..., Tensor], t: list[Tensor], **options: Any) -> Any:
    """Returns the function, compiled by a call inside of the context."""
    torch._dynamo.reset()
    call = torch.compile(fn, **options)
    with context():
        call(*t)
    return call


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_compiled_graph_recomputes_norms(operator: Operator, dynamic: bool) -> None:
    """The output and its views are not stored: the backward also runs the norm, or the norm of the sum."""
    t, found = problem("cpu"), []
    for context in (nullcontext, normops.recompute_norms):
        call = compiled_in(context, compiled_block(operator), t, dynamic=dynamic, fullgraph=True)
        loss, saved = saved_bytes(lambda: call(*t))  # noqa: B023  called at once
        first_gradients = gradients(loss, t)  # compiles the backward, on fake tensors that the profiler would show
        ran = operators_run(lambda: torch.autograd.backward(call(*t), torch.ones_like(loss)))  # noqa: B023
        found.append((first_gradients, saved, ran))
    (expected, before, forward_and_backward), (actual, after, again) = found
    assert_same_bits(actual, expected)
    assert before - after == t[0].nbytes
    recomputed = "rms_norm" if operator.name == "add_rms_norm" else operator.name
    assert sorted(again) == sorted([*forward_and_backward, f"normops::{recomputed}"])


def of_checkpoint(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *t: checkpoint(fn, *t, use_reentrant=False)


def in_block(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*t: Tensor) -> Tensor:
        with normops.recompute_norms():
            return fn(*t)

    return call


Around = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
AROUND: dict[str, tuple[tuple[Around, ...], tuple[Around, ...]]] = {
    "a checkpoint in the graph": ((of_checkpoint,), ()),
    "a block in the graph": ((in_block,), ()),
    "a checkpoint of a block in the graph": ((in_block, of_checkpoint), ()),
    "a checkpoint of the graph": ((), (of_checkpoint,)),
    "a block around the graph": ((), (in_block,)),
    "a block around a checkpoint of the graph": ((), (of_checkpoint, in_block)),
    "a checkpoint of a block with the graph": ((), (in_block, of_checkpoint)),
    "a block around the graph of a checkpoint": ((of_checkpoint,), (in_block,)),
}


ALL = list(product(FUNCTIONS, AROUND, (None, 0, 1, 2, 3)))
FULL = [(FUNCTIONS[0], around, None) for around in ("a block in the graph", "a block around the graph")]


@pytest.mark.parametrize(
    ("operator", "around", "frozen"),
    [*marked(pytest.mark.full, FULL), *marked(pytest.mark.release, [each for each in ALL if each not in FULL])],
    ids=str,
)
def test_blocks_and_checkpoints_around_and_in_graphs(operator: Operator, around: str, frozen: int | None) -> None:
    """Freezes each argument in turn; the backward runs outside of all blocks, on this thread and on another."""
    in_graph, around_graph = AROUND[around]
    t = problem("cpu")
    if frozen is not None:
        t[frozen].requires_grad_(False)
    leaves = [tensor for tensor in t if tensor.requires_grad]
    fn = compiled_block(operator)
    expected = gradients(fn(*t), leaves)
    for outer in in_graph:
        fn = outer(fn)
    for recomputes in (False, True):
        call = compiled_in(normops.recompute_norms if recomputes else nullcontext, fn, t)
        for outer in around_graph:
            call = outer(call)
        assert_same_bits(gradients(call(*t), leaves), expected)
        with ThreadPoolExecutor(1) as other_thread:
            assert_same_bits(other_thread.submit(gradients, call(*t), leaves).result(), expected)


@pytest.mark.full
def test_compiled_autograd_restores_tensors() -> None:
    """It traces the hooks on saved tensors, whose versions have no meaning in a trace."""
    t = problem("cpu")
    with torch.no_grad():
        t[3].mul_(1.0)  # a version other than 0

    def gradients_of(context: Callable[[], Any]) -> list[Tensor | None]:
        x, other, weight, matrix = t
        for leaf in t:
            leaf.grad = None
        with normops.recompute_norms():
            loss = ((normops.rms_norm(x @ matrix, 16, weight) @ matrix).sigmoid() * other.sin()).sum()
        with context():
            loss.backward()
        return [leaf.grad for leaf in t]

    expected = gradients_of(nullcontext)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiler = torch.compile(backend=backend)
        actual = gradients_of(lambda: compiled_autograd._enable(compiler))  # noqa: B023  called at once
        torch.testing.assert_close(actual, expected)


def test_unsupported_norms_in_a_compiled_graph_are_stored() -> None:
    """Covers a norm without gradient, one that a checkpoint saves, a sum of another dtype, one with a residual."""
    t = problem("cpu")
    saves_norms = partial(create_selective_checkpoint_contexts, [torch.ops.normops.rms_norm.default])

    def fn(x: Tensor, other: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
        frozen = normops.rms_norm(other.detach(), 16) @ matrix
        y, _ = normops.add_rms_norm((x @ matrix).bfloat16(), other, 16, weight)
        of_checkpoint = checkpoint(
            lambda x: normops.rms_norm(x @ matrix, 16).sin(), x, use_reentrant=False, context_fn=saves_norms
        )
        assert of_checkpoint is not None
        total = normops.rms_norm(x @ matrix, 16, weight, bias=other @ matrix)
        return frozen + (y * y).float() + of_checkpoint @ matrix + total @ matrix

    found = []
    for context in (nullcontext, normops.recompute_norms):
        call = compiled_in(context, fn, t)
        loss, saved = saved_bytes(lambda: call(*t))  # noqa: B023  called at once
        first_gradients = gradients(loss, t)  # compiles the backward, on fake tensors that the profiler would show
        ran = operators_run(lambda: torch.autograd.backward(call(*t), torch.ones_like(loss)))  # noqa: B023
        found.append((first_gradients, saved, ran))
    (expected, *before), (actual, *after) = found
    assert_same_bits(actual, expected)
    assert before == after


def test_other_passes_run_and_caches_distinguish_them() -> None:
    class Other(CustomGraphPass):
        calls = 0

        def __call__(self, graph: object) -> None:
            self.calls += 1

        def uuid(self) -> str:
            return "other"

    other, t = Other(), problem("cpu")
    with config.patch(joint_custom_post_pass=other):
        compiled_in(normops.recompute_norms, compiled_block(FUNCTIONS[0]), t)
        with normops.recompute_norms():
            ours = cast("Any", config.joint_custom_post_pass)
            with normops.recompute_norms():
                assert id(config.joint_custom_post_pass) == id(ours)
        assert config.joint_custom_post_pass is other
    assert other.calls == 1
    assert len({RecomputeNorms().uuid(), ours.uuid(), other.uuid()}) == 3
    assert RecomputeNorms(lambda graph: None).uuid() is None  # no key: nothing is cached
