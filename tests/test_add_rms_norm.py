"""add_rms_norm keeps the promises of rms_norm: values, bits, derivatives, graphs, errors."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from add_cases import AddCase, Problem, problem, targets_of
from assertions import assert_same_bits, message_of, same_bits
from graphs import assert_one_operator_each_way
from torch import Tensor
from torch._dynamo import compiled_autograd
from traced_graphs import TracedGraphs, trace

import normops
from normops import _C
from reference import cases
from reference.cases import EPS, FEW_CASES, HALVES, Case, on
from reference.operators import ADD_RMS_NORM, RMS_NORM_BACKWARD, OperatorCase, cases_of
from reference.oracle import exact_sum

ops = torch.ops.normops


@pytest.mark.parametrize("case", [c for c in cases_of(ADD_RMS_NORM) if not c.dtypes], ids=str)
def test_the_output_is_the_norm_of_the_rounded_sum(case: OperatorCase, device: str) -> None:
    """Bit for bit, where it has the dtype of the sum."""
    output, residual_out = case.results(device)
    arguments = case.arguments(device) | {"input": residual_out}
    del arguments["residual"]
    assert same_bits(output, ops.rms_norm(**arguments))


@pytest.mark.parametrize("case", [c for c in cases_of(RMS_NORM_BACKWARD) if c.dtypes], ids=str)
def test_backward_of_a_wider_sum(case: OperatorCase, device: str) -> None:
    """rms_norm_backward with a float32 input takes the gradient of an output of 16 bits as it is."""
    widened = case.arguments(device)["grad_output"].float()
    assert_same_bits(case.results(device), case.results(device, grad_output=widened))


@pytest.mark.parametrize(
    "needed", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("used", ["both", "output", "residual_out"])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autograd(residual_dtype: torch.dtype, used: str, needed: tuple[bool, ...], device: str) -> None:
    """Any of the outputs used, any of the inputs differentiated: one rms_norm_backward, if any."""
    tensors = problem((3, 7, 40), torch.bfloat16, device, residual_dtype)
    leaves = Problem(*(t.clone().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)))
    output, residual_out = normops.add_rms_norm(
        leaves.input, leaves.residual, 40, leaves.weight, EPS, weight_offset=1.0
    )
    grad_output = cases.values((3, 7, 40), torch.bfloat16, 5).to(device)
    grad_residual_out = cases.values((3, 7, 40), residual_dtype, 6).to(device)
    chosen = {
        "both": [(output, grad_output), (residual_out, grad_residual_out)],
        "output": [(output, grad_output)],
        "residual_out": [(residual_out, grad_residual_out)],
    }[used]
    torch.autograd.backward([tensor for tensor, _ in chosen], [gradient for _, gradient in chosen])

    expected_sum, expected_weight = grad_residual_out, None
    if used != "residual_out":
        h = exact_sum(tensors.input, tensors.residual)
        grad_residual = grad_residual_out if used == "both" else None
        expected_sum, expected_weight = ops.rms_norm_backward(
            grad_output, h, (40,), tensors.weight, EPS, weight_offset=1.0, grad_residual=grad_residual
        )
    expected = (expected_sum.to(torch.bfloat16), expected_sum, expected_weight)
    for leaf, reference, is_needed in zip(leaves, expected, needed, strict=True):
        if not is_needed or reference is None:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert same_bits(leaf.grad, reference)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [5, 64, 769, 4096, 40003])
@pytest.mark.usefixtures("restored_threads")
def test_neither_batch_nor_layout_nor_threads_show(cols: int, dtype: torch.dtype, device: str) -> None:
    x, residual, w = problem((37 if cols < 9000 else 6, cols), dtype, device)
    rows = len(x)
    torch.set_num_threads(1)
    expected = ops.add_rms_norm(x, residual, (cols,), w, EPS)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        for begin, end in ((0, rows), (0, 1), (rows - 1, rows), (2, 5)):
            parts = ops.add_rms_norm(x[begin:end].clone(), residual[begin:end].clone(), (cols,), w, EPS)
            for actual, reference in zip(parts, expected, strict=True):
                assert same_bits(actual, reference[begin:end])
        for layout in (
            lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),
            lambda t: torch.nn.functional.pad(t, (0, 3), value=torch.nan)[:, : t.shape[1]],
            lambda t: t.t().contiguous().t(),
        ):
            for actual, reference in zip(
                ops.add_rms_norm(layout(x), layout(residual), (cols,), w, EPS), expected, strict=True
            ):
                assert same_bits(actual, reference)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_nan_of_any_payload_stays_one(dtype: torch.dtype, device: str) -> None:
    """A float32 residual brings payloads that 16 bits do not have."""
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for index in range(4):
        residual = torch.where(torch.arange(20) == index, payloads[index], torch.ones(20)).to(device)
        output, residual_out = ops.add_rms_norm(torch.ones(20, dtype=dtype, device=device), residual, (20,), None, 0.0)
        assert output.isnan().all()
        assert residual_out.isnan().nonzero().flatten().tolist() == [index]
        dy = torch.ones(20, dtype=dtype, device=device)
        assert ops.rms_norm_backward(dy, residual, (20,), None, 0.0)[0].isnan().all()


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_opcheck(case: Case, device: str) -> None:
    for add_case in (AddCase(case, case.dtype), AddCase(case, torch.float32)):
        if add_case.residual_dtype != case.dtype and case.dtype not in HALVES:
            continue
        input, residual, weight = on(device, case.input()), on(device, add_case.residual()), on(device, case.weight())
        assert input is not None
        assert residual is not None
        shape, keywords = case.normalized_shape, {"weight_offset": case.weight_offset}
        leaves = [None if t is None else t.detach().requires_grad_() for t in (input, residual, weight)]
        torch.library.opcheck(ops.add_rms_norm.default, (*leaves[:2], shape, leaves[2], case.eps), keywords)
        targets = targets_of(case, case.dtype, add_case.residual_dtype, device)
        torch.library.opcheck(ops.add_rms_norm.out, (input, residual, shape, weight, case.eps), keywords | targets)
        replaced = (input.clone(), residual.clone(), shape, weight, case.eps)
        torch.library.opcheck(ops.add_rms_norm_.default, replaced, keywords)


def doubles(*shapes: tuple[int, ...], device: str) -> Iterator[Tensor]:
    for seed, shape in enumerate(shapes):
        yield cases.values(shape, torch.float64, seed).to(device).requires_grad_()


@pytest.mark.parametrize("weight_shape", [(5,), (2, 5)])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
def test_gradcheck(used: tuple[int, ...], has_weight: bool, weight_shape: tuple[int, ...], device: str) -> None:
    def norm(x: Tensor, residual: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs = ops.add_rms_norm(x, residual, (5,), w, EPS, weight_offset=1.0)
        return tuple(outputs[index] for index in used)

    inputs = tuple(doubles((3, 2, 5), (3, 2, 5), weight_shape, device=device))[: 2 + (has_weight and 0 in used)]
    assert torch.autograd.gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, inputs)


@pytest.mark.parametrize(
    "transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian], ids=lambda t: t.__name__
)
def test_func_transforms(transform: Callable[..., Callable[..., object]], device: str) -> None:
    x, residual, w = (t.detach() for t in doubles((2, 3), (2, 3), (3,), device=device))

    def reference(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * w, h

    def fused(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return normops.add_rms_norm(x, residual, 3, w, EPS)

    results = [transform(f, argnums=(0, 1, 2))(x, residual, w) for f in (fused, reference)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_autograd(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    tensors = [t.detach() for t in doubles((3, 5), (3, 5), (5,), device=device)]

    def gradients() -> list[Tensor | None]:
        a, b, c = (t.clone().requires_grad_() for t in tensors)
        output, residual_out = normops.add_rms_norm(a, b, 5, c, EPS)
        loss = output.pow(3).sum() + residual_out.square().sum()
        (first,) = torch.autograd.grad(loss, a, create_graph=True)
        first.square().sum().backward()
        return [a.grad, b.grad, c.grad]

    expected = gradients()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        actual = gradients()
    torch.testing.assert_close(actual, expected)


def test_a_sum_changed_after_the_forward_is_noticed(device: str) -> None:
    x, residual, _ = problem((4, 8), torch.float32, device)
    output, residual_out = normops.add_rms_norm(x.requires_grad_(), residual, 8)
    with torch.no_grad():
        residual_out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_graph_is_freed_with_its_outputs(device: str) -> None:
    """The node saves one of its outputs, which must not keep itself alive."""
    x, residual, _ = problem((4, 8), torch.float32, device)
    released: list[bool] = []
    output, residual_out = normops.add_rms_norm(x.requires_grad_(), residual, 8)
    assert output.grad_fn is not None
    metadata: dict[str, object] = output.grad_fn.metadata  # type: ignore[assignment]
    metadata["mark"] = type("Mark", (), {"__del__": lambda self: released.append(True)})()
    del metadata, output, residual_out
    assert released


def traced(device: str, dynamic: bool, residual_dtype: torch.dtype = torch.bfloat16) -> TracedGraphs:
    x, residual, w = problem((6, 3, 16), torch.bfloat16, device, residual_dtype)
    leaves = [t.requires_grad_() for t in (x, residual, w)]
    return trace(
        lambda x, residual, w: normops.add_rms_norm(x, residual, 16, w, 1e-5, weight_offset=0.5),
        *leaves,
        dynamic=dynamic,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_operator_each_way(dynamic: bool, device: str) -> None:
    assert_one_operator_each_way(partial(traced, dynamic=dynamic), device, "normops.add_rms_norm.default")


def test_a_wider_residual_adds_a_conversion_of_the_gradient(device: str) -> None:
    assert_one_operator_each_way(
        partial(traced, dynamic=False, residual_dtype=torch.float32),
        device,
        "normops.add_rms_norm.default",
        others=["aten._to_copy.default"],
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_equals_eager(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    norm = normops.RMSNorm(64, eps=1e-5).to(device)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        y, residual = norm(x * 2, residual)
        return torch.nn.functional.silu(y) + residual

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        results = []
        for call in (block, compiled):
            norm.zero_grad()
            x, residual, _ = problem((rows, 64), torch.float32, device)
            call(x.requires_grad_(), residual.requires_grad_()).square().sum().backward()
            assert norm.weight.grad is not None
            results.append([x.grad, residual.grad, norm.weight.grad.clone()])
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_module(dtype: torch.dtype, device: str) -> None:
    x, residual, w = problem((3, 8), dtype, device)
    norm = normops.RMSNorm(8, 1e-3, weight_offset=1.0, device=device)
    with torch.no_grad():
        norm.weight.copy_(w)
    expected = normops.add_rms_norm(x, residual, 8, w, 1e-3, weight_offset=1.0)
    for actual, reference in zip(norm(x, residual), expected, strict=True):
        assert same_bits(actual, reference)


def test_ggml_report(device: str) -> None:
    """ggml's rms_norm_back was wrong where its output shared memory with an input (ggml#1491)."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=device)
    zero = torch.zeros_like(x)
    leaf = x.clone().requires_grad_()
    normops.add_rms_norm(leaf, zero, 4, eps=1e-4)[0].backward(x)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), torch.tensor([[0.000799, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)
    expected = ops.add_rms_norm(x, zero, (4,), None, 1e-4)
    for out, residual_out in ((x, zero), (zero, x)):
        a, b = x.clone(), zero.clone()
        targets = {"out": a if out is x else b, "residual_out": a if residual_out is x else b}
        for actual, reference in zip(ops.add_rms_norm.out(a, b, (4,), None, 1e-4, **targets), expected, strict=True):
            assert same_bits(actual, reference)


ERRORS: list[tuple[dict[str, Tensor], str]] = [
    (
        {"residual": torch.ones(2, 4, 4)},
        "expected residual to have shape [2, 3, 4], the shape of input, but got [2, 4, 4]",
    ),
    (
        {"residual": torch.ones(4)},
        "expected residual to have shape [2, 3, 4], the shape of input, but got [4]",
    ),
    (
        {"residual": torch.ones(2, 3, 4, dtype=torch.float64)},
        "expected residual to be float32, the dtype of input, but got float64",
    ),
    (
        {"residual": torch.ones(2, 3, 4, dtype=torch.bfloat16)},
        "expected residual to be float32, the dtype of input, but got bfloat16",
    ),
    (
        {"input": torch.ones(2, 3, 4, dtype=torch.bfloat16), "residual": torch.ones(2, 3, 4, dtype=torch.float16)},
        "expected residual to be bfloat16, the dtype of input, or float32, but got float16",
    ),
    (
        {"residual": torch.ones(2, 3, 4, device="meta")},
        "expected residual to be on cpu, the device of input, but got meta",
    ),
    (
        {"residual": torch.ones(2, 3, 4, dtype=torch.int64)},
        "expected residual to be float16, bfloat16, float32 or float64, but got int64",
    ),
    (
        {"weight": torch.ones(2, 4)},
        "expected weight to have shape [4], the normalized_shape, or more of the last dimensions of input, whose shape "
        "is [2, 3, 4], but got [2, 4]",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), ERRORS, ids=lambda p: p if isinstance(p, str) else "")
def test_errors(changes: dict[str, Tensor], expected: str) -> None:
    t = {"input": torch.ones(2, 3, 4), "residual": torch.ones(2, 3, 4), "weight": torch.ones(4)} | changes
    arguments = (t["input"], t["residual"], [4], t["weight"])
    for name, op in (
        ("add_rms_norm", ops.add_rms_norm),
        ("add_rms_norm", normops.add_rms_norm),
        ("add_rms_norm", _C.check_add_rms_norm),
        ("add_rms_norm_", ops.add_rms_norm_),
    ):
        assert message_of(partial(op, *arguments)) == f"{name}: {expected}"
    torch._dynamo.reset()
    compiled = torch.compile(ops.add_rms_norm, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError) as raised:
        compiled(*arguments)
    assert expected in str(raised.value)


def test_grad_output_may_be_narrower_alone() -> None:
    x = torch.ones(3, 4)
    expected = "rms_norm_backward: expected grad_output to be float32, the dtype of input, or float16 or bfloat16"
    assert message_of(lambda: ops.rms_norm_backward(x.double(), x, [4])) == f"{expected}, but got float64"
    half = x.half()
    expected = "rms_norm_backward: expected grad_output to be float16, the dtype of input, but got"
    assert message_of(lambda: ops.rms_norm_backward(x, half, [4])) == f"{expected} float32"
    assert message_of(lambda: ops.rms_norm_backward(x.bfloat16(), half, [4])) == f"{expected} bfloat16"
