"""Tensors that are more than dense memory: subclasses, lazy conjugates and negatives, names, other layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import message_of
from torch import Tensor, nn
from torch.testing._internal.logging_tensor import LoggingTensor, capture_logs
from torch.testing._internal.two_tensor import TwoTensor

import normops
from reference import cases
from reference.operators import DIFFERENTIABLE, of_rows

ops = torch.ops.normops


def values(seed: int = 0) -> Tensor:
    return cases.values((5, 8), torch.float32, seed)


NORMS = pytest.mark.parametrize("norm", [of_rows(operator, 8) for operator in DIFFERENTIABLE], ids=lambda f: f.__name__)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return normops.rms_norm(x, 8, w, cases.EPS)


def derivatives(call: Callable[..., Any], x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Returns outputs and gradients of the weight and of ``x``, which is passed as both tensor arguments."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    result = call(x, x, w)
    outputs = result if isinstance(result, tuple) else (result,)
    return *outputs, *torch.autograd.grad([output.square().sum() for output in outputs], (x, w))


@NORMS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("wraps_weight", [True, False])
def test_wrapper_subclass_is_preserved(norm: Callable[..., Any], backend: str | None, wraps_weight: bool) -> None:
    """The subclass defines __torch_dispatch__ and wraps two tensors, which are computed separately."""
    torch._dynamo.reset()
    call = norm if backend is None else torch.compile(norm, backend=backend, fullgraph=True)
    w = torch.linspace(0.5, 2, 8)
    parts = values(1), values(2)
    results = derivatives(call, TwoTensor(*parts), TwoTensor(w, w) if wraps_weight else w)
    for part, expected in zip(("a", "b"), (derivatives(norm, x, w) for x in parts), strict=True):
        for result, other in zip(results, expected, strict=True):
            assert isinstance(result, TwoTensor)
            assert torch.equal(getattr(result, part), other)


def test_wrapper_subclass_sees_whole_operators() -> None:
    with capture_logs() as logs:
        x = LoggingTensor(values(), requires_grad=True)
        y, h = normops.add_rms_norm(normops.rms_norm(x, 8), x, 8)
        (y.sum() + h.sum()).backward()
    called = [line for line in logs if "normops" in line]
    names = ("rms_norm", "add_rms_norm", "rms_norm_backward", "rms_norm_backward")
    assert len(called) == len(names)
    for line, name in zip(called, names, strict=True):
        assert f"normops.{name}.default" in line
    assert isinstance(x.grad, LoggingTensor)


class Refuses(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return NotImplemented


@pytest.mark.parametrize("position", [0, 1])
def test_subclass_may_reject_operators(position: int) -> None:
    arguments = [values(), torch.ones(8)]
    arguments[position] = arguments[position].as_subclass(Refuses)
    x, w = arguments
    for norm in (lambda: plain(x, w), lambda: normops.add_rms_norm(x, x, 8, w)):
        with pytest.raises(TypeError, match="rms_norm"):
            norm()


def test_parameter_subclasses_are_supported() -> None:
    class Scale(nn.Parameter):
        pass

    x, w = values(), torch.linspace(0.5, 2, 8)
    for weight in (Scale(w), nn.Buffer(w)):
        output = plain(x, weight)
        assert type(output) is Tensor
        assert torch.equal(output, plain(x, w))
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        plain(x, nn.UninitializedParameter())


def negative(tensor: Tensor) -> Tensor:
    """Returns the same numbers as memory of the opposite sign, with the negative bit set."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg()
    return lazy


@NORMS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_negative_bit_of_inputs_is_resolved(norm: Callable[..., Any], backend: str | None) -> None:
    torch._dynamo.reset()
    call = norm if backend is None else torch.compile(norm, backend=backend, fullgraph=True)
    x, w = values(), torch.linspace(0.5, 2, 8)
    expected = derivatives(norm, x, w)
    for arguments in ((negative(x), w), (x, negative(w)), (negative(x), negative(w))):
        for a, b in zip(derivatives(call, *arguments), expected, strict=True):
            assert torch.equal(a, b)


def test_negative_bit_of_a_target_is_resolved() -> None:
    x, out = values(), negative(values(1))
    expected = normops.rms_norm(x, 8)
    assert torch.equal(ops.rms_norm.out(x, [8], out=out), expected)
    assert torch.equal(out, expected)
    target = negative(x)
    assert torch.equal(normops.rms_norm_(target, 8), expected)
    assert torch.equal(target, expected)


def test_zero_tensors_are_supported() -> None:
    """Forward-mode derivatives pass zeros that have no memory."""
    zeros = torch._efficientzerotensor((5, 8))
    assert torch.equal(normops.rms_norm(zeros, 8, eps=1e-3), torch.zeros(5, 8))
    assert torch.equal(normops.rms_norm(values(), 8, torch._efficientzerotensor(8)), torch.zeros(5, 8))


@pytest.mark.skipif(not hasattr(Tensor, "refine_names"), reason="torch 2.13 has no named tensors any more")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_named_tensors_raise() -> None:
    named: Tensor = values().refine_names("batch", "channels")  # type: ignore[attr-defined]
    assert message_of(lambda: normops.rms_norm(named, 8)).startswith(
        "normops::rms_norm is not yet supported with named tensors"
    )


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "a dense (strided) tensor, but got layout Sparse"),
    "mkldnn": (Tensor.to_mkldnn, "a dense (strided) tensor, but got layout Mkldnn"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "float16, bfloat16, float32 or float64, but got qint8",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("convert", "expected"), OTHERS.values(), ids=OTHERS)
def test_other_layouts_raise(convert: Callable[[Tensor], Tensor], expected: str) -> None:
    x, w = values(), torch.ones(8)
    assert message_of(lambda: plain(convert(x), w)) == f"rms_norm: expected input to be {expected}"
    assert message_of(lambda: plain(x, convert(w))) == f"rms_norm: expected weight to be {expected}"
    residual = convert(x)
    message = message_of(lambda: normops.add_rms_norm(x, residual, 8))
    assert message.startswith("add_rms_norm: expected residual to be")
    with torch.inference_mode():
        assert message_of(lambda: plain(x, convert(w))) == f"rms_norm: expected weight to be {expected}"


def test_masked_tensors_raise() -> None:
    with pytest.raises(TypeError, match=r"normops\.rms_norm"):
        normops.rms_norm(torch.masked.masked_tensor(values(), values() > 0), 8)
