"""Outputs of norms that are not kept for the backward: what it computes again is what they were."""

import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from assertions import assert_same_bits
from calls import Calls
from norms_between_layers import BACKWARD, FORWARD, FUNCTIONS, first, gradients, problem
from profiles import operators_run
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import normops
from normops import recompute_norms
from reference.memory import memory_changes
from reference.operators import OPERATOR_CASES, OPERATORS, Operator, OperatorCase, of_rows

NORMS = [operator for operator in OPERATORS if operator.outputs[0] == "output"]
TWICE = "Trying to backward through the graph a second time"
Context = Callable[[], AbstractContextManager[Any]]


class Saved(torch.autograd.Function):
    """Returns what it is given, and shows the backward what it saved."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: list[Tensor]) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.shown = shown
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.shown.extend(ctx.saved_tensors)
        return grad, None


@pytest.mark.parametrize("case", [case for case in OPERATOR_CASES if case.operator in NORMS], ids=str)
@pytest.mark.covering(core=1, full=2)
def test_the_same_bits_dtypes_and_strides(case: OperatorCase, device: str) -> None:
    """Of an output and of a view, and of all gradients; the norm runs once more, for both of them. Not with a bias that
    is as large as the output, which is not kept."""
    results, made = [], case.arguments()
    is_kept = made.get("bias") is not None and made["bias"].shape == made["input"].shape
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
        assert (given[0].data_ptr() == output.data_ptr()) == (context is nullcontext or is_kept or output.numel() == 0)
        assert given[0].data_ptr() == given[1].data_ptr()
        results.append(([output, *(arguments[name].grad for name in names)], calls.counts))
    (expected, counts), (actual, with_recomputing) = results
    assert_same_bits(actual, expected)
    again = with_recomputing - counts
    assert again.total() == (not is_kept)
    assert again.keys() <= {"rms_norm", case.operator.name}


def block(operator: Operator, t: list[Tensor]) -> Tensor:
    """A norm between linear layers, of which two need its output; the input is no leaf."""
    x, other, weight, matrix = t
    y = first(of_rows(operator, x.shape[-1])(x @ matrix, other, weight))
    return (y @ matrix.sin()).square() + y @ matrix.cos()


def held(call: Callable[[], object]) -> tuple[int, object]:
    """The bytes that a call has allocated and not freed."""
    changes, result = memory_changes(call)
    return sum(changes), result


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_the_forward_holds_less(operator: Operator) -> None:
    """By the output, but for a copy of the weight; other tensors are not kept twice."""
    t = problem("cpu", (256, 64))
    before, _ = held(lambda: block(operator, t))
    with recompute_norms():
        after, _ = held(lambda: block(operator, t))
    assert before - after == 256 * 64 * 4 - t[2].nbytes


@pytest.mark.parametrize("kind", ["module", "patched", "overridden"])
def test_whoever_calls_the_norm(kind: str) -> None:
    x = torch.randn(256, 64)
    made = normops.RMSNorm if kind == "module" else nn.RMSNorm
    model = nn.Sequential(nn.Linear(64, 64), made(64), nn.Linear(64, 64))
    if kind == "patched":
        normops.patch(model)
    with normops.override_torch(kind == "overridden"):
        before, _ = held(lambda: model(x))
        with recompute_norms():
            assert before - held(lambda: model(x))[0] == x.nbytes - 64 * 4


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_memory_is_let_go(operator: Operator) -> None:
    """Without the garbage collector: of a graph that is dropped, and after a backward; also Python's own."""
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

    gc.collect()
    gc.disable()
    try:
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
@pytest.mark.covering(core=2)
def test_a_write_is_the_error_that_it_is(operator: Operator, which: str, context: Context, device: str) -> None:
    """Into what the norm keeps, or a linear layer."""
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
@pytest.mark.covering(core=2)
def test_an_output_that_was_written_to_is_kept(operator: Operator, name: str, device: str) -> None:
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


def test_what_is_not_computed_again() -> None:
    """The output of a norm whose bias alone needs a gradient, as it does not keep its input; what is none of ours."""
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
def test_several_backwards(operator: Operator, device: str) -> None:
    """Retained, of parts, and of a second order: the norm runs once more each time, where its output is needed."""
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
@pytest.mark.covering(core=2)
def test_a_backward_after_that_of_the_norm(operator: Operator, when: str, context: Context, device: str) -> None:
    """What needs its output gets it, also where that is saved once the norm has let go of what it kept for itself."""
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
def test_a_write_between_two_backwards(operator: Operator, context: Context, device: str) -> None:
    """The second one knows nothing of what the first one computed again."""
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
def test_views_that_are_kept(view: Callable[[Tensor], Tensor], device: str) -> None:
    """More is to be known of them than how they lie in memory."""
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
def test_of_negative_zeros(dtype: torch.dtype, device: str) -> None:
    shown: list[Tensor] = []
    zeros = torch.full((2, 16), -0.0, device=device, requires_grad=True)
    with recompute_norms():
        y, _ = normops.add_rms_norm(zeros.to(dtype), zeros, 16)
        Saved.apply(y, shown).sum().backward()  # type: ignore[no-untyped-call]
    assert_same_bits(shown, [y])
    assert shown[0].signbit().all()


def test_several_threads(device: str) -> None:
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
            # Also takes what a matmul takes for a thread, and keeps.
            assert pool.submit(block, FUNCTIONS[0], t).result().grad_fn is not None
            before = pool.submit(held, lambda: block(FUNCTIONS[0], t)).result()[0]
        assert before == held(lambda: block(FUNCTIONS[0], t))[0] + t[0].nbytes - t[2].nbytes
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(step, [recompute_norms] * 32):
            assert_same_bits(actual, expected)
        for actual in pool.map(lambda _: gradients(shared, t, retain_graph=True), range(32)):
            assert_same_bits(actual, expected[:4])


def strided() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: torch.stack([t.detach(), t.detach()], -1), lambda t: t[..., 0])


def both(*contexts: Context) -> Context:
    class Both:
        def __enter__(self) -> None:
            self.entered = [context() for context in contexts]
            for each in self.entered:
                each.__enter__()

        def __exit__(self, *error: Any) -> None:
            for each in reversed(self.entered):
                each.__exit__(*error)

    return Both


NESTED = {
    "nested": (both(recompute_norms, recompute_norms), 1),
    "around save_on_cpu": (both(recompute_norms, save_on_cpu), 0),
    "in save_on_cpu": (both(save_on_cpu, recompute_norms), 1),
    "in other hooks": (both(strided, recompute_norms), 1),
    "three": (both(recompute_norms, strided, recompute_norms), 1),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
@pytest.mark.covering(core=2)
def test_other_hooks(operator: Operator, name: str) -> None:
    """On the CPU: a matmul on a GPU has other bits of a matrix with other strides, as hooks hand it on."""
    t = problem("cpu")
    expected = gradients(block(operator, t), t)
    context, recomputed = NESTED[name]
    with context():
        loss = block(operator, t)
    with Calls() as calls:
        assert_same_bits(gradients(loss, t), expected)
    assert calls.counts.total() == 1 + recomputed


def test_hooks_around_keep_the_rest(device: str) -> None:
    t, packed = problem(device), list[Tensor]()
    for context in (nullcontext, recompute_norms):
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.detach()), lambda kept: kept):
            packed.append(t[0])
            with context():
                block(FUNCTIONS[0], t)
    first, second = (i for i, tensor in enumerate(packed) if tensor is t[0])
    assert len(packed) - second == second - first - 2


def test_the_last_user_lets_go(device: str) -> None:
    """Which may be the last one because another one is gone, before or after it was served."""
    t = problem(device)
    with recompute_norms():
        y = normops.rms_norm(t[0], 16, t[2])
        losses = [(y @ matrix).sum() for matrix in (t[3].sin(), t[3].cos(), t[3])]
    norm = normops._C.Recomputation.of(y)
    assert norm is not None
    gradients(losses[0], t, retain_graph=True)
    assert norm.value is not None
    losses.pop(0)
    gradients(losses[0], t, retain_graph=True)
    assert norm.value is not None
    losses.pop(1)
    assert norm.value is None
    gradients(losses[0], t, retain_graph=True)
    assert norm.value is None
    losses.clear()
    assert not norm.users


def test_an_error_leaves_the_block() -> None:
    with pytest.raises(ZeroDivisionError), recompute_norms():
        _ = 1 / 0
    t = problem("cpu")
    assert normops._C.Recomputation.of(normops.rms_norm(t[0], 16, t[2])) is None


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("place", ["around", "inside", "both"])
@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
@pytest.mark.covering(core=2)
def test_checkpoints(operator: Operator, place: str, early_stop: bool, use_reentrant: bool, device: str) -> None:
    """The input of a checkpoint is an output of a norm, too."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    t = problem(device, dtype=dtype)
    results = []
    for context in (nullcontext, recompute_norms):
        with torch.autocast(device, torch.bfloat16), context():
            loss = block(FUNCTIONS[0], t)
        results.append(gradients(loss, t))
    assert_same_bits(*results)


def test_without_gradients() -> None:
    """Nothing is asked of anybody."""
    t = problem("cpu")
    for mode in (torch.no_grad, torch.inference_mode):
        with Calls() as calls, mode(), recompute_norms():
            assert normops._C.Recomputation.of(block(FUNCTIONS[0], t)) is None
        assert calls.counts == Counter({FUNCTIONS[0].name: 1})


def test_transforms(device: str) -> None:
    """Those of torch.func that take no hooks say so around; inside the block does nothing. vmap takes them."""
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


def test_around_compiled_code(device: str) -> None:
    """What happens between graphs is its concern; within one it does nothing."""
    x, _, weight, matrix = t = problem(device, (6, 16))

    def inside(x: Tensor) -> Tensor:
        with recompute_norms():
            return normops.rms_norm(x @ matrix, 16, weight) @ matrix

    torch._dynamo.reset()
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    results = []
    for context in (nullcontext, recompute_norms):
        with context():
            loss = normops.rms_norm(compiled(x), 16) @ matrix
        results.append(gradients(loss, t, retain_graph=True))
    assert_same_bits(*results)
    assert operators_run(lambda: gradients(loss, t)) == [FORWARD, BACKWARD, BACKWARD]
