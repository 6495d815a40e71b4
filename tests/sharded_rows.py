"""What test_sharding runs in several processes: normalized dimensions sharded, so that no process has a whole row."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import case, communicated, grad_of, mesh_of, placed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import normops
from normops.sharding import HiddenParallel
from reference import cases, oracle
from reference.operators import CASTINGS

ops = torch.ops.normops
rms_norm: Callable[..., Any] = normops.rms_norm
add_rms_norm: Callable[..., Any] = normops.add_rms_norm
gated_rms_norm: Callable[..., Any] = normops.gated_rms_norm
rms_norm_of: Callable[..., oracle.Bounded] = oracle.rms_norm
rms_norm_backward_of: Callable[..., oracle.BiasedBackward] = oracle.rms_norm_backward


class Messages(TorchDispatchMode):
    """How many numbers each collective of this process sends, and the largest tensor that there was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, int]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # what it does with the parts comes here, too
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, FakeTensor):
            self.largest = max(self.largest, result.numel())
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.sent.append((name, args[0].numel()))
        return result


def messages(call: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    with Messages() as mode:
        result = call()
    return result, mode.sent


SHAPES = (
    # shape, normalized dimensions, the sharded one; uneven and empty shards among them
    ((6, 8), 1, 1),
    ((2, 3, 7), 1, 2),
    ((3, 1), 1, 1),
    ((5, 6, 4), 2, 1),
    ((5, 6, 4), 2, 2),
)


@case(2, 4)
def one_number_a_row_is_reduced() -> None:
    mesh = mesh_of()
    for (shape, dims, d), dtype, flags in itertools.product(SHAPES, cases.DTYPES, CASTINGS):
        rows = torch.Size(shape[:-dims]).numel()
        normalized = shape[-dims:]
        x, dy = cases.values(shape, dtype, 1), cases.values(shape, dtype, 2)
        w = cases.values(normalized, dtype, 3)
        shard = (Shard(d),)
        given = placed(x, mesh, shard).requires_grad_()
        weight = placed(w, mesh, (Shard(d - len(shape) + dims),)).requires_grad_()
        grad = placed(dy, mesh, shard)
        output, sent = messages(lambda: rms_norm(given, normalized, weight, cases.EPS, **flags))  # noqa: B023
        assert sent == [("all_reduce", rows)]
        assert output.placements == shard
        oracle.assert_within(output.full_tensor(), rms_norm_of(x, normalized, w, cases.EPS, **flags))
        _, sent = messages(lambda: output.backward(grad))  # noqa: B023
        assert sent == [("all_reduce", 2 * rows)]
        assert grad_of(given).placements == shard
        assert grad_of(weight).placements == (Shard(d - len(shape) + dims),)
        expected = rms_norm_backward_of(dy, x, normalized, w, cases.EPS, **flags)
        oracle.assert_within(grad_of(given).full_tensor(), expected.grad_input, "grad_input")
        assert expected.grad_weight is not None
        oracle.assert_within(grad_of(weight).full_tensor(), expected.grad_weight, "grad_weight")


@case(2, 4)
def sums_with_a_residual_are_sharded_with_their_rows() -> None:
    mesh = mesh_of()
    for dtype, alpha in itertools.product((torch.float32, torch.bfloat16), (1.0, 0.25)):
        x, r, dy, dh = (cases.values((6, 10), dtype, i) for i in range(4))
        w = cases.values((10,), dtype, 4)
        given, residual = (placed(t, mesh, (Shard(1),)).requires_grad_() for t in (x, r))
        weight = placed(w, mesh, (Replicate(),)).requires_grad_()
        (y, h), sent = messages(lambda: add_rms_norm(given, residual, 10, weight, cases.EPS, alpha=alpha))  # noqa: B023
        assert sent == [("all_reduce", 6)]
        assert y.placements == h.placements == (Shard(1),)
        expected = oracle.add_rms_norm(x, r, (10,), w, cases.EPS, alpha=alpha)
        for actual, bounded in zip((y, h), expected, strict=True):
            oracle.assert_within(actual.full_tensor(), bounded)
        grads = [placed(t, mesh, (Shard(1),)) for t in (dy, dh)]
        _, sent = messages(lambda: torch.autograd.backward((y, h), grads))  # noqa: B023
        assert sent == [("all_reduce", 12)]
        of_h = rms_norm_backward_of(dy, h.full_tensor(), (10,), w, cases.EPS, grad_residual=dh)
        oracle.assert_within(grad_of(residual).full_tensor(), of_h.grad_input)
        assert of_h.grad_weight is not None
        oracle.assert_within(grad_of(weight).full_tensor(), of_h.grad_weight)


@case(2, 4)
def gated_norms_reduce_as_much() -> None:
    mesh = mesh_of()
    for dtype, norm_before_gate, flags in itertools.product((torch.float32, torch.bfloat16), (True, False), CASTINGS):
        x, gate, dy = (cases.values((6, 10), dtype, i) for i in range(3))
        w = cases.values((10,), dtype, 4)
        given, of_gate = (placed(t, mesh, (Shard(1),)).requires_grad_() for t in (x, gate))
        weight = placed(w, mesh, (Shard(0),)).requires_grad_()
        gating = {"norm_before_gate": norm_before_gate, **flags}
        y, sent = messages(lambda: gated_rms_norm(given, of_gate, 10, weight, cases.EPS, **gating))  # noqa: B023
        assert sent == [("all_reduce", 6)]
        assert y.placements == (Shard(1),)
        expected = ops.gated_rms_norm(x, gate, [10], w, cases.EPS, **gating)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.full_tensor(), expected, rtol=4 * eps, atol=4 * eps)
        grad = placed(dy, mesh, (Shard(1),))
        _, sent = messages(lambda: y.backward(grad))  # noqa: B023
        assert sent == [("all_reduce", 12)]
        gradients = ops.gated_rms_norm_backward(dy, x, gate, [10], w, cases.EPS, **gating)
        for leaf, gradient in zip((given, of_gate, weight), gradients, strict=True):
            assert grad_of(leaf).placements == ((Shard(0),) if leaf is weight else (Shard(1),))
            torch.testing.assert_close(grad_of(leaf).full_tensor(), gradient, rtol=16 * eps, atol=16 * eps)


@case(4)
def rows_and_columns_are_sharded() -> None:
    mesh = mesh_of(2, 2)
    x, dy, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((5, 7), (5, 7), (7,))))
    for placements, of_weight, rows, of_grad in (
        ((Shard(0), Shard(1)), (Replicate(), Shard(0)), 3, (Partial(), Shard(0))),
        ((Shard(1), Shard(1)), (Shard(0), Shard(0)), 5, (Shard(0), Shard(0))),
        ((Replicate(), Shard(1)), (Replicate(), Replicate()), 5, (Replicate(), Shard(0))),
    ):
        given = placed(x, mesh, placements).requires_grad_()
        weight = placed(w, mesh, of_weight).requires_grad_()
        y, sent = messages(lambda: rms_norm(given, 7, weight, cases.EPS))  # noqa: B023
        assert {name for name, _ in sent} == {"all_reduce"}
        assert len(sent) == placements.count(Shard(1))
        assert all(count <= rows for _, count in sent)
        assert y.placements == placements
        oracle.assert_within(y.full_tensor(), rms_norm_of(x, (7,), w, cases.EPS))
        y.backward(placed(dy, mesh, placements))
        expected = rms_norm_backward_of(dy, x, (7,), w, cases.EPS)
        oracle.assert_within(grad_of(given).full_tensor(), expected.grad_input)
        assert grad_of(weight).placements == of_grad
        assert expected.grad_weight is not None
        oracle.assert_within(grad_of(weight).full_tensor(), expected.grad_weight)


class Attention(nn.Module):
    """As in OLMo 2: queries and keys are normalized across heads."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = normops.RMSNorm(hidden, eps=1e-6), normops.RMSNorm(hidden, eps=1e-6)
        self.head_dim = hidden // heads

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        query, key, value = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (query, key, self.value(x)))
        scores = torch.softmax(query @ key.transpose(-1, -2) / self.head_dim**0.5, -1)
        return self.out((scores @ value).transpose(1, 2).flatten(-2))


def shard_attention(block: Attention, mesh: Any, local: bool) -> None:
    """With this process's heads, or all of them as DTensors, between the projections."""
    column, norm = ColwiseParallel(use_local_output=local), HiddenParallel(use_local_output=local)
    projections = {"query": column, "key": column, "value": column, "out": RowwiseParallel()}
    parallelize_module(block, mesh, {**projections, "query_norm": norm, "key_norm": norm})


@case(2, 4)
def norms_across_sharded_heads() -> None:
    mesh = mesh_of()
    x = cases.values((2, 6, 32), torch.float64)
    torch.manual_seed(0)
    alone = Attention().double()
    with torch.no_grad():
        alone.query_norm.weight.uniform_(0.5, 1.5), alone.key_norm.weight.uniform_(0.5, 1.5)
    expected = alone(x)
    expected.square().sum().backward()
    for is_compiled, local in itertools.product((False, True), (False, True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Attention().double()
        block.load_state_dict(alone.state_dict())
        shard_attention(block, mesh, local)
        run = torch.compile(block, backend="aot_eager") if is_compiled else block
        # The key of the cache has no rank in it, the graph has (https://github.com/pytorch/pytorch/issues/188390).
        with torch._functorch.config.patch(enable_autograd_cache=False):
            y, sent = communicated(lambda: run(x))  # noqa: B023
            torch.testing.assert_close(y, expected)
            if not is_compiled:
                assert sent == {"all_reduce": 3}  # two norms, and the last projection
            y.square().sum().backward()
        for name, parameter in alone.named_parameters():
            gradient = dict(block.named_parameters())[name].grad
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad)


@case(2)
def hidden_parallel_norms_that_take_two_tensors() -> None:
    mesh = mesh_of()
    x, other = (cases.values((4, 8), torch.float32, i) for i in range(2))
    own = [t.chunk(2, -1)[dist.get_rank()] for t in (x, other)]
    for make, name in ((lambda: normops.RMSNorm(8), "residual"), (lambda: normops.GatedRMSNorm(8), "gate")):
        whole = make()
        whole.weight.requires_grad_(False)
        expected = whole(x, other)
        norm = parallelize_module(make().requires_grad_(False), mesh, HiddenParallel())
        assert isinstance(norm.weight, DTensor)
        assert norm.weight.placements == (Shard(0),)
        assert not norm.weight.requires_grad
        for args, kwargs in ((own, {}), (own[:1], {name: own[1]})):
            results, sent = messages(lambda: norm(*args, **kwargs))  # noqa: B023
            assert sent == [("all_reduce", 4)]
            for mine, tensor in zip(as_tuple(results), as_tuple(expected), strict=True):
                torch.testing.assert_close(mine, tensor.chunk(2, -1)[dist.get_rank()])
    norm = parallelize_module(normops.RMSNorm(8), mesh, HiddenParallel())
    torch.testing.assert_close(norm(own[0], None), normops.RMSNorm(8)(x).chunk(2, -1)[dist.get_rank()])


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


@case(2, 4)
def no_process_has_a_whole_row() -> None:
    mesh, cols = mesh_of(), 64
    part = cols // dist.get_world_size()
    given = placed(cases.values((1, cols), torch.float32, 1), mesh, (Shard(1),)).requires_grad_()
    weight = placed(cases.values((cols,), torch.float32, 2), mesh, (Shard(0),)).requires_grad_()
    with Messages() as mode:
        y = rms_norm(given, cols, weight)
        y.backward(y.detach())
    assert mode.largest <= part
