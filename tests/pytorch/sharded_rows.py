"""Cases of test_sharding in several processes: sharded normalized dimensions, so that no process has a whole row."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import assert_equal, case, communicated, grad_of, mesh_of, placed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import normops
from normops.sharding import HiddenParallel
from reference import cases, oracle
from reference.cases import Case
from reference.operators import ADD_RMS_NORM, DIFFERENTIABLE, Variant, named, of_argument, variants

rms_norm: Callable[..., Any] = normops.rms_norm
rms_norm_of: Callable[..., oracle.Bounded] = oracle.rms_norm
rms_norm_backward_of: Callable[..., oracle.BiasedBackward] = oracle.rms_norm_backward


class Messages(TorchDispatchMode):
    """Records how many numbers each collective of this process sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its operations on local tensors arrive here, too
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.sent.append((name, args[0].numel()))
        return result


def messages(call: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    with Messages() as mode:
        result = call()
    return result, mode.sent


SHAPES = (
    # shape, number of normalized dimensions, sharded dimension; some shards are uneven or empty
    ((6, 8), 1, 1),
    ((2, 3, 7), 1, 2),
    ((3, 1), 1, 1),
    ((5, 6, 4), 2, 1),
    ((5, 6, 4), 2, 2),
)


# Rotations are left out, as they need whole rows. One activation is enough: sharding does not depend on it.
IN_PARTS = [
    variant
    for variant in variants(DIFFERENTIABLE)
    if not variant.operator.tables and variant.flags.get("activation") in (None, "silu")
]
IN_PARTS.append(Variant(ADD_RMS_NORM, {"alpha": 0.25}))


@case(2, 4)
def one_number_a_row_is_reduced() -> None:
    """The backward reduces two numbers per row. Gated rows need tolerances, as the gate adds a rounding."""
    mesh, dtypes = mesh_of(), itertools.cycle(cases.DTYPES)
    for variant, (shape, dims, d) in itertools.product(IN_PARTS, SHAPES):
        dtype = next(dtypes)
        operator, gradient = variant.operator, named(str(variant.operator.gradient))
        whole = variant.at(Case(shape, dtype, dims, dtype, cases.EPS)).arguments()
        given: dict[str, Any] = {
            name: placed(value, mesh, (Shard(d - len(shape) + value.dim()),)).requires_grad_()
            if isinstance(value, Tensor)
            else value
            for name, value in whole.items()
        }
        outputs, sent = messages(lambda: operator.call(**given))  # noqa: B023
        rows = torch.Size(shape[:-dims]).numel()
        assert sent == [("all_reduce", rows)]
        upstream = [cases.values(shape, dtype, seed) for seed in range(3, 3 + len(outputs))]
        grads = [placed(grad, mesh, (Shard(d),)) for grad in upstream]
        _, sent = messages(lambda: torch.autograd.backward(outputs, grads))  # noqa: B023
        assert sent == [("all_reduce", 2 * rows)]
        # Both summands of add_rms_norm have the gradient of their sum.
        of_sum = {"input": outputs[-1].full_tensor(), "grad_residual": upstream[-1]} if len(outputs) > 1 else {}
        backward = gradient.given({**whole, "grad_output": upstream[0], **of_sum})
        leaves = [given[of_argument(name)] for name in gradient.outputs if given.get(of_argument(name)) is not None]
        leaves[0] = given.get("residual", leaves[0])
        for op, arguments, actual, placements in (
            (operator, whole, outputs, [(Shard(d),)] * 2),
            (gradient, backward, [*map(grad_of, leaves)], [leaf.placements for leaf in leaves]),
        ):
            results = zip(actual, placements, op.call(**arguments), op.expected(arguments), strict=False)
            for tensor, placement, same, bounded in results:
                assert tensor.placements == placement
                if "gate" in operator.tensors:
                    tolerance = (4 if op is operator else 16) * torch.finfo(dtype).eps
                    torch.testing.assert_close(tensor.full_tensor(), same, rtol=tolerance, atol=tolerance)
                else:
                    assert bounded is not None
                    oracle.assert_within(tensor.full_tensor(), bounded)


@case(4)
def each_dimension_of_the_mesh_is_sharded_for_itself() -> None:
    """Sharded columns reduce one number per row."""
    mesh = mesh_of(2, 2)
    x, dy, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((5, 3, 8), (5, 3, 8), (8,))))
    rows, inner, columns, whole, part = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
    expected, gradients = rms_norm_of(x, (8,), w, cases.EPS), rms_norm_backward_of(dy, x, (8,), w, cases.EPS)
    assert gradients.grad_weight is not None
    for given, of_weight, output, of_grad, count in (
        ((rows, inner), (whole, whole), (rows, inner), (part, part), 0),
        ((rows, rows), (whole, whole), (rows, rows), (part, part), 0),
        ((rows, whole), (whole, whole), (rows, whole), (part, whole), 0),
        ((part, inner), (whole, whole), (whole, inner), (whole, part), 1),
        ((rows, columns), (whole, Shard(0)), (rows, columns), (part, Shard(0)), 1),
        ((columns, columns), (Shard(0), Shard(0)), (columns, columns), (Shard(0), Shard(0)), 2),
        ((whole, columns), (whole, whole), (whole, columns), (whole, Shard(0)), 1),
    ):
        leaf, weight = placed(x, mesh, given).requires_grad_(), placed(w, mesh, of_weight).requires_grad_()
        y, sent = messages(lambda: rms_norm(leaf, 8, weight, cases.EPS))  # noqa: B023
        assert [name for name, _ in sent] == ["all_reduce"] * count
        assert y.placements == output
        y.backward(placed(dy, mesh, output))
        assert grad_of(weight).placements == of_grad
        oracle.assert_within(grad_of(weight).full_tensor(), gradients.grad_weight)
        oracle.assert_within(grad_of(leaf).full_tensor(), gradients.grad_input)
        if columns in given:
            oracle.assert_within(y.full_tensor(), expected)
            assert all(numbers <= (9 if rows in given else 15) for _, numbers in sent)
        else:
            assert_equal(y, rms_norm(x, 8, w, cases.EPS))


class Attention(nn.Module):
    """Normalizes queries and keys across heads, as in OLMo 2."""

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
    """Shards the block; attention takes this process's heads (``local``), or all heads as DTensors."""
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
        # The graph depends on the rank, the cache key does not (https://github.com/pytorch/pytorch/issues/188390).
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
