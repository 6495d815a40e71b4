"""gated_rms_norm keeps the promises of rms_norm: values, derivatives, graphs, memory, errors."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from assertions import message_of, same_bits
from gated_cases import GATINGS, GatedCase
from graphs import assert_one_operator_each_way
from test_errors import COMMON, assert_same_everywhere
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.nn import functional as F
from traced_graphs import TracedGraphs, operators, trace

import normops
from normops import _C
from reference import cases, oracle
from reference.cases import EPS, FEW_CASES, HALVES, Case, on

ops = torch.ops.normops
gated_rms_norm: Callable[..., Tensor] = normops.gated_rms_norm

gatings = pytest.mark.parametrize(("activation", "norm_before_gate"), GATINGS)


def keywords_of(activation: str, norm_before_gate: bool) -> dict[str, Any]:
    return {"activation": activation, "norm_before_gate": norm_before_gate}


GATES = (0.0, -0.0, 1e-30, 1.0, 1.278, 5.0, 10.0, 17.0, 50.0, 87.0, 88.0, 89.0, 95.0, 103.0, 104.0, 745.0, 1e4)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@gatings
def test_extreme_gates(activation: str, norm_before_gate: bool, dtype: torch.dtype, device: str) -> None:
    """Saturated either way, where exponentials over- and underflow; alone in a row, and beside others."""
    gates = torch.tensor([sign * gate for gate in GATES for sign in (1, -1)], dtype=torch.float64)
    rows = torch.cat([gates.expand(3, -1), gates.unsqueeze(1).expand(-1, len(gates))]).to(dtype)
    x, dy = (cases.values(tuple(rows.shape), dtype, seed, scale=1.0) for seed in range(2))
    w = cases.values(rows.shape[-1:], torch.float32, 3)
    gating = keywords_of(activation, norm_before_gate)
    tensors = [on(device, tensor) for tensor in (x, rows, w, dy)]
    output = ops.gated_rms_norm(*tensors[:2], w.shape, tensors[2], EPS, **gating)
    oracle.assert_within(output, oracle.gated_rms_norm(x, rows, tuple(w.shape), w, EPS, **gating))
    gradients = ops.gated_rms_norm_backward(tensors[3], *tensors[:2], w.shape, tensors[2], EPS, **gating)
    expected = oracle.gated_rms_norm_backward(dy, x, rows, tuple(w.shape), w, EPS, **gating)
    for name, actual, bounded in zip(expected._fields, gradients, expected, strict=True):
        assert actual.isfinite().all(), name
        assert bounded is not None
        oracle.assert_within(actual, bounded, name)


def test_subnormal_activations() -> None:
    """On CPU, where the bounds would let them be zero, too: a roundoff off, or the smallest number."""
    gate = torch.linspace(-104.0, -86.0, 4096)
    output = ops.gated_rms_norm(torch.ones(4096), gate, (4096,), None, 0.0, activation="sigmoid")
    exact = gate.double().sigmoid()
    assert ((output.double() - exact).abs() <= (exact * 2**-23).clamp(min=2**-149)).all()
    assert 0 < output.count_nonzero() < 4096


def test_swish_is_silu(device: str) -> None:
    x, gate = (cases.values((5, 64), torch.float32, seed).to(device) for seed in range(2))
    assert same_bits(gated_rms_norm(x, gate, 64, activation="swish"), gated_rms_norm(x, gate, 64))


def problem(dtype: torch.dtype, device: str, gate_dtype: torch.dtype | None = None) -> list[Tensor]:
    """input, gate, weight, as leaves."""
    shapes_and_dtypes = ((3, 7, 40), dtype), ((3, 7, 40), gate_dtype or dtype), ((40,), torch.float32)
    return [
        cases.values(shape, d, seed).to(device).requires_grad_() for seed, (shape, d) in enumerate(shapes_and_dtypes)
    ]


@pytest.mark.parametrize("needed", [mask for mask in product((True, False), repeat=3) if any(mask)])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
@gatings
def test_autograd(
    activation: str, norm_before_gate: bool, gate_dtype: torch.dtype, needed: tuple[bool, ...], device: str
) -> None:
    """One gated_rms_norm_backward, of what is needed."""
    keywords = {**keywords_of(activation, norm_before_gate), "weight_offset": 1.0}
    x, gate, w = (
        leaf.requires_grad_(n) for leaf, n in zip(problem(torch.bfloat16, device, gate_dtype), needed, strict=True)
    )
    dy = cases.values((3, 7, 40), torch.bfloat16, 5).to(device)
    gated_rms_norm(x, gate, 40, w, EPS, **keywords).backward(dy)
    with torch.no_grad():
        expected = ops.gated_rms_norm_backward(dy, x, gate, (40,), w, EPS, **keywords, output_mask=needed)
    for leaf, gradient in zip((x, gate, w), expected, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        if leaf.grad is not None:
            assert same_bits(leaf.grad, gradient)


def doubles(*shapes: tuple[int, ...], device: str) -> Iterator[Tensor]:
    for seed, shape in enumerate(shapes):
        yield cases.values(shape, torch.float64, seed, scale=0.5).to(device).requires_grad_()


@pytest.mark.parametrize("weight_shape", [None, (5,), (2, 5)], ids=str)
@gatings
def test_gradcheck(activation: str, norm_before_gate: bool, weight_shape: tuple[int, ...] | None, device: str) -> None:
    def norm(x: Tensor, gate: Tensor, w: Tensor | None = None) -> Tensor:
        keywords = {**keywords_of(activation, norm_before_gate), "weight_offset": 1.0}
        return gated_rms_norm(x, gate, 5, w, EPS, **keywords)

    shapes = [(3, 2, 5)] * 2 + ([] if weight_shape is None else [weight_shape])
    inputs = tuple(doubles(*shapes, device=device))
    assert torch.autograd.gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, inputs, check_batched_grad=True)


@pytest.mark.parametrize("weight_shape", [None, (2, 5)], ids=str)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
@gatings
def test_gradcheck_backward_operator(
    activation: str, norm_before_gate: bool, mask: tuple[bool, ...], weight_shape: tuple[int, ...] | None, device: str
) -> None:
    if mask == (False, False, True) and weight_shape is None:
        pytest.skip("computes nothing")

    def norm_backward(dy: Tensor, x: Tensor, gate: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
        keywords = {**keywords_of(activation, norm_before_gate), "weight_offset": 1.0, "output_mask": mask}
        gradients = ops.gated_rms_norm_backward(dy, x, gate, (5,), w, EPS, **keywords)
        return tuple(g for g in gradients if g is not None)

    shapes = [(2, 2, 5)] * 3 + ([] if weight_shape is None else [weight_shape])
    inputs = tuple(doubles(*shapes, device=device))
    assert torch.autograd.gradcheck(norm_backward, inputs, check_forward_ad=True)
    if mask == (True, True, True):
        assert torch.autograd.gradgradcheck(norm_backward, inputs)


def reference(x: Tensor, gate: Tensor, w: Tensor, *, activation: str, norm_before_gate: bool) -> Tensor:
    a = F.silu(gate) if activation == "silu" else F.sigmoid(gate)
    h = x if norm_before_gate else x * a
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * w
    return y * a if norm_before_gate else y


@pytest.mark.parametrize(
    "transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian], ids=lambda t: t.__name__
)
@gatings
def test_func_transforms(
    activation: str, norm_before_gate: bool, transform: Callable[..., Callable[..., object]], device: str
) -> None:
    tensors = [t.detach() for t in doubles((2, 3), (2, 3), (3,), device=device)]
    gating = keywords_of(activation, norm_before_gate)

    def fused(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, 3, w, EPS, **gating)

    actual, expected = (transform(f, argnums=(0, 1, 2))(*tensors) for f in (fused, partial(reference, **gating)))
    torch.testing.assert_close(actual, expected)


@gatings
def test_third_derivative_and_jvp_of_jvp(activation: str, norm_before_gate: bool, device: str) -> None:
    leaves = list(doubles((2, 3), (2, 3), (3,), device=device))
    gating = keywords_of(activation, norm_before_gate)

    def third(norm: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = norm(*leaves).pow(3).sum()
        for _ in range(2):
            loss = sum(g.square().sum() for g in torch.autograd.grad(loss, leaves, create_graph=True))  # type: ignore[assignment]
        return torch.autograd.grad(loss, leaves)

    def twice(norm: Callable[..., Tensor]) -> object:
        primals = tuple(leaf.detach() for leaf in leaves)
        tangents = tuple(t.flip(0) for t in primals)
        return torch.func.jvp(lambda *t: torch.func.jvp(norm, t, tangents)[1], primals, tangents)

    def fused(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, 3, w, EPS, **gating)

    for derivative in (third, twice):
        torch.testing.assert_close(derivative(fused), derivative(partial(reference, **gating)))


@pytest.mark.parametrize("dynamic", [False, True])
@gatings
def test_compiled_autograd(activation: str, norm_before_gate: bool, dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    tensors = [t.detach() for t in doubles((3, 5), (3, 5), (5,), device=device)]

    def gradients() -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        output = gated_rms_norm(leaves[0], leaves[1], 5, leaves[2], EPS, **keywords_of(activation, norm_before_gate))
        first = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        actual = gradients()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_opcheck(case: Case, device: str) -> None:
    for index, gate_dtype in enumerate({case.dtype, torch.float32} if case.dtype in HALVES else (case.dtype,)):
        gated_case = GatedCase(case, gate_dtype, *GATINGS[(FEW_CASES.index(case) + index) % 4])
        plain, dy = gated_case.arguments(device), on(device, case.grad_output())
        leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in (dy, *plain)]
        keywords = gated_case.keywords
        torch.library.opcheck(ops.gated_rms_norm.default, tuple(leaves[1:]), keywords)
        torch.library.opcheck(ops.gated_rms_norm_backward.default, tuple(leaves), keywords)
        targets = gated_case.targets(device)
        torch.library.opcheck(ops.gated_rms_norm.out, plain, {**keywords, "out": targets["grad_input"]})
        torch.library.opcheck(ops.gated_rms_norm_backward.out, (dy, *plain), {**keywords, **targets})


def traced(device: str, dynamic: bool) -> TracedGraphs:
    leaves = problem(torch.bfloat16, device, torch.float32)
    return trace(
        lambda x, gate, w: gated_rms_norm(x, gate, 40, w, 1e-5, activation="sigmoid", norm_before_gate=False),
        *leaves,
        dynamic=dynamic,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_operator_each_way(dynamic: bool, device: str) -> None:
    assert_one_operator_each_way(
        partial(traced, dynamic=dynamic),
        device,
        "normops.gated_rms_norm.default",
        "normops.gated_rms_norm_backward.default",
    )


@pytest.mark.parametrize("dynamic", [False, True])
@gatings
def test_inductor_equals_eager(activation: str, norm_before_gate: bool, dynamic: bool, device: str) -> None:
    """Input and gate are slices of one projection, as in the models."""
    torch._dynamo.reset()
    w = cases.values((64,), torch.float32, 3).to(device).requires_grad_()

    def block(projected: Tensor) -> Tensor:
        x, gate = (projected * 2).chunk(2, -1)
        return gated_rms_norm(x, gate, 64, w, EPS, **keywords_of(activation, norm_before_gate)) + 1

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        results = []
        for call in (block, compiled):
            projected = cases.values((rows, 128), torch.float32).to(device).requires_grad_()
            output = call(projected)
            results.append((output, *torch.autograd.grad(output.square().sum(), (projected, w))))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    class Gated(torch.nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return gated_rms_norm(x, gate, 8, activation="sigmoid")

    x, gate = (cases.values((3, 8), torch.float32, seed) for seed in range(2))
    program = torch.export.export(Gated(), (x, gate), strict=strict)
    for version in (program, program.run_decompositions()):
        assert operators(version.graph_module) == ["normops.gated_rms_norm.default"]
        assert same_bits(version.module()(x, gate), Gated()(x, gate))


def test_operators_that_write_compile_to_the_functional_operators(device: str) -> None:
    def write(x: Tensor, gate: Tensor, dx: Tensor, dg: Tensor, dw: Tensor) -> Tensor:
        ops.gated_rms_norm.out(x, gate, [8], None, 1e-5, activation="sigmoid", out=dx)
        ops.gated_rms_norm_backward.out(dx, x, gate, [8], dw.clone(), grad_input=x, grad_gate=dg, grad_weight=dw)
        return x + dg

    def arguments() -> list[Tensor]:
        shapes = *[(4, 8)] * 4, (8,)
        return [cases.values(shape, torch.float32, seed).to(device) for seed, shape in enumerate(shapes)]

    torch._dynamo.reset()
    eager, compiled = arguments(), arguments()
    expected = write(*eager)
    assert same_bits(torch.compile(write, fullgraph=True)(*compiled), expected)
    for actual, wanted in zip(compiled, eager, strict=True):
        assert same_bits(actual, wanted)
    ours = [name for name in operators(trace(write, *arguments()).forward) if name.startswith("normops.")]
    assert ours == ["normops.gated_rms_norm.default", "normops.gated_rms_norm_backward.default"]


ONES = torch.ones(2, 3, 4)
ERRORS: list[tuple[dict[str, Any], str]] = [
    *COMMON,
    (
        {"activation": "relu"},
        'expected activation to be "silu", "swish" or "sigmoid", but got "relu"',
    ),
    (
        {"activation": ""},
        'expected activation to be "silu", "swish" or "sigmoid", but got ""',
    ),
    (
        {"gate": torch.ones(2, 4, 4)},
        "expected gate to have shape [2, 3, 4], the shape of input, but got [2, 4, 4]",
    ),
    (
        {"gate": torch.ones(4)},
        "expected gate to have shape [2, 3, 4], the shape of input, but got [4]",
    ),
    (
        {"gate": ONES.double()},
        "expected gate to be float32, the dtype of input, or float16 or bfloat16, but got float64",
    ),
    (
        {"input": ONES.bfloat16(), "grad_output": ONES.bfloat16(), "gate": ONES.half()},
        "expected gate to be bfloat16, the dtype of input, or float32, but got float16",
    ),
    (
        {"input": ONES.double(), "grad_output": ONES.double()},
        "expected gate to be float64, the dtype of input, but got float32",
    ),
    (
        {"gate": torch.ones(2, 3, 4, device="meta")},
        "expected gate to be on cpu, the device of input, but got meta",
    ),
    (
        {"gate": torch.ones(2, 3, 4, dtype=torch.int64)},
        "expected gate to be float16, bfloat16, float32 or float64, but got int64",
    ),
]
BACKWARD_ERRORS: list[tuple[dict[str, Any], str]] = [
    *ERRORS,
    (
        {"grad_output": torch.ones(2, 4, 4)},
        "expected grad_output to have shape [2, 3, 4], the shape of input, but got [2, 4, 4]",
    ),
    (
        {"grad_output": ONES.half()},
        "expected grad_output to be float32, the dtype of input, but got float16",
    ),
    (
        {"grad_output": torch.ones(2, 3, 4, device="meta")},
        "expected grad_output to be on cpu, the device of input, but got meta",
    ),
]


def arguments_with(changes: dict[str, Any]) -> dict[str, Any]:
    arguments = {"grad_output": ONES, "input": ONES, "gate": ONES, "normalized_shape": [4], "weight": torch.ones(4)}
    return arguments | {"eps": 1e-5, "activation": "silu"} | changes


def forward_arguments_with(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments_with(changes).items() if name != "grad_output"}


@pytest.mark.parametrize(("changes", "expected"), ERRORS, ids=lambda p: p if isinstance(p, str) else "")
def test_errors(changes: dict[str, Any], expected: str) -> None:
    expected, arguments = f"gated_rms_norm: {expected}", forward_arguments_with(changes)
    assert_same_everywhere(ops.gated_rms_norm, arguments, expected)
    assert message_of(lambda: gated_rms_norm(**arguments)) == expected
    assert message_of(lambda: _C.check_gated_rms_norm(**arguments)) == expected


@pytest.mark.parametrize(("changes", "expected"), BACKWARD_ERRORS, ids=lambda p: p if isinstance(p, str) else "")
def test_backward_errors(changes: dict[str, Any], expected: str) -> None:
    expected, arguments = f"gated_rms_norm_backward: {expected}", arguments_with(changes)
    assert_same_everywhere(ops.gated_rms_norm_backward, arguments, expected)
    assert message_of(lambda: _C.check_gated_rms_norm_backward(**arguments)) == expected
