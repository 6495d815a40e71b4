"""Norms of jagged nested tensors equal norms of their values, forward and backward, eager and compiled."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from assertions import assert_same_bits
from torch import Tensor, nested
from torch.nn import functional as F

import normops
from normops import sharding
from reference import cases
from reference.cases import Case
from reference.operators import OPERATORS, Operator, OperatorCase

Results = tuple[Tensor, ...]


def jagged(device: str, seed: int = 0, columns: tuple[int, ...] = (8,)) -> Tensor:
    """Returns three sequences, one of them empty."""
    values = cases.values((6, *columns), torch.float32, seed).to(device)
    return nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 6], device=device)).detach()


def weight(device: str) -> Tensor:
    return cases.values((8,), torch.float32, 3).to(device).requires_grad_()


def values_of(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_nested_equals_operator_on_values(operator: Operator, backend: str | None, device: str) -> None:
    """Compares results, and gradients if the operator has a backward operator."""
    torch._dynamo.reset()
    case = Case((6, 8), torch.float32, weight_dtype=torch.float32, weight_offset=1.0, has_residual=True)
    arguments = OperatorCase(operator, case, operator.flags[-1], {}).arguments(device)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    offsets = jagged(device).offsets()  # type: ignore[attr-defined]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        return operator.results(operator.default(**dict(zip(tensors, given, strict=True)), **others))

    def derivatives(function: Callable[..., Results], is_nested: bool) -> list[Tensor]:
        leaves = [
            nested.nested_tensor_from_jagged(value, offsets).detach() if is_nested and name != "weight" else value
            for name, value in tensors.items()
        ]
        names = tensors.keys() - operator.tables if operator.gradient else ()
        wanted = [leaf.requires_grad_() for name, leaf in zip(tensors, leaves, strict=True) if name in names]
        outputs = [values_of(output) for output in function(*leaves)]
        losses = [output.square().sum() for output in outputs]
        return [*outputs, *map(values_of, torch.autograd.grad(losses, wanted) if wanted else ())]

    compiled = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    expected = derivatives(call, False)
    assert_same_bits(derivatives(compiled, True), expected)


def test_nested_matches_torch(device: str) -> None:
    x, w = jagged(device), weight(device)
    y = normops.rms_norm(x, 8, w, 1e-3)
    assert y.layout == torch.jagged
    assert (y + x).shape == x.shape  # the offsets are recognized as equal
    torch.testing.assert_close(y.values(), F.rms_norm(x, (8,), w, 1e-3).values())


def test_module_inference_and_transposed_heads(device: str) -> None:
    module = normops.RMSNorm(4).to(device)
    x = jagged(device, columns=(3, 4))
    with torch.inference_mode():
        assert torch.equal(module(x).values(), module(x.values()))
    assert torch.equal(module(x.transpose(1, 2)).transpose(1, 2).values(), module(x.values()))
    assert torch.equal(normops.rms_norm(x, (3, 4)).values(), normops.rms_norm(x.values(), (3, 4)))
    of_heads = cases.values((3, 4), torch.float32, 3).to(device)
    assert torch.equal(normops.rms_norm(x, 4, of_heads).values(), normops.rms_norm(x.values(), 4, of_heads))


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "input weight", "weight bias"])
def test_gradients_with_frozen_arguments(frozen: str, device: str) -> None:
    """Includes cases in which no requested gradient depends on the input."""
    b = cases.values((8,), torch.float32, 4).to(device).requires_grad_()
    given = {"input": jagged(device).requires_grad_(), "weight": weight(device), "bias": b}
    for name in frozen.split():
        given[name].requires_grad_(False)
    wanted = [tensor for tensor in given.values() if tensor.requires_grad]
    norm = partial(torch.ops.normops.rms_norm.default, normalized_shape=[8])
    y, values = norm(**given), norm(**{name: values_of(tensor) for name, tensor in given.items()})
    assert_same_bits(
        map(values_of, torch.autograd.grad(y.values().pow(2).sum(), wanted)),
        map(values_of, torch.autograd.grad(values.pow(2).sum(), wanted)),
    )


def test_gradients_through_rms_norm_stats(device: str) -> None:
    x = jagged(device).requires_grad_()

    def gradient(x: Tensor) -> Tensor:
        square_sum = sharding.rms_norm_stats(x, 8)
        y = sharding.rms_norm_from_stats(x, square_sum, 8, row_size=8)
        (gradient,) = torch.autograd.grad(values_of(y).pow(2).sum(), x)
        return gradient

    plain = x.values().detach().requires_grad_()
    assert_same_bits([gradient(x).values()], [gradient(plain)])


def test_mismatched_arguments_raise(device: str) -> None:
    x, w = jagged(device), weight(device)
    starts, lengths = torch.tensor([0, 1], device=device), torch.tensor([2, 1], device=device)
    holes = nested.narrow(cases.values((2, 4, 8), torch.float32).to(device), 1, starts, lengths, layout=torch.jagged)
    y = normops.rms_norm(holes, 8, w)
    assert torch.equal(normops.rms_norm(holes, 8, w, dim=-1).values(), y.values())
    with pytest.raises(RuntimeError, match=r"rms_norm_backward: expected input to be a nested tensor without holes"):
        y.values().sum().backward()
    with pytest.raises(RuntimeError, match=r"rms_norm: expected normalized_shape to be dimensions behind the ragged"):
        normops.rms_norm(x, (6, 8))
    with pytest.raises(RuntimeError, match=r"rms_norm: expected normalized_shape to be dimensions behind the ragged"):
        normops.rms_norm(x.transpose(1, 2), 8)
    with pytest.raises(
        RuntimeError, match=r"expected weight to have shape \[8\], the normalized_shape, or .* got \[7\]"
    ):
        normops.rms_norm(x, 8, w[:7])
    with pytest.raises(RuntimeError, match=r"rms_norm: expected weight to be nested as input is, or .* got \[6, 8\]"):
        normops.rms_norm(x, 8, w.expand(6, 8))
    other = nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, 1, 2, 6], device=device))
    with pytest.raises(RuntimeError, match="add_rms_norm: expected residual to have the sequences of input"):
        normops.add_rms_norm(x, other, 8)
    with pytest.raises(RuntimeError, match="gated_rms_norm: expected gate to have the sequences of input"):
        normops.gated_rms_norm(x, other, 8)
    with pytest.raises(RuntimeError, match="rms_norm_rope: expected cos to have the sequences of input"):
        normops.rms_norm_rope(x, other, other, 8)
    with pytest.raises(RuntimeError, match=r"rms_norm_rope: expected cos to be nested as input is, or .* got \[6, 8\]"):
        normops.rms_norm_rope(x, x.values(), x.values(), 8)
    for mixed in ((x, x.values()), (x.values(), x)):
        with pytest.raises(ValueError, match=r"add_rms_norm.*: expected (input|residual) to be a jagged layout"):
            normops.add_rms_norm(*mixed, 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_layout_raises() -> None:
    with pytest.raises(NotImplementedError, match="'normops::rms_norm' with arguments from the 'NestedTensorCPU'"):
        normops.rms_norm(nested.nested_tensor([torch.ones(2, 8)], layout=torch.strided), 8)
