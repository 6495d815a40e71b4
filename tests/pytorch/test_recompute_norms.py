"""recompute_norms recomputes outputs of norms in the backward instead of storing them, with the same bits."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import diffusers.models.normalization
import pytest
import torch
from assertions import assert_same_bits
from calls import Calls
from norms_between_layers import FUNCTIONS, first, gradients, problem
from sampling import few, pairwise
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import normops
from normops import recompute_norms
from reference.memory import memory_changes
from reference.operators import OPERATOR_CASES, OPERATORS, Operator, OperatorCase, of_rows

NORMS = [operator for operator in OPERATORS if operator.outputs[0] == "output"]
is_recomputed = normops._C.RecomputedOutput.is_recomputed
TWICE = "Trying to backward through the graph a second time"
Context = Callable[[], AbstractContextManager[Any]]


class Saved(torch.autograd.Function):
    """Copies its input, and appends the tensor that it saved to a list in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: list[Tensor]) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.shown = shown
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.shown.extend(ctx.saved_tensors)
        return grad, None


RECOMPUTED = few((case for case in OPERATOR_CASES if case.operator in NORMS), others=pytest.mark.release)


@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_recomputed_outputs_have_the_same_bits_and_strides(case: OperatorCase, device: str) -> None:
    """Compares an output, a view and all gradients; the norm runs once more for both. The output is stored if copies of
    weight and bias would be as large."""
    results, made = [], case.arguments()
    copied = sum(made[name].nbytes for name in ("weight", "bias") if made.get(name) is not None)
    is_kept = copied >= made["input"].nbytes
    for context in (nullcontext, recompute_norms):
        arguments, shown = case.arguments(device), (list[Tensor](), list[Tensor]())
        names = [n for n in case.operator.inputs if n not in case.operator.tables and arguments.get(n) is not None]
        for name in names:
            arguments[name].requires_grad_()
        with context():
            output = first(case.operator.default(**arguments))
            kept = [output, output.transpose(0, -1)]
            a, b = map(Saved.apply, kept, shown)
        with Calls() as calls:
            (a * b.transpose(0, -1)).backward(torch.ones_like(a))
        given = [tensor for tensors in shown for tensor in tensors]
        assert_same_bits(given, kept)
        assert list(map(Tensor.stride, given)) == list(map(Tensor.stride, kept))
        assert (given[0].data_ptr() == output.data_ptr()) == (context is nullcontext or is_kept)
        assert given[0].data_ptr() == given[1].data_ptr()
        results.append(([output, *(arguments[name].grad for name in names)], calls.counts))
    (expected, counts), (actual, with_recomputing) = results
    assert_same_bits(actual, expected)
    again = with_recomputing - counts
    assert again.total() == (not is_kept)
    assert again.keys() <= {"rms_norm", case.operator.name}


def block(operator: Operator, t: list[Tensor]) -> Tensor:
    """Applies a norm between linear layers, two of which save its output; the norm's input is no leaf."""
    x, other, weight, matrix = t
    y = first(of_rows(operator, x.shape[-1])(x @ matrix, other, weight))
    return (y @ matrix.sin()).square() + y @ matrix.cos()


def held(call: Callable[[], object]) -> tuple[int, object]:
    """Returns the bytes that a call allocates and does not free, and its result."""
    changes, result = memory_changes(call)
    return sum(changes), result


@pytest.mark.parametrize("norm", [*FUNCTIONS, "module", "patched", "overridden"], ids=str)
def test_forward_does_not_store_the_output(norm: Operator | str) -> None:
    """The forward stores a copy of the weight instead; other tensors are not stored twice."""
    call: Callable[[], object]
    if isinstance(norm, Operator):
        call = partial(block, norm, problem("cpu", (256, 64)))
    else:
        made = normops.RMSNorm if norm == "module" else nn.RMSNorm
        model = nn.Sequential(nn.Linear(64, 64), made(64), nn.Linear(64, 64))
        if norm == "patched":
            normops.patch(model)
        call = partial(model, torch.randn(256, 64))
    with normops.override_torch(norm == "overridden"):
        before, _ = held(call)
        with recompute_norms():
            assert before - held(call)[0] == (256 - 1) * 64 * 4


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_memory_is_freed(operator: Operator) -> None:
    """Dropping a graph and running a backward free memory and Python objects without the garbage collector."""
    t = problem("cpu")

    @recompute_norms()
    def dropped() -> None:
        block(operator, t)

    def step() -> None:
        with recompute_norms():
            loss = block(operator, t)
        gradients(loss, t)

    def kept_graph() -> None:
        with recompute_norms():
            loss = block(operator, t)
        gradients(loss, t, retain_graph=True)
        assert held(lambda: gradients(loss, t, retain_graph=True) and None)[0] == 0

    def kept_loss() -> Tensor:
        with recompute_norms():
            loss = block(operator, t)
        gradients(loss, t)
        return loss

    gc.collect()
    gc.disable()
    try:
        size, loss = held(kept_loss)
        assert size == cast("Tensor", loss).nbytes  # without the copies of weight and bias
        del loss
        for call in (dropped, step, kept_graph):
            call()
            assert held(call)[0] == 0
        objects = len(gc.get_objects())
        for _ in range(1000):
            step()
            dropped()
        assert len(gc.get_objects()) - objects < 10
    finally:
        gc.enable()


@pytest.mark.parametrize("context", [nullcontext, recompute_norms])
@pytest.mark.parametrize("which", ["input", "weight", "matrix"])
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_write_to_a_saved_tensor_raises(operator: Operator, which: str, context: Context, device: str) -> None:
    """Covers tensors that the norm saves, and one that a linear layer saves."""
    t = [tensor.detach().requires_grad_() * 1 for tensor in problem(device)]
    with context():
        result = of_rows(operator, 16)(*t[:3])
        loss = (first(result) @ t[3]).sum()
    is_sum = which == "input" and isinstance(result, tuple)
    written = result[1] if is_sum else {"input": t[0], "weight": t[2], "matrix": t[3]}[which]
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[.*at version 1; expected version 0"):
        loss.backward()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "seen": lambda y: y.mul_(2),
    "of a view": lambda y: y.view(-1)[:5].mul_(2),
    "without gradients": torch.no_grad()(lambda y: y.mul_(2)),
    "detached": lambda y: y.detach().mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_output_that_was_written_to_is_stored(operator: Operator, name: str, device: str) -> None:
    t = problem(device)
    results = []
    for context in (nullcontext, recompute_norms):
        with context():
            y = first(of_rows(operator, 16)(*t[:3]))
            view = y.view(-1, 16)
            WRITES[name](y)
            loss = (y @ t[3]).square().sum() + (view @ t[3]).sum()
        with Calls() as calls:
            results.append(gradients(loss, t))
        assert calls.counts.total() == 1
    assert_same_bits(*results)


def test_unsupported_outputs_are_stored() -> None:
    """Covers a norm of which only the bias needs a gradient, so that it saves no input, and outputs of torch."""
    x, _, weight, matrix = problem("cpu", (256, 64))
    for call in (
        lambda: normops.rms_norm(x.detach(), 64, bias=weight) @ matrix,
        lambda: normops.rms_norm(x, 64, weight).view(torch.int32),
        lambda: torch.nn.functional.silu(x @ matrix) @ matrix,
    ):
        before, _ = held(call)
        with recompute_norms():
            assert held(call)[0] == before


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_each_backward_recomputes(operator: Operator, device: str) -> None:
    """Covers retained graphs, partial and second-order backwards; each runs the norm if it needs the output."""
    t = problem(device)
    results = []
    for context in (nullcontext, recompute_norms):
        with context():
            loss = block(operator, t)
        with Calls() as calls:
            found = [gradients(loss, t, retain_graph=True) for _ in range(2)]
        forwards = sum(n for name, n in calls.counts.items() if "backward" not in name)
        assert forwards == (2 if context is recompute_norms else 0)
        found.append(gradients(loss, t[3:], retain_graph=True))
        for around in (nullcontext, context):
            with around():
                grads = gradients(loss, t, create_graph=True)
                squares = sum((g.square().sum() for g in grads if g is not None), torch.zeros((), device=device))
            found += [grads, gradients(squares, t, retain_graph=True)]
        results.append(sum(found, ()))
        gradients(loss, t)
        with pytest.raises(RuntimeError, match=TWICE):
            gradients(loss, t)
    assert_same_bits(*results)


@pytest.mark.parametrize("context", [nullcontext, recompute_norms])
@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_consumers_may_run_after_norm_backward(operator: Operator, when: str, context: Context, device: str) -> None:
    """Consumers get the output, even if they save it after the norm has freed its own saved tensors."""
    t = problem(device)
    with context():
        y = first(of_rows(operator, 16)(*t[:3]))
        losses = [(y @ t[3]).sum()] if when != "after" else []
        gradients(y.sum(), t)
        losses += [(y @ t[3]).sum()] if when != "before" else []
    expected = y.detach().flatten(0, -2).sum(0)[:, None].expand(16, 16)
    for loss in losses:
        torch.testing.assert_close(gradients(loss, t[3:], retain_graph=True)[0], expected)
        with pytest.raises(RuntimeError, match=TWICE):
            gradients(loss, t)


@pytest.mark.parametrize("context", [nullcontext, recompute_norms])
@pytest.mark.parametrize("operator", [each for each in FUNCTIONS if each.name != "add_rms_norm"], ids=str)
def test_write_between_two_backwards_raises(operator: Operator, context: Context, device: str) -> None:
    """The second backward must not reuse the output that the first one recomputed."""
    t = problem(device)
    x = t[0] * 1
    with context():
        y = first(of_rows(operator, 16)(x, *t[1:3]))
        losses = (y @ t[3]).sum(), y.sum()
    gradients(losses[0], t[3:], retain_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(losses[1], t)


@pytest.mark.parametrize("view", [lambda z: z, lambda z: z.conj().imag], ids=["complex", "negated"])
def test_conjugate_and_negative_views_are_stored(view: Callable[[Tensor], Tensor], device: str) -> None:
    """Sizes, strides and the storage offset do not fully describe these views."""
    x, _, weight, _ = problem(device)
    results = []
    for context in (nullcontext, recompute_norms):
        with context():
            y = normops.rms_norm(x, 16, weight)
            loss = view(torch.view_as_complex(y.unflatten(-1, (8, 2)))).pow(2).abs()
        with Calls() as calls:
            results.append(gradients(loss, [x, weight]))
        assert calls.counts == {"rms_norm_backward": 1}
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_recomputed_negative_zeros_keep_their_sign(dtype: torch.dtype, device: str) -> None:
    shown: list[Tensor] = []
    zeros = torch.full((2, 16), -0.0, device=device, requires_grad=True)
    with recompute_norms():
        y, _ = normops.add_rms_norm(zeros.to(dtype), zeros, 16)
        Saved.apply(y, shown).sum().backward()  # type: ignore[no-untyped-call]
    assert_same_bits(shown, [y])
    assert shown[0].signbit().all()


def test_threads_recompute_the_same_bits(device: str) -> None:
    t = problem(device)

    def step(context: Context) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = ()
        for operator in FUNCTIONS:
            with context():
                loss = block(operator, t)
            found += gradients(loss, t)
        return found

    expected = step(nullcontext)
    with recompute_norms():
        shared = block(FUNCTIONS[0], t)
        with ThreadPoolExecutor(1) as pool:
            assert not is_recomputed(pool.submit(normops.rms_norm, t[0], 16, t[2]).result(), 0)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(step, [recompute_norms] * 32):
            assert_same_bits(actual, expected)
        for actual in pool.map(lambda _: gradients(shared, t, retain_graph=True), range(32)):
            assert_same_bits(actual, expected[:4])


def strided() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: torch.stack([t.detach(), t.detach()], -1), lambda t: t[..., 0])


# Contexts from the outermost to the innermost, and the number of norms that are recomputed.
NESTED: dict[str, tuple[tuple[Context, ...], int]] = {
    "nested": ((recompute_norms, recompute_norms), 1),
    "around save_on_cpu": ((recompute_norms, save_on_cpu), 0),
    "in save_on_cpu": ((save_on_cpu, recompute_norms), 1),
    "in other hooks": ((strided, recompute_norms), 1),
    "three": ((recompute_norms, strided, recompute_norms), 1),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_recomputation_works_with_other_hooks(operator: Operator, name: str) -> None:
    """Runs on the CPU only: hooks change strides, which changes the bits of a matmul on a GPU."""
    t = problem("cpu")
    expected = gradients(block(operator, t), t)
    contexts, recomputed = NESTED[name]
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        loss = block(operator, t)
    with Calls() as calls:
        assert_same_bits(gradients(loss, t), expected)
    assert calls.counts.total() == 1 + recomputed


def test_outer_hooks_receive_the_other_tensors(device: str) -> None:
    t, packed = problem(device), list[Tensor]()
    for context in (nullcontext, recompute_norms):
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.detach()), lambda kept: kept):
            packed.append(t[0])
            with context():
                block(FUNCTIONS[0], t)
    first, second = (i for i, tensor in enumerate(packed) if tensor is t[0])
    assert len(packed) - second == second - first - 2


def test_the_last_user_frees_the_output(device: str) -> None:
    """In one backward, the second of two consumers that save an output gets the same memory, and frees it."""
    t, shown = problem(device), list[Tensor]()
    with recompute_norms():
        y = normops.rms_norm(t[0], 16, t[2])
        a, b = (Saved.apply(y, shown) for _ in range(2))  # type: ignore[no-untyped-call]
    gradients(a, t, retain_graph=True)
    with Calls() as calls:
        gradients(a + b, t)
    assert shown[1].data_ptr() == shown[2].data_ptr()
    assert calls.counts["rms_norm"] == 1


def test_partial_backward_frees_what_it_recomputed(device: str) -> None:
    """The norm's backward does not run, and another backward may need the consumers; errors free memory, too."""
    t, shown = problem("cpu", (256, 64)), list[Any]()

    def reload(packed: Tensor) -> Tensor:
        reloaded = packed.clone()
        shown.append(weakref.ref(reloaded))
        return reloaded

    with saved_tensors_hooks(lambda tensor: tensor.detach(), reload), recompute_norms():
        y = normops.rms_norm(t[0], 64, t[2])
        losses = [(y @ matrix).sum() for matrix in (t[3], t[3].sin())]
    assert held(lambda: gradients(losses[0], t[3:], retain_graph=True) and None)[0] == 0
    losses[1].register_hook(lambda grad: None)
    failing = losses[0] + losses[1] * 1
    t[3].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.backward(retain_graph=True)
    assert shown
    assert all(reloaded() is None for reloaded in shown)


def test_error_ends_the_block() -> None:
    with pytest.raises(ZeroDivisionError), recompute_norms():
        _ = 1 / 0
    t = problem("cpu")
    assert not is_recomputed(normops.rms_norm(t[0], 16, t[2]), 0)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("place", ["around", "inside", "both"])
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_checkpoints(operator: Operator, place: str, early_stop: bool, use_reentrant: bool, device: str) -> None:
    """The input of the checkpoint is also an output of a norm."""
    t = problem(device)

    def part(x: Tensor, *others: Tensor) -> Tensor:
        with nullcontext() if place == "around" else recompute_norms():
            return block(operator, [x, *others])

    expected = gradients(block(operator, [normops.rms_norm(t[0], 16), *t[1:]]), t)
    with set_checkpoint_early_stop(early_stop):
        with nullcontext() if place == "inside" else recompute_norms():
            x = normops.rms_norm(t[0], 16)
            loss = checkpoint(part, x, *t[1:], use_reentrant=use_reentrant)
        for leaf in t:
            leaf.grad = None
        loss.sum().backward()
    assert_same_bits([leaf.grad for leaf in t], expected)


@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_saved_tensors_depend_only_on_the_arguments(case: OperatorCase, device: str) -> None:
    """Outer hooks receive as many tensors in a block as outside of it, with each argument frozen in turn."""
    made = case.arguments(device)
    names = [n for n in case.operator.inputs if n not in case.operator.tables and made.get(n) is not None]
    for frozen in (None, *names):
        for name in names:
            made[name] = made[name].detach().requires_grad_(name != frozen)
        counts = []
        for context in (nullcontext, enabled):
            packed = list[Tensor]()
            with saved_tensors_hooks(packed.append, lambda kept: kept), context():
                case.operator.default(**made)
            counts.append(len(packed))
        assert counts[0] == counts[1]


@contextmanager
def enabled() -> Iterator[None]:
    """Enters a block without installing hooks, as for calls whose tensors go to hooks within the block."""
    _, outer = normops._C.enter_recompute_block()
    try:
        yield
    finally:
        normops._C.leave_recompute_block(outer)


@pairwise
@pytest.mark.parametrize("frozen", [None, "input", "weight", "bias"])
@pytest.mark.parametrize("forward", ["inside", "outside", "body"])
@pytest.mark.parametrize("backward", ["inside", "outside", "another thread"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("selective", [True, False])
@pytest.mark.parametrize("kind", ["function", "patched"])
def test_checkpoints_with_frozen_arguments(
    kind: str, selective: bool, early_stop: bool, backward: str, forward: str, frozen: str | None
) -> None:
    """Neither the first nor the second run of a checkpoint saves a frozen bias, in a block or outside of it."""
    torch.manual_seed(0)
    norm: Any = diffusers.models.normalization.RMSNorm(16, 1e-6, bias=True)
    x, factor = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    parts: dict[str, Tensor] = {"input": x, "weight": norm.weight, "bias": norm.bias}
    if frozen is not None:
        parts[frozen].requires_grad_(False)
    if kind == "patched":
        normops.patch(norm, strict=True)
    call = norm if kind == "patched" else partial(of_biased, norm)
    asked: list[Any] = [tensor for tensor in (*parts.values(), factor) if tensor.requires_grad]

    def body(x: Tensor) -> Tensor:
        y = call(x)  # called outside of the block in the body
        with recompute_norms() if forward == "body" else nullcontext():
            return (call(y.sin()) * factor) * (y * factor)

    expected = torch.autograd.grad(body(x).sum(), asked)
    saves_norms = partial(create_selective_checkpoint_contexts, [torch.ops.normops.rms_norm.default])
    options: dict[str, Any] = {"context_fn": saves_norms} if selective else {}
    with set_checkpoint_early_stop(early_stop):
        with recompute_norms() if forward != "outside" else nullcontext():
            loss = checkpoint(body, x, use_reentrant=False, **options).sum()
        with recompute_norms() if backward == "inside" else nullcontext(), ThreadPoolExecutor(1) as pool:
            if backward == "another thread":
                actual = pool.submit(lambda: torch.autograd.grad(loss, asked)).result()
            else:
                actual = torch.autograd.grad(loss, asked)
    assert_same_bits(actual, expected)


def of_biased(norm: nn.Module, x: Tensor) -> Tensor:
    return normops.rms_norm(x, 16, norm.weight, 1e-6, bias=norm.bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 256])
@pytest.mark.parametrize("full_size", ["", "weight", "bias", "weight bias"])
def test_block_never_stores_more(full_size: str, rows: int, saves: bool) -> None:
    """Covers small and full-size weights and biases, leaves and computed ones, and outputs that are saved or not.

    If nothing saves the output, the block stores copies of weight and bias for nothing.
    """
    shape = (rows, 64)
    x, matrix = torch.randn(shape, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    weight, bias = (torch.randn(shape if n in full_size else 64, requires_grad=True) for n in ("weight", "bias"))

    def call() -> Tensor:
        for w, b in ((weight, bias), (weight * 2, bias.detach() * 2)):
            y = normops.rms_norm(x, 64, w, bias=b)
            total = y @ matrix if saves else y + 1
        return total

    before, _ = held(call)
    with recompute_norms():
        copies = 0 if saves else weight.nbytes + bias.nbytes
        assert held(call)[0] <= before + (copies if copies < x.nbytes else 0)


@pytest.mark.parametrize("output", ["jagged", "unbound", "subclass", "itself"])
def test_views_of_subclasses_are_stored(output: str) -> None:
    weight = torch.randn(16, requires_grad=True)
    rows = [torch.randn(n, 16) for n in (2, 3)]
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "jagged": lambda y: y.values(),
        "unbound": lambda y: y.unbind()[1],
        "subclass": lambda y: y.view(-1),
        "itself": lambda y: y,
    }

    def run() -> Tensor:
        if output == "subclass":
            x: Any = TwoTensor(rows[0].clone(), rows[0].clone()).requires_grad_()
        else:
            x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        y = views[output](normops.rms_norm(x, 16, weight)).sin()
        loss = y.values().sum() if y.is_nested else y.sum()
        return torch.autograd.grad(loss, weight)[0]

    expected = run()
    with recompute_norms():
        actual = run()
    if output == "subclass":
        expected, actual = expected.a, actual.a  # type: ignore[attr-defined]
    assert_same_bits([actual], [expected])


def test_write_to_a_constant_bias_stores_the_output() -> None:
    """No gradient depends on the bias, so a write before the output is saved must be legal."""
    x, bias, matrix = torch.randn(4, 16, requires_grad=True), torch.randn(16), torch.randn(16, 16)
    matrix.requires_grad_()
    found = []
    for context in (nullcontext, recompute_norms):
        written = bias.clone()
        with context():
            y = normops.rms_norm(x, 16, bias=written)
            written.mul_(2)
            loss = y @ matrix
        found.append(gradients(loss, [x, matrix]))
    assert_same_bits(*found)


def _note(packed: list[Tensor], tensor: Tensor) -> Tensor:
    packed.append(tensor)
    return tensor.detach()


def test_outer_hooks_never_receive_outputs_of_norms() -> None:
    """Hooks of a checkpoint count tensors: the number must not depend on whether the bias was freed."""
    x, matrix = torch.randn(4, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    counts, found = [], []
    for is_freed in (False, True):
        packed = list[Tensor]()
        with saved_tensors_hooks(partial(_note, packed), lambda kept: kept), recompute_norms():
            bias = torch.ones(16)
            y = normops.rms_norm(x, 16, bias=bias)
            if is_freed:
                del bias
            loss = y @ matrix
        counts.append(len(packed))
        found.append(gradients(loss, [x, matrix]))
    assert counts[0] == counts[1]
    assert_same_bits(*found)


def test_threads_that_save_and_recompute_one_output() -> None:
    t = problem("cpu", (64, 16))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with recompute_norms():
            y = normops.rms_norm(t[0], 16, t[2])
        expected = gradients(y @ t[3], t, retain_graph=True)

        def save(_: int) -> tuple[Tensor | None, ...]:
            with recompute_norms():
                z = y.view(64, 16) @ t[3]
            return gradients(z, t, retain_graph=True)

        with ThreadPoolExecutor(8) as pool:
            for actual in pool.map(save, range(400)):
                assert_same_bits(actual, expected)
    finally:
        sys.setswitchinterval(interval)


def test_block_has_no_effect_without_gradients() -> None:
    t = problem("cpu")
    for mode in (torch.no_grad, torch.inference_mode):
        with Calls() as calls, mode(), recompute_norms():
            assert not is_recomputed(block(FUNCTIONS[0], t), 0)
        assert calls.counts == Counter({FUNCTIONS[0].name: 1})


def test_functional_transforms(device: str) -> None:
    """grad in a block raises, as it supports no hooks; a block in grad has no effect; vmap supports hooks."""
    x, _, weight, matrix = problem(device)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        with recompute_norms():
            return (normops.rms_norm(x, 16, weight) @ matrix).square().sum()

    expected = gradients(loss(x, weight), [x, weight])
    assert_same_bits(torch.func.grad(loss, (0, 1))(x, weight), expected)
    with recompute_norms():
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(loss)(x, weight)
        mapped = torch.vmap(lambda x: (normops.rms_norm(x, 16, weight) @ matrix).square().sum())(x).sum()
    with Calls() as calls:
        assert_same_bits(gradients(mapped, [x, weight]), gradients(loss(x, weight), [x, weight]))
    assert calls.counts["rms_norm"] == 3
