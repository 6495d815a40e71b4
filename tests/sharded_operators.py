"""What test_sharding runs in several processes: the operators on DTensors."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import Placements, assert_equal, case, communicated, grad_of, mesh_of, placed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from traced_graphs import operators, trace

import normops
from normops import _C
from reference import cases, oracle

ops = torch.ops.normops
rms_norm: Callable[..., Any] = normops.rms_norm
add_rms_norm: Callable[..., Any] = normops.add_rms_norm
gated_rms_norm: Callable[..., Any] = normops.gated_rms_norm
rms_norm_rope: Callable[..., Any] = normops.rms_norm_rope


def normalized(shape: tuple[int, ...], dims: int) -> tuple[int, ...]:
    return shape[len(shape) - dims :]


ROWS = (
    # shape, normalized dimensions, the sharded one; uneven and empty shards among them
    ((4, 3, 8), 1, 0),
    ((4, 3, 8), 1, 1),
    ((5, 2, 3, 4), 2, 0),
    ((2, 7, 3, 4), 2, 1),
    ((1, 8), 1, 0),
    ((3, 8), 1, 0),
)


@case(2, 4)
def shards_of_rows_stay_where_they_are() -> None:
    mesh = mesh_of()
    for (shape, dims, d), dtype, has_weight in itertools.product(ROWS, (torch.float32, torch.bfloat16), (True, False)):
        shard, replicate, ns = (Shard(d),), (Replicate(),), normalized(shape, dims)
        x, dy = cases.values(shape, dtype, 1), cases.values(shape, dtype, 2)
        w = cases.values(ns, torch.float32, 3) if has_weight else None
        given = placed(x, mesh, shard).requires_grad_()
        weight = placed(w, mesh, replicate).requires_grad_() if w is not None else None
        grad = placed(dy, mesh, shard)

        output, sent = communicated(lambda: rms_norm(given, ns, weight, cases.EPS))  # noqa: B023
        assert sent == {}
        assert output.placements == shard
        assert_equal(output, rms_norm(x, ns, w, cases.EPS))

        _, sent = communicated(lambda: output.backward(grad))  # noqa: B023
        assert sent == {}
        expected = oracle.rms_norm_backward(dy, x, ns, w, cases.EPS)
        assert grad_of(given).placements == shard
        assert_equal(given.grad, ops.rms_norm_backward(dy, x, ns, w, cases.EPS)[0])
        if weight is not None:
            assert grad_of(weight).placements == (Partial(),)
            assert expected.grad_weight is not None
            oracle.assert_within(grad_of(weight).full_tensor(), expected.grad_weight, "grad_weight")


@case(2, 4)
def weights_of_heads_stay_with_their_heads() -> None:
    mesh = mesh_of() if dist.get_world_size() == 2 else mesh_of(2, 2)
    shape, of_weight = (4, 5, 3, 8), (5, 3, 8)
    x, dy, w = (cases.values(size, torch.float32, i) for i, size in enumerate((shape, shape, of_weight)))
    rows = (Replicate(),) * (mesh.ndim - 1)
    for d, inputs, weights in ((1, rows, rows), (2, rows, rows), (1, (Shard(0),) * len(rows), rows)):
        by_heads = (*inputs, Shard(d))
        given = placed(x, mesh, by_heads).requires_grad_()
        residual = placed(dy, mesh, by_heads)
        weight = placed(w, mesh, (*weights, Shard(d - 1))).requires_grad_()
        (output, total), sent = communicated(lambda: add_rms_norm(given, residual, 8, weight, cases.EPS))  # noqa: B023
        assert sent == {}
        assert output.placements == total.placements == by_heads
        expected = add_rms_norm(x, dy, 8, w, cases.EPS)
        assert_equal(output, expected[0])
        output, sent = communicated(lambda: rms_norm(given, 8, weight, cases.EPS))  # noqa: B023
        assert sent == {}
        assert_equal(output, rms_norm(x, 8, w, cases.EPS))
        _, sent = communicated(lambda: output.backward(residual))  # noqa: B023
        assert sent == {}
        grad_input, grad_weight = ops.rms_norm_backward(dy, x, [8], w, cases.EPS)
        assert_equal(given.grad, grad_input)
        assert grad_of(weight).placements == (*(Partial() if p.is_shard() else p for p in inputs), Shard(d - 1))
        torch.testing.assert_close(grad_of(weight).full_tensor(), grad_weight)


@case(2, 4)
def a_sharded_row_that_is_to_be_rotated_is_gathered() -> None:
    """What is rotated together may be on two ranks."""
    mesh = mesh_of()
    x, cos, sin = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((5, 8), (5, 4), (5, 4))))
    given = placed(x, mesh, (Shard(1),))
    tables = [placed(t, mesh, (Replicate(),)) for t in (cos, sin)]
    output, sent = communicated(lambda: rms_norm_rope(given, *tables, 8))
    assert sent == {"all_gather_into_tensor": 1}
    assert output.placements == (Replicate(),)
    assert_equal(output, rms_norm_rope(x, cos, sin, 8))


@case(2)
def what_is_not_sharded_by_rows_is_replicated() -> None:
    mesh = mesh_of()
    x, h, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((4, 3, 8), (4, 3, 8), (8,))))
    rows, replicate, partial = (Shard(0),), (Replicate(),), (Partial(),)
    norm, add = ops.rms_norm.default, ops.add_rms_norm.default
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
    ):
        whole = (x, h)[: len(operands)]
        given = [placed(t, mesh, p) for t, p in zip((*whole, w), (*operands, weight), strict=True)]
        outputs, actually_sent = communicated(lambda: op(*given[:-1], [8], given[-1]))  # noqa: B023
        assert actually_sent == sent, (op, operands, weight)
        expected = op(*whole, [8], w)
        for actual, wanted in zip(*((r,) if op is norm else r for r in (outputs, expected)), strict=True):
            assert actual.placements == output, (op, operands, weight)
            assert_equal(actual, wanted)


@case(2)
def any_combination_of_outputs_is_computed() -> None:
    mesh = mesh_of()
    x, dy, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate(((5, 8), (5, 8), (8,))))
    given = placed(dy, mesh, (Shard(0),)), placed(x, mesh, (Shard(0),))
    weight = placed(w, mesh, (Replicate(),))
    # Each must be a key of its own in the cache of shardings.
    for mask, has_weight in itertools.product(((True, False), (True, True), (False, True)), (True, False)):
        actual = ops.rms_norm_backward(*given, [8], weight if has_weight else None, output_mask=mask)
        expected = ops.rms_norm_backward(dy, x, [8], w if has_weight else None, output_mask=mask)
        assert [a is None for a in actual] == [e is None for e in expected]
        if mask[0]:
            assert_equal(actual[0], expected[0])
        if mask[1] and has_weight:
            assert actual[1].placements == (Partial(),)
            torch.testing.assert_close(actual[1].full_tensor(), expected[1])


@case(2)
def the_gradient_of_the_residual_is_added_wherever_it_is() -> None:
    mesh = mesh_of()
    x, dy, s, w = (cases.values(shape, torch.float32, i) for i, shape in enumerate((*[(5, 3, 8)] * 3, (8,))))
    weight = placed(w, mesh, (Replicate(),))
    anywhere = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
    for of_input, of_residual in itertools.product((Shard(0), Replicate()), (*anywhere, None)):
        given = [placed(t, mesh, (of_input,)) for t in (dy, x)]
        grad_residual = None if of_residual is None else placed(s, mesh, (of_residual,))
        (grad_input, grad_weight), sent = communicated(
            lambda: ops.rms_norm_backward(*given, [8], weight, grad_residual=grad_residual)  # noqa: B023
        )
        if of_residual in (None, of_input, Replicate()):
            assert sent == {}
        expected = ops.rms_norm_backward(dy, x, [8], w, grad_residual=s if of_residual else None)
        if of_residual == Shard(2) and of_input == Replicate():  # then parts of rows are
            assert grad_input.placements == (Shard(2),)
            torch.testing.assert_close(grad_input.full_tensor(), expected[0])
        else:
            assert_equal(grad_input, expected[0])
        torch.testing.assert_close(grad_weight.full_tensor(), expected[1])


@case(2, 4)
def gated_norms_are_sharded_by_rows_and_by_heads() -> None:
    mesh = mesh_of()
    shape, of_weight = (4, 5, 3, 8), (3, 8)
    x, gate, dy, w = (cases.values(s, torch.float32, i) for i, s in enumerate((shape, shape, shape, of_weight)))
    keywords = {"weight_offset": 1.0, "activation": "sigmoid"}
    for d, norm_before_gate in itertools.product((0, 1, 2), (True, False)):
        gating = {**keywords, "norm_before_gate": norm_before_gate}
        shard, on_weight = (Shard(d),), (Shard(0) if d == 2 else Replicate(),)
        given, of_gate = (placed(t, mesh, shard).requires_grad_() for t in (x, gate))
        weight, grad = placed(w, mesh, on_weight).requires_grad_(), placed(dy, mesh, shard)
        output, sent = communicated(lambda: gated_rms_norm(given, of_gate, 8, weight, cases.EPS, **gating))  # noqa: B023
        assert sent == {}
        assert output.placements == shard
        torch.testing.assert_close(output.full_tensor(), gated_rms_norm(x, gate, 8, w, cases.EPS, **gating))
        _, sent = communicated(lambda: output.backward(grad))  # noqa: B023
        assert sent == {}
        assert grad_of(given).placements == grad_of(of_gate).placements == shard
        assert grad_of(weight).placements == ((Shard(0),) if d == 2 else (Partial(),))
        expected = ops.gated_rms_norm_backward(dy, x, gate, [8], w, cases.EPS, **gating)
        for leaf, gradient in zip((given, of_gate, weight), expected, strict=True):
            torch.testing.assert_close(grad_of(leaf).full_tensor(), gradient)


@case(2, 4)
def rotated_norms_are_sharded_by_samples_by_tokens_and_by_heads() -> None:
    """cos and sin, whole or sharded as the tokens are, go along: nothing is communicated."""
    mesh = mesh_of()
    shape, of_weight = (4, 4, 4, 8), (4, 8)
    x, dy, w = (cases.values(s, torch.float32, i) for i, s in enumerate((shape, shape, of_weight)))
    keywords = {"weight_offset": 1.0, "interleaved": True, "rotary_dim": 6, "rotary_offset": 1}
    for d, (of_table, dim) in itertools.product((0, 1, 2), (((4, 4, 1, 3), 1), ((4, 1, 3), 0), ((1, 4, 1, 3), 1))):
        cos, sin = (cases.values(of_table, torch.float32, i) for i in (3, 4))
        expected = rms_norm_rope(x, cos, sin, 8, w, cases.EPS, **keywords)
        gradients = ops.rms_norm_rope_backward(dy, x, cos, sin, [8], w, cases.EPS, **keywords)
        for on_table in (Replicate(), *([Shard(dim)] if d == 1 else [])):
            tables = [placed(t, mesh, (on_table,)) for t in (cos, sin)]
            given = placed(x, mesh, (Shard(d),)).requires_grad_()
            weight = placed(w, mesh, (Shard(0) if d == 2 else Replicate(),)).requires_grad_()
            grad = placed(dy, mesh, (Shard(d),))
            output, sent = communicated(lambda: rms_norm_rope(given, *tables, 8, weight, cases.EPS, **keywords))  # noqa: B023
            assert sent == {}
            assert output.placements == (Shard(d),)
            torch.testing.assert_close(output.full_tensor(), expected)
            _, sent = communicated(lambda: output.backward(grad))  # noqa: B023
            assert sent == {}
            assert grad_of(given).placements == (Shard(d),)
            assert grad_of(weight).placements == ((Shard(0),) if d == 2 else (Partial(),))
            for leaf, gradient in zip((given, weight), gradients, strict=True):
                torch.testing.assert_close(grad_of(leaf).full_tensor(), gradient)


@case(2)
def any_placements_of_a_rotated_norm_give_the_same_values() -> None:
    mesh = mesh_of()
    choose = random.Random(2)
    shape = (3, 4, 8)
    for shape_of_table in ((3, 4, 8), (3, 1, 8), (4, 8), (8,)):
        whole = [
            cases.values(s, torch.float32, i) for i, s in enumerate((shape, shape, shape_of_table, shape_of_table))
        ]
        for _ in range(6):
            rows = [placed(t, mesh, placements_at_random(t.dim(), mesh, choose)) for t in whole]
            actual = ops.rms_norm_rope_backward(*rows, [8], None, cases.EPS)[0]
            torch.testing.assert_close(
                actual.full_tensor(), ops.rms_norm_rope_backward(*whole, [8], None, cases.EPS)[0]
            )


@case(2)
def any_placements_and_masks_of_a_gated_norm_give_the_same_values() -> None:
    mesh = mesh_of()
    choose = random.Random(1)
    shape, of_weight = (3, 5, 8), (5, 8)
    whole = [cases.values(size, torch.float32, i) for i, size in enumerate((shape, shape, shape, of_weight))]
    dy, x, gate, w = whole
    for mask in itertools.product((True, False), repeat=3):
        for has_weight in (True, False):
            *rows, weight = (placed(t, mesh, placements_at_random(t.dim(), mesh, choose)) for t in whole)
            gating = {"norm_before_gate": choose.random() < 0.5, "output_mask": mask}
            actual = ops.gated_rms_norm_backward(*rows, [8], weight if has_weight else None, cases.EPS, **gating)
            expected = ops.gated_rms_norm_backward(dy, x, gate, [8], w if has_weight else None, cases.EPS, **gating)
            assert [a is None for a in actual] == [e is None for e in expected]
            for gradient, wanted in zip(actual, expected, strict=True):
                if wanted is not None:
                    torch.testing.assert_close(gradient.full_tensor(), wanted)


def placements_at_random(dims: int, mesh: DeviceMesh, choose: random.Random) -> Placements:
    return tuple(choose.choice([Replicate(), Partial(), *map(Shard, range(dims))]) for _ in range(mesh.ndim))


@case(2, 4)
def any_placements_give_the_same_values() -> None:
    meshes = [mesh_of()] if dist.get_world_size() == 2 else [mesh_of(2, 2), mesh_of(2, 1, 2)]
    choose = random.Random(0)
    for seed in range(40):
        mesh = choose.choice(meshes)
        shape = tuple(choose.randint(1, 5) for _ in range(choose.randint(2, 4)))
        ns = normalized(shape, choose.randint(1, len(shape) - 1))
        of_weight = normalized(shape, choose.randint(len(ns), len(shape)))
        whole = [cases.values(size, torch.float32, seed + i) for i, size in enumerate((shape, shape, of_weight))]
        grads = [cases.values(shape, torch.float32, seed + i) for i in (3, 4)]
        given: list[Any] = [
            placed(t, mesh, placements_at_random(t.dim(), mesh, choose)).requires_grad_() for t in whole
        ]
        dys = [placed(t, mesh, placements_at_random(t.dim(), mesh, choose)) for t in grads]
        leaves = [t.requires_grad_() for t in whole]

        outputs = add_rms_norm(*given[:2], ns, given[2], cases.EPS)
        expected = add_rms_norm(*leaves[:2], ns, leaves[2], cases.EPS)
        described = seed, shape, ns, [t.placements for t in (*given, *dys)]
        for actual, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), wanted, msg=lambda m: f"{described}: {m}")  # noqa: B023
        gradients: tuple[Any, ...] = torch.autograd.grad(outputs, given, dys)
        for actual, wanted in zip(gradients, torch.autograd.grad(expected, leaves, grads), strict=True):
            torch.testing.assert_close(actual.full_tensor(), wanted, msg=lambda m: f"{described}: {m}")  # noqa: B023


@case(4)
def each_dimension_of_the_mesh_is_sharded_for_itself() -> None:
    mesh = mesh_of(2, 2)
    x, w = cases.values((5, 3, 8), torch.float32, 1), cases.values((8,), torch.float32, 2)
    for given, output, of_weight, count in (
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (Partial(), Partial()), 0),
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (Partial(), Partial()), 0),
        ((Shard(0), Replicate()), (Shard(0), Replicate()), (Partial(), Replicate()), 0),
        ((Partial(), Shard(1)), (Replicate(), Shard(1)), (Replicate(), Partial()), 1),
    ):
        weight = placed(w, mesh, (Replicate(), Replicate())).requires_grad_()
        y, sent = communicated(lambda: rms_norm(placed(x, mesh, given), 8, weight))  # noqa: B023
        setup = communicated(lambda: placed(x, mesh, given))[1]  # noqa: B023
        assert sum(sent.values()) - sum(setup.values()) == count, (given, sent, setup)
        assert y.placements == output
        assert_equal(y, rms_norm(x, 8, w))
        y.backward(placed(x, mesh, output))
        assert grad_of(weight).placements == of_weight
        torch.testing.assert_close(grad_of(weight).full_tensor(), ops.rms_norm_backward(x, x, [8], w)[1])


@case(2)
def dtypes_are_those_of_one_process() -> None:
    mesh = mesh_of()
    x, h = cases.values((3, 8), torch.bfloat16, 1), cases.values((3, 8), torch.float32, 2)
    w = cases.values((8,), torch.float64, 3)
    given = [placed(t, mesh, (Shard(0),)) for t in (x, h)]
    weight = placed(w, mesh, (Replicate(),))
    for actual, expected in zip(
        add_rms_norm(*given, 8, weight, weight_offset=1.0),
        add_rms_norm(x, h, 8, w, weight_offset=1.0),
        strict=True,
    ):
        assert_equal(actual, expected)


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    raise AssertionError("expected an error")


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
    x, y, h = (placed(cases.values((4, 8), torch.float32, i), mesh, (Shard(0),)) for i in range(3))
    w = placed(torch.zeros(8), mesh, (Replicate(),))
    for op, arguments, targets in (
        (ops.rms_norm.out, (x, [8]), {"out": y}),
        (ops.add_rms_norm.out, (x, x, [8]), {"out": y, "residual_out": h}),
        (ops.rms_norm_backward.out, (x, x, [8]), {"grad_input": y, "grad_weight": w}),
        (ops.gated_rms_norm.out, (x, x, [8]), {"out": y}),
        (ops.gated_rms_norm_backward.out, (x, x, x, [8]), {"grad_input": y, "grad_gate": h, "grad_weight": w}),
    ):
        assert "does not have a sharding strategy registered" in message_of(lambda: op(*arguments, **targets))  # noqa: B023


@case(2)
def the_module_takes_dtensors() -> None:
    mesh = mesh_of()
    norm = normops.RMSNorm(8)
    x = cases.values((3, 8), torch.float32)
    expected = norm(x)
    given = placed(x, mesh, (Shard(0),))
    assert _C.rms_norm(given, 8, None, None, 0.0, "gemma") is NotImplemented
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
    given = placed(x.detach(), mesh, (Shard(0),)), placed(w.detach(), mesh, (Replicate(),))
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
        # The key of the cache has no rank in it, the graph has (https://github.com/pytorch/pytorch/issues/188390).
        with torch._functorch.config.patch(enable_autograd_cache=False):
            output = function(given, residual, weight)
        assert output.placements == (Shard(0),)
        gradients.append((output, *torch.autograd.grad(output.sum(), (given, residual, weight))))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected.full_tensor())
