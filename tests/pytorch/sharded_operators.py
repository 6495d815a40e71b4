"""Cases of test_sharding in several processes: the operators on DTensors."""

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from assertions import message_of
from processes import Placements, assert_equal, case, communicated, mesh_of, placed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from traced_graphs import operators, trace

import normops
from normops import _C
from reference import cases, oracle
from reference.cases import EPS, Case
from reference.operators import OPERATORS, OperatorCase, Variant, of_argument, other_dtypes, variants

ops = torch.ops.normops
rms_norm: Callable[..., Any] = normops.rms_norm
add_rms_norm: Callable[..., Any] = normops.add_rms_norm
rms_norm_rope: Callable[..., Any] = normops.rms_norm_rope


ROWS = (
    # shape, number of normalized dimensions, number of the weight's group dimensions, sharded dimension, and dimensions
    # over which the weight broadcasts; some shards are uneven or empty
    ((4, 3, 8), 1, 0, 0, ()),
    ((4, 3, 8), 1, 0, 1, ()),
    ((5, 2, 3, 4), 2, 0, 0, ()),
    ((2, 7, 3, 4), 2, 1, 1, ()),
    ((1, 8), 1, 0, 0, ()),
    ((3, 8), 1, 0, 0, ()),
    ((4, 5, 3, 8), 1, 2, 1, ()),
    ((4, 5, 3, 8), 1, 1, 2, ()),
    ((4, 5, 3, 8), 1, 3, 0, (1, 2)),
    ((4, 5, 3, 8), 1, 3, 1, (1, 2)),
)


@case(2, 4)
def rows_stay_where_they_are() -> None:
    """Nothing is communicated: the other tensors are whole, or sharded on the same dimension as the rows."""
    mesh, dtypes = mesh_of(), itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for (shape, dims, groups, d, ones), variant, has_weight in itertools.product(ROWS, variants(), (True, False)):
        dtype, operator = next(dtypes), variant.operator
        others = (*other_dtypes(operator, dtype), {})[0]
        # float64, as sums that each rank rounds are less accurate.
        others |= {"bias": torch.float64} if "bias" in operator.tensors else {}
        weight_dtype = torch.float64 if has_weight else None
        of_rows = Case(shape, dtype, dims, weight_dtype, EPS, 1.0, has_residual=True, group_dims=groups, ones=ones)
        if not operator.takes(of_rows):
            continue
        case = variant.at(of_rows, others)
        of_weight = d - (len(shape) - dims - groups)  # the weight's sharded dimension, if not negative
        of_weight = -1 if of_weight in ones else of_weight
        broadcast = ("weight", "bias") if groups else ("weight",)

        def at(name: str, tensor: Tensor) -> DTensor:
            if name in broadcast:  # noqa: B023
                placement = Shard(of_weight) if of_weight >= 0 else Replicate()  # noqa: B023
            else:
                is_whole = name in operator.tables and (has_weight or tensor.shape[d] == 1)  # noqa: B023
                placement = Replicate() if is_whole else Shard(d)  # noqa: B023
            return placed(tensor, mesh, (placement,))

        given = {n: at(n, value) if isinstance(value, Tensor) else value for n, value in case.arguments().items()}
        results, sent = communicated(lambda: operator.call(**given))  # noqa: B023
        assert sent == {}, case
        every = zip(operator.outputs, results, case.results(), case.expected(), strict=True)
        for name, actual, whole, bounded in every:
            if whole is None or bounded is None:
                assert actual is None
            elif of_argument(name) in broadcast:
                assert actual.placements == (Shard(of_weight) if of_weight >= 0 else Partial(),)
                oracle.assert_within(actual.full_tensor(), bounded, f"{name} of {case}")
            else:
                assert actual.placements == (Shard(d),)
                assert_equal(actual, whole)


def placements_at_random(dims: int, mesh: DeviceMesh, choose: random.Random) -> Placements:
    return tuple(choose.choice([Replicate(), Partial(), *map(Shard, range(dims))]) for _ in range(mesh.ndim))


def at_random(tensors: Mapping[str, Any], mesh: DeviceMesh, choose: random.Random) -> dict[str, Any]:
    def placed_at_random(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return placed(value, mesh, placements_at_random(value.dim(), mesh, choose)) if is_tensor else value

    return {name: placed_at_random(value) for name, value in tensors.items()}


def any_case(variant: Variant, choose: random.Random) -> OperatorCase:
    shape = *(choose.randint(1, 5) for _ in range(choose.randint(1, 3))), choose.randint(5, 8)
    dims = 1 if variant.operator.tables else choose.randint(1, len(shape) - 1)
    groups = choose.randint(0, len(shape) - dims)
    ones = tuple(dim for dim in range(groups) if choose.random() < 0.3)
    like = Case(shape, torch.float32, dims, torch.float32, group_dims=groups, has_residual=True, ones=ones)
    return variant.at(like)


@case(2, 4)
def any_placements_give_the_same_values() -> None:
    """Tests every output mask; each mask must have its own key in the cache of shardings."""
    meshes = [mesh_of()] if dist.get_world_size() == 2 else [mesh_of(2, 2), mesh_of(2, 1, 2)]
    choose = random.Random(1)
    for variant in variants():
        operator = variant.operator
        for mask in operator.masks() if operator.has_mask else [None] * 4:
            case = any_case(variant, choose)
            wanted: dict[str, Any] = {} if mask is None else {"output_mask": mask}
            given = at_random(case.arguments(), choose.choice(meshes), choose)
            results = operator.call(**given, **wanted)
            for actual, expected in zip(results, case.results(**wanted), strict=True):
                assert (actual is None) == (expected is None)
                if expected is not None:
                    torch.testing.assert_close(actual.full_tensor(), expected, msg=lambda m: f"{case}: {m}")  # noqa: B023


@case(2, 4)
def channels_are_whole_and_the_rest_stays_where_it_is() -> None:
    mesh = mesh_of()
    norm, backward = ops.channel_rms_norm.default, ops.channel_rms_norm_backward.default
    x, dy = (cases.values((4, 6, 5, 8), torch.float32, i) for i in range(2))
    weight, bias = (cases.values((6,), torch.float32, i) for i in (2, 3))
    others = {"normalized_shape": [6], "dim": -3, "activation": "silu"}
    whole = {"weight": weight, "bias": bias}
    for placement, gathered in ((Shard(0), 0), (Shard(2), 0), (Shard(3), 0), (Shard(1), 1)):
        rows = Replicate() if gathered else placement
        parameters = {name: placed(tensor, mesh, (Replicate(),)) for name, tensor in whole.items()}
        given, upstream = (placed(tensor, mesh, (placement,)) for tensor in (x, dy))
        output, sent = communicated(lambda: norm(given, **parameters, **others))  # noqa: B023
        assert sent == ({"all_gather_into_tensor": 1} if gathered else {})
        assert output.placements == (rows,)
        torch.testing.assert_close(output.full_tensor(), norm(x, **whole, **others))
        gradients, sent = communicated(lambda: backward(upstream, given, **parameters, **others))  # noqa: B023
        assert sent == ({"all_gather_into_tensor": 2} if gathered else {})
        assert gradients[1].placements == gradients[2].placements == (Replicate() if gathered else Partial(),)
        for actual, expected in zip(gradients, backward(dy, x, **whole, **others), strict=True):
            torch.testing.assert_close(actual.full_tensor(), expected)
    # One weight per sample, as under vmap.
    of_samples = cases.values((4, 1, 1, 6), torch.float32, 4)
    given, scale = placed(x, mesh, (Shard(0),)), placed(of_samples, mesh, (Shard(0),))
    output, sent = communicated(lambda: norm(given, weight=scale, **others))
    assert sent == {}
    torch.testing.assert_close(output.full_tensor(), norm(x, weight=of_samples, **others))


@case(2)
def what_is_not_sharded_by_rows_is_replicated() -> None:
    mesh = mesh_of()
    x, h, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((4, 3, 8), (4, 3, 8), (8,))))
    rows, replicate, partial = (Shard(0),), (Replicate(),), (Partial(),)
    norm, add, rotate = ops.rms_norm.default, ops.add_rms_norm.default, ops.rms_norm_rope.default
    for op, operands, weight, sent, output in (
        (norm, (partial,), replicate, {"all_reduce": 1}, replicate),
        (norm, (rows,), (Shard(0),), {"all_gather_into_tensor": 1}, rows),
        (norm, (rows,), partial, {"all_reduce": 1}, rows),
        (add, (rows, rows), replicate, {}, rows),
        (add, (rows, replicate), replicate, {}, rows),
        (add, (replicate, rows), replicate, {}, rows),
        (add, (partial, rows), replicate, {"reduce_scatter_tensor": 1}, rows),
        (add, (partial, replicate), replicate, {"all_reduce": 1}, replicate),
        (add, ((Shard(2),), rows), replicate, {"all_gather_into_tensor": 1}, rows),
        # The two columns of a rotation may be on different ranks.
        (rotate, ((Shard(2),), replicate, replicate), replicate, {"all_gather_into_tensor": 1}, replicate),
    ):
        whole = (x, h, h)[: len(operands)]
        given = [placed(t, mesh, p) for t, p in zip((*whole, w), (*operands, weight), strict=True)]
        outputs, actually_sent = communicated(lambda: op(*given[:-1], [8], given[-1]))  # noqa: B023
        assert actually_sent == sent, (op, operands, weight)
        expected = op(*whole, [8], w)
        for actual, wanted in zip(*(r if op is add else (r,) for r in (outputs, expected)), strict=True):
            assert actual.placements == output, (op, operands, weight)
            assert_equal(actual, wanted)


@case(2)
def the_gradient_of_the_residual_is_added_wherever_it_is() -> None:
    mesh = mesh_of()
    x, dy, s, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate((*[(5, 3, 8)] * 3, (8,))))
    weight = placed(w, mesh, (Replicate(),))
    anywhere = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
    for of_input, of_residual in itertools.product((Shard(0), Replicate()), (*anywhere, None)):
        given = [placed(t, mesh, (of_input,)) for t in (dy, x)]
        grad_residual = None if of_residual is None else placed(s, mesh, (of_residual,))
        (grad_input, grad_weight, _), sent = communicated(
            lambda: ops.rms_norm_backward(*given, [8], weight, grad_residual=grad_residual)  # noqa: B023
        )
        if of_residual in (None, of_input, Replicate()):
            assert sent == {}
        expected = ops.rms_norm_backward(dy, x, [8], w, grad_residual=s if of_residual else None)
        if of_residual == Shard(2) and of_input == Replicate():  # then the sum is sharded by columns
            assert grad_input.placements == (Shard(2),)
            torch.testing.assert_close(grad_input.full_tensor(), expected[0])
        else:
            assert_equal(grad_input, expected[0])
        torch.testing.assert_close(grad_weight.full_tensor(), expected[1])


@case(2)
def in_place_keeps_the_placements_or_refuses() -> None:
    mesh = mesh_of()
    x, h, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((5, 8), (5, 8), (8,))))
    rows, replicate, columns = (Shard(0),), (Replicate(),), (Shard(1),)
    weight = placed(w, mesh, (Shard(0),))
    kept: tuple[Placements, ...] = (rows, replicate)
    for placements in kept:
        given, residual = placed(x, mesh, placements), placed(h, mesh, placements)
        local = given.to_local()
        assert normops.rms_norm_(given, 8, weight) is given
        assert_equal(given, rms_norm(x, 8, w))
        assert given.placements == placements
        assert given.to_local().data_ptr() == local.data_ptr()
        given = placed(x, mesh, placements)
        normops.add_rms_norm_(given, residual, 8, weight)
        for actual, expected in zip((given, residual), add_rms_norm(x, h, 8, w), strict=True):
            assert actual.placements == placements
            assert_equal(actual, expected)
    refused: tuple[Placements, ...] = (columns, (Partial(),))
    for placements in refused:
        given = placed(x, mesh, placements)
        assert message_of(lambda: normops.rms_norm_(given, 8)) == (  # noqa: B023
            f"rms_norm_: expected input, which is written to, to be placed as (Replicate(),), but got {placements}"
        )
        assert_equal(given, x)
    for of_input, of_residual, named, wanted in (
        (rows, replicate, "residual", rows),
        (replicate, rows, "input", rows),
        (columns, columns, "input", replicate),
        (replicate, (Partial(),), "residual", replicate),
    ):
        given, residual = placed(x, mesh, of_input), placed(h, mesh, of_residual)
        got = of_input if named == "input" else of_residual
        assert message_of(lambda: normops.add_rms_norm_(given, residual, 8)) == (  # noqa: B023
            f"add_rms_norm_: expected {named}, which is written to, to be placed as {wanted}, but got {got}"
        )
        assert_equal(given, x)
        assert_equal(residual, h)


@case(2)
def out_overloads_refuse() -> None:
    mesh = mesh_of()

    def everywhere(arguments: dict[str, Any]) -> dict[str, Any]:
        return {n: placed(v, mesh, (Replicate(),)) if isinstance(v, Tensor) else v for n, v in arguments.items()}

    for operator in OPERATORS:
        case = Variant(operator, {}).at(Case((4, 8), torch.float32, weight_dtype=torch.float32))
        arguments, targets = everywhere(case.arguments()), everywhere(case.targets())
        message = message_of(lambda: operator.out(**arguments, **targets))  # noqa: B023
        assert "does not have a sharding strategy registered" in message


@case(2)
def the_module_takes_dtensors() -> None:
    mesh = mesh_of()
    norm = normops.RMSNorm(8)
    x = cases.values((3, 8), torch.float32)
    expected = norm(x)
    given = placed(x, mesh, (Shard(0),))
    assert _C.rms_norm(given, 8, None, None, 0.0, "once", None) is NotImplemented
    assert "got mixed torch.Tensor and DTensor" in message_of(lambda: norm(given))
    norm.weight = nn.Parameter(placed(norm.weight.detach(), mesh, (Replicate(),)))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert_equal(norm(given), expected)


@case(2)
def derivatives_of_second_order() -> None:
    mesh = mesh_of()
    x, w = cases.values((4, 8), torch.float64, 1), cases.values((8,), torch.float64, 2)

    def second(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(rms_norm(x, 8, w, cases.EPS).pow(3).sum(), (x, w), create_graph=True)
        return torch.autograd.grad([gradient.square().sum() for gradient in first], (x, w))

    expected = second(x.requires_grad_(), w.requires_grad_())
    for of_input, of_weight in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
        given = placed(x.detach(), mesh, (of_input,)), placed(w.detach(), mesh, (of_weight,))
        for actual, wanted in zip(second(*(t.requires_grad_() for t in given)), expected, strict=True):
            assert isinstance(actual, DTensor)
            torch.testing.assert_close(actual.full_tensor(), wanted)


@case(2)
def compiled_it_is_one_operator_each_way() -> None:
    mesh = mesh_of()
    x, w = cases.values((4, 8), torch.float32, 1), cases.values((8,), torch.float32, 2)
    given = placed(x, mesh, (Shard(0),)).requires_grad_()
    weight = placed(w, mesh, (Replicate(),)).requires_grad_()
    graphs = trace(lambda x, w: rms_norm(x, 8, w, cases.EPS), given, weight)
    assert graphs.backward is not None
    called = [
        [name for name in operators(g) if not name.startswith("aten.")] for g in (graphs.forward, graphs.backward)
    ]
    assert called == [["normops.rms_norm.default"], ["normops.rms_norm_backward.default"]]

    def block(x: Tensor, h: Tensor, w: Tensor) -> Any:
        y, h = add_rms_norm(x, h, 8, w, cases.EPS)
        return y * h

    torch._dynamo.reset()
    residual = placed(x, mesh, (Replicate(),)).requires_grad_()
    gradients = []
    for function in (block, torch.compile(block, fullgraph=True)):
        # The graph depends on the rank, the cache key does not (https://github.com/pytorch/pytorch/issues/188390).
        with torch._functorch.config.patch(enable_autograd_cache=False):
            output = function(given, residual, weight)
        assert output.placements == (Shard(0),)
        gradients.append((output, *torch.autograd.grad(output.sum(), (given, residual, weight))))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected.full_tensor())
