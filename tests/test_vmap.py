"""vmap: one call of an operator for the whole batch, with the results of one call per sample."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from calls import Calls
from torch import Tensor

import normops
from reference import cases
from reference.cases import EPS

ops = torch.ops.normops

SIZE = 5
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64))

SHAPES = pytest.mark.parametrize(
    ("shape", "normalized_shape", "weight_shape"),
    [
        ((3, 16), (16,), (16,)),
        ((16,), (16,), (16,)),
        ((2, 3, 4, 5), (4, 5), (4, 5)),
        ((2, 3, 4, 5), (5,), (4, 5)),
        ((3, 16), (16,), (3, 16)),
    ],
)

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


def batched(shape: tuple[int, ...], dim: int | None, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Of SIZE samples along ``dim``; None: one for all."""
    if dim is None:
        return cases.values(shape, dtype, seed).to(device)
    return cases.values((SIZE, *shape), dtype, seed).to(device).movedim(0, dim)


def samples(tensor: Tensor | None, dim: int | None) -> Iterator[Any]:
    for i in range(SIZE):
        yield tensor if tensor is None or dim is None else tensor.select(dim, i).contiguous()


def per_sample(op: Callable[..., Any], tensors: list[Tensor | None], dims: tuple[int | None, ...]) -> list[Any]:
    return [op(*sample) for sample in zip(*map(samples, tensors, dims), strict=True)]


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("dims", [d for d in product((0, 1, -1, None), (0, -1, None)) if d != (None, None)])
@SHAPES
def test_forward(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dims: tuple[int | None, int | None],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: str,
) -> None:
    """Equal bit for bit, also where each sample has its own weight."""
    input_dim, weight_dim = dims
    x = batched(shape, input_dim, dtype, 1, device)
    w = batched(weight_shape, weight_dim, weight_dtype, 2, device)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return normops.rms_norm(x, normalized_shape, w, EPS, weight_offset=0.5)

    with Calls() as calls:
        output = torch.vmap(norm, dims)(x, w)
    assert calls.names == ["rms_norm"]
    assert torch.equal(output, torch.stack(per_sample(norm, [x, w], dims)))

    if input_dim is not None:
        output = torch.vmap(lambda x: normops.rms_norm(x, normalized_shape), input_dim)(x)
        expected = [
            normops.rms_norm(sample, normalized_shape) for sample in samples(x, input_dim) if sample is not None
        ]
        assert torch.equal(output, torch.stack(expected))


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(0, 0, None), (0, None, None), (None, 1, None), (0, 1, 0), (None, None, 0)])
def test_add(dims: tuple[int | None, ...], residual_dtype: torch.dtype, device: str) -> None:
    x = batched((3, 16), dims[0], torch.bfloat16, 1, device)
    r = batched((3, 16), dims[1], residual_dtype, 2, device)
    w = batched((16,), dims[2], torch.float32, 3, device)

    def norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return normops.add_rms_norm(x, r, 16, w, EPS, weight_offset=0.5)

    with Calls() as calls:
        outputs = torch.vmap(norm, dims)(x, r, w)
    assert len(calls.names) == 1
    for actual, expected in zip(outputs, zip(*per_sample(norm, [x, r, w], dims), strict=True), strict=True):
        assert actual.dtype == expected[0].dtype
        assert torch.equal(actual, torch.stack(expected))


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    "dims", [(0, 0, None), (0, None, None), (None, 1, None), (0, 1, 0), (None, None, 0), (1, None, 1), (-1, -1, -1)]
)
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@SHAPES
def test_backward(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    dims: tuple[int | None, ...],
    has_residual: bool,
    mask: tuple[bool, bool],
    device: str,
) -> None:
    """Equal bit for bit, also where each sample has its own weight, or gradient of it."""
    dy = batched(shape, dims[0], dtype, 1, device)
    x = batched(shape, dims[1], dtype, 2, device)
    w = batched(weight_shape, dims[2], weight_dtype, 3, device)
    residual = batched(shape, dims[1], dtype, 4, device) if has_residual else None
    all_dims = (*dims, dims[1] if has_residual else None)

    def backward(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor | None) -> Any:
        return ops.rms_norm_backward(
            dy, x, normalized_shape, w, EPS, weight_offset=0.5, grad_residual=residual, output_mask=mask
        )

    out_dims: Any = tuple(0 if wanted else None for wanted in mask)
    with Calls() as calls:
        grad_input, grad_weight = torch.vmap(backward, all_dims, out_dims=out_dims)(dy, x, w, residual)
    assert calls.names == ["rms_norm_backward"]
    expected = zip(*per_sample(backward, [dy, x, w, residual], all_dims), strict=True)
    for wanted, actual, of_samples in zip(mask, (grad_input, grad_weight), expected, strict=True):
        assert (actual is not None) == wanted
        if wanted:
            assert actual.is_contiguous()
            assert torch.equal(actual, torch.stack(of_samples))


GATED_DIMS = pytest.mark.parametrize(
    "dims", [(0, 0, None), (0, None, None), (None, 1, None), (0, 1, 0), (None, None, 0), (-1, None, -1)]
)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
@GATED_DIMS
@SHAPES
def test_gated(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dims: tuple[int | None, ...],
    gate_dtype: torch.dtype,
    device: str,
) -> None:
    x = batched(shape, dims[0], torch.bfloat16, 1, device)
    gate = batched(shape, dims[1], gate_dtype, 2, device)
    w = batched(weight_shape, dims[2], torch.float32, 3, device)

    def norm(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        return normops.gated_rms_norm(x, gate, normalized_shape, w, EPS, weight_offset=0.5, activation="sigmoid")

    with Calls() as calls:
        output = torch.vmap(norm, dims)(x, gate, w)
    assert calls.names == ["gated_rms_norm"]
    expected = torch.stack(per_sample(norm, [x, gate, w], dims))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@GATED_DIMS
@SHAPES
def test_gated_backward(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dims: tuple[int | None, ...],
    norm_before_gate: bool,
    mask: tuple[bool, ...],
    device: str,
) -> None:
    dy = batched(shape, 0, torch.float32, 0, device)
    x, gate = (batched(shape, dim, torch.float32, 1 + i, device) for i, dim in enumerate(dims[:2]))
    w = batched(weight_shape, dims[2], torch.float32, 3, device)
    all_dims = (0, *dims)

    def backward(dy: Tensor, x: Tensor, gate: Tensor, w: Tensor) -> Any:
        gating = {"norm_before_gate": norm_before_gate, "output_mask": mask}
        return ops.gated_rms_norm_backward(dy, x, gate, normalized_shape, w, EPS, weight_offset=0.5, **gating)

    out_dims: Any = tuple(0 if wanted else None for wanted in mask)
    with Calls() as calls:
        gradients = torch.vmap(backward, all_dims, out_dims=out_dims)(dy, x, gate, w)
    assert calls.names == ["gated_rms_norm_backward"]
    expected = zip(*per_sample(backward, [dy, x, gate, w], all_dims), strict=True)
    for wanted, actual, of_samples in zip(mask, gradients, expected, strict=True):
        assert (actual is not None) == wanted
        if wanted:
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, torch.stack(of_samples), rtol=0, atol=0)


def test_nested(device: str) -> None:
    x = cases.values((2, 3, 4, 16), torch.float32, 1).to(device)
    w = cases.values((2, 3, 16), torch.float32, 2).to(device)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return normops.rms_norm(x, 16, w, EPS)

    expected = torch.stack([torch.stack([norm(x[i, j], w[i, j]) for j in range(3)]) for i in range(2)])
    assert torch.equal(torch.vmap(torch.vmap(norm))(x, w), expected)
    expected = torch.stack([torch.stack([norm(x[i, j], w[0, j]) for j in range(3)]) for i in range(2)])
    assert torch.equal(torch.vmap(torch.vmap(norm), (0, None))(x, w[0]), expected)
    assert torch.equal(
        torch.vmap(torch.vmap(norm, (1, 0), 1), (0, None))(x.transpose(1, 2), w[0]), expected.transpose(1, 2)
    )


def test_gradients_of_each_sample(device: str) -> None:
    """As differential privacy and influence functions need them, through a model, against one sample at a time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), normops.RMSNorm(16, EPS, weight_offset=1.0)).to(device)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = cases.values((SIZE, 3, 16), torch.float32).to(device)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.pow(3).sum()

    gradient = torch.func.grad(loss)
    actual = torch.vmap(gradient, (None, 0))(parameters, x)
    for i in range(SIZE):
        expected = gradient(parameters, x[i])
        torch.testing.assert_close({name: value[i] for name, value in actual.items()}, expected)
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(gradient, (None, 0)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), actual)


def test_an_ensemble(device: str) -> None:
    norms = [normops.RMSNorm(16, EPS).to(device) for _ in range(SIZE)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    parameters, buffers = torch.func.stack_module_state(norms)
    x = cases.values((3, 16), torch.float32).to(device)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(norms[0], (parameters, buffers), (x,))

    output = torch.vmap(call, (0, 0, None))(parameters, buffers, x)
    assert torch.equal(output, torch.stack([norm(x) for norm in norms]))


def test_batched_gradients(device: str) -> None:
    x = cases.values((3, 16), torch.float64, 1).to(device).requires_grad_()
    w = cases.values((16,), torch.float64, 2).to(device).requires_grad_()
    output = normops.rms_norm(x, 16, w, EPS)
    gradients = cases.values((SIZE, 3, 16), torch.float64, 3).to(device)
    actual = torch.autograd.grad(output, (x, w), gradients, is_grads_batched=True, retain_graph=True)
    for i in range(SIZE):
        expected = torch.autograd.grad(output, (x, w), gradients[i], retain_graph=True)
        torch.testing.assert_close([g[i] for g in actual], list(expected))


@pytest.mark.parametrize("weight_dim", [None, 0])
@pytest.mark.parametrize("input_dim", [0, 1])
def test_in_place(input_dim: int, weight_dim: int | None, device: str) -> None:
    def made() -> tuple[Tensor, Tensor, Tensor]:
        x, r = (batched((3, 16), input_dim, torch.bfloat16, seed, device) for seed in (1, 2))
        return x, r, batched((16,), weight_dim, torch.float32, 3, device)

    x, r, w = made()
    expected_sum = torch.vmap(lambda x, r, w: ops.add_rms_norm(x, r, [16], w, EPS), (input_dim, input_dim, weight_dim))(
        x, r, w
    )
    expected = torch.vmap(lambda x, w: ops.rms_norm(x, [16], w, EPS), (input_dim, weight_dim))(x, w)
    result = torch.vmap(lambda x, w: normops.rms_norm_(x, 16, w, EPS), (input_dim, weight_dim))(x, w)
    assert torch.equal(result, expected)
    assert torch.equal(x.movedim(input_dim, 0), expected)
    x, r, w = made()

    def add(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        normops.add_rms_norm_(x, r, 16, w, EPS)
        return x

    torch.vmap(add, (input_dim, input_dim, weight_dim))(x, r, w)
    for actual, wanted in zip((x, r), expected_sum, strict=True):
        assert torch.equal(actual.movedim(input_dim, 0), wanted)


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size: int, device: str) -> None:
    x, w = torch.ones(size, 3, 16, device=device), torch.ones(size, 16, device=device)
    for dims in ((0, 0), (0, None)):
        given = w if dims[1] == 0 else torch.ones(16, device=device)
        assert torch.vmap(lambda x, w: normops.rms_norm(x, 16, w), dims)(x, given).shape == (size, 3, 16)


ERRORS: tuple[tuple[Callable[..., Any], tuple[int | None, ...], tuple[tuple[int, ...], ...], str], ...] = (
    (
        lambda x: ops.rms_norm(x, [5, 4]),
        (0,),
        ((5, 4),),  # the batch must not pass for a normalized dimension
        "rms_norm: expected normalized_shape to be the last dimensions of input, whose shape is [4], but got [5, 4]",
    ),
    (
        lambda x, w: ops.rms_norm(x, [4], w),
        (0, 0),
        ((5, 3, 4), (5, 1)),
        "rms_norm: expected weight to have shape [4], the normalized_shape, or more of the last dimensions of input, "
        "whose shape is [3, 4], but got [1]",
    ),
    (
        lambda dy, x, w: ops.rms_norm_backward(dy, x, [4], w),
        (0, 0, 0),
        ((5, 1, 4), (5, 3, 4), (5, 4)),
        "rms_norm_backward: expected grad_output to have shape [3, 4], the shape of input, but got [1, 4]",
    ),
    (
        lambda x, gate: ops.gated_rms_norm(x, gate, [4]),
        (0, 0),
        ((5, 3, 4), (5, 1, 4)),
        "gated_rms_norm: expected gate to have shape [3, 4], the shape of input, but got [1, 4]",
    ),
    (
        lambda dy, x, gate: ops.gated_rms_norm_backward(dy, x, gate, [4], activation="relu"),
        (0, 0, None),
        ((5, 3, 4), (5, 3, 4), (3, 4)),
        'gated_rms_norm_backward: expected activation to be "silu", "swish" or "sigmoid", but got "relu"',
    ),
    (
        lambda x, w: ops.rms_norm_(x, [4], w),
        (None, 0),
        ((3, 4), (5, 4)),
        "rms_norm_: expected input, which is written to, to be batched like the other arguments under vmap, but got "
        "one tensor for all samples",
    ),
    (
        lambda x, r: ops.add_rms_norm_(x, r, [4]),
        (0, None),
        ((5, 3, 4), (3, 4)),
        "add_rms_norm_: expected residual, which is written to, to be batched like the other arguments under vmap, but "
        "got one tensor for all samples",
    ),
)


@pytest.mark.parametrize(("call", "dims", "shapes", "expected"), ERRORS, ids=lambda p: p if isinstance(p, str) else "")
def test_errors(
    call: Callable[..., Any], dims: tuple[int | None, ...], shapes: tuple[tuple[int, ...], ...], expected: str
) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.vmap(call, dims)(*(torch.ones(shape) for shape in shapes))
    assert str(raised.value).splitlines()[0] == expected
