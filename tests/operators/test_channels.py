"""Tests channel_rms_norm: rms_norm over one dimension, followed by an activation."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from assertions import assert_same_bits, assert_within, message_of
from channels import arguments, channels_last, results
from sampling import marked
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from traced_graphs import operators, trace

import normops
import normops.flops
from reference import oracle
from reference.cases import DTYPES, EPS, moved, values

ops = torch.ops.normops

# Channels: 1, few, multiples of the summed block and others, more than a span. Positions: too few for the kernels, few,
# one tile, several tiles, in samples that begin at a cache line or not.
SHAPES = (
    (2, 96, 9, 13),
    (3, 7, 20, 20),
    (1, 64, 512),
    (5, 16, 7, 7),
    (2, 1025, 8),
    (1, 2050, 300),
    (4, 1, 33),
    (3, 17, 2, 2),
    (2, 33, 700),
    (40, 3, 128),
    (64, 257),
)


def of_rows(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns the results of rms_norm or its backward on a copy with the dimension moved last, moved back."""
    dim, copy = given["dim"], {name: value for name, value in given.items() if name != "dim"}
    copy |= {
        tensor: given[tensor].movedim(dim, -1).contiguous() for tensor in ("input", "grad_output") if tensor in given
    }
    results = getattr(ops, name)(**copy)
    first, *others = results if isinstance(results, tuple) else (results,)
    return first.movedim(-1, dim).contiguous() if first.dim() > 1 else first, *others


def every_other(x: Tensor) -> Tensor:
    """Returns a copy of x that is strided in every dimension."""
    for dim in range(x.dim()):
        x = x.repeat_interleave(2, dim)
    return x[tuple([slice(None, None, 2)] * x.dim())]


def cut_out(x: Tensor) -> Tensor:
    """Returns a misaligned slice of a larger tensor, whose positions are contiguous."""
    return F.pad(x, (3, 5), value=torch.nan)[..., 3:-5]


def of_few_channels(x: Tensor) -> Tensor:
    """Returns a copy of x in every other channel of a larger tensor."""
    return x.repeat_interleave(2, 1)[:, ::2]


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.contiguous,
    every_other,
    cut_out,
    of_few_channels,
    channels_last,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_match_rms_norm(dtype: torch.dtype) -> None:
    """Outputs and gradients have the bits of rms_norm, for any layout and any dtype of parameters."""
    for index, (shape, layout) in enumerate(itertools.product(SHAPES, LAYOUTS)):
        given = arguments(shape, dtype, has_bias=index % 3 > 0)
        given["input"] = layout(given["input"])
        given["weight"] = None if index % 7 == 0 else given["weight"].to(DTYPES[index % len(DTYPES)])
        output = ops.channel_rms_norm(**given)
        assert output.is_contiguous()
        assert_same_bits([output], of_rows("rms_norm", given), (shape, layout))
        given["grad_output"] = layout(values(shape, dtype, 4))
        for mask in ([True] * 3, [False, True, True], [True, False, False], [True, index % 2 > 0, True]):
            given["output_mask"] = mask
            gradients = ops.channel_rms_norm_backward(**given)
            assert_same_bits(gradients, of_rows("rms_norm_backward", given), (shape, layout, mask))


ACTIVATIONS = ("silu", "swish", "sigmoid", "identity")
VALUES = [*itertools.product([*SHAPES, (9,), (2, 300, 1)], DTYPES, ACTIVATIONS)]
DIAGONAL = VALUES[:: len(DTYPES) * len(ACTIVATIONS) + 1]  # another dtype and activation for each shape


@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    [
        *marked(pytest.mark.triton, DIAGONAL),
        *marked(pytest.mark.full, [each for each in VALUES if each not in DIAGONAL]),
    ],
    ids=str,
)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, activation: str, device: str) -> None:
    named = "silu" if activation == "swish" else activation
    for index, weight_dtype in enumerate((dtype, torch.float32)):
        given = moved(device, arguments(shape, dtype, dim=0 if len(shape) == 1 else 1, has_bias=index > 0))
        given["weight"] = given["weight"].to(weight_dtype)
        given |= {"rounding": ("llama", "once")[index], "eps": (None, EPS)[index]}
        output = oracle.channel_rms_norm(**given, activation=named)
        given["grad_output"] = values(shape, dtype, 4).to(device)
        gradients = oracle.channel_rms_norm_backward(**given, activation=named)
        actual = (result if result.numel() else None for result in results(given, activation))
        assert_within(actual, (output, *gradients))


@pytest.mark.triton
def test_masked_gradients_are_empty(device: str) -> None:
    given = moved(device, arguments((2, 40, 11), torch.bfloat16))
    given |= {"grad_output": values((2, 40, 11), torch.bfloat16, 4).to(device), "activation": "silu"}
    every = ops.channel_rms_norm_backward(**given)
    left_out = torch.empty(0, dtype=torch.bfloat16, device=device)
    for mask in itertools.product((True, False), repeat=3):
        wanted = [gradient if is_wanted else left_out for is_wanted, gradient in zip(mask, every, strict=True)]
        assert_same_bits(ops.channel_rms_norm_backward(**given, output_mask=mask), wanted, mask)


@pytest.mark.triton
def test_bits_do_not_depend_on_batch_strides_or_alignment(device: str) -> None:
    """A position has the same bits alone and at any place among others."""
    shape, tensors = (2, 40, 48), ("input", "grad_output")
    given = moved(device, arguments(shape, torch.float32) | {"grad_output": values(shape, torch.float32, 4)})
    expected = results(given, "identity")[:2]
    for layout in LAYOUTS[1:]:
        strided = given | {name: layout(given[name]) for name in tensors}
        assert_same_bits(results(strided, "identity")[:2], expected, layout)
    strided = given | {name: every_other(given[name]) for name in ("weight", "bias")}
    assert_same_bits(results(strided, "identity")[:2], expected)
    part = given | {name: given[name][1:, :, 16:32].contiguous() for name in tensors}
    assert_same_bits(results(part, "identity")[:2], [result[1:, :, 16:32] for result in expected])
    samples = given | {name: given[name].mT.reshape(96, 40, 1) for name in tensors}
    assert_same_bits(results(samples, "identity")[:2], [result.mT.reshape(96, 40, 1) for result in expected])


@pytest.mark.parametrize(
    ("special", "index"), [(torch.nan, 13), (torch.inf, 13), (-torch.inf, 13), (torch.nan, -2), (torch.inf, -2)]
)
@pytest.mark.parametrize("where", ["input", "grad_output", "weight", "bias"])
@pytest.mark.triton
def test_nonfinite_values_change_only_dependent_results(where: str, special: float, index: int, device: str) -> None:
    """The sigmoid has slope 0 at infinities. Padding must not change the sums over positions."""
    shape = (2, 20, 30)
    given = arguments(shape, torch.float32) | {"grad_output": values(shape, torch.float32, 4)}
    given[where].view(-1)[index] = special
    actual = results(moved(device, given), "sigmoid")
    with np.errstate(all="ignore"):
        expected = oracle.channel_rms_norm_backward(**given, activation="sigmoid")
        del given["grad_output"]
        output = oracle.channel_rms_norm(**given, activation="sigmoid")
    assert_within(actual, (output, *expected), accepts_infinite_bounds=True)


@pytest.mark.triton
def test_zeros_have_the_right_sign_and_are_nan_without_eps(device: str) -> None:
    """Signs of zeros in the input and the weight multiply. With an eps of 0, only positions of zeros are NaN."""
    weight = torch.tensor([1.0, 1.0, -0.0, 0.0], device=device)
    x = torch.ones(1, 4, 70, device=device)
    x[:, 1], x[..., 5] = -0.0, -0.0
    given = {"input": x, "normalized_shape": [4], "weight": weight, "dim": -2}
    output = ops.channel_rms_norm(**given, eps=1e-6)
    assert output[0, :, 0].signbit().tolist() == [False, True, True, False]
    assert output[0, :, 5].signbit().tolist() == [True, True, False, True]
    assert (output[:, 1:] == 0).all()
    gradients = ops.channel_rms_norm_backward(grad_output=x, **given, eps=0.0)
    for result in (ops.channel_rms_norm(**given, eps=0.0), gradients[0]):
        assert result.isnan().any(1).nonzero().tolist() == [[0, 5]]
    x[..., 5] = 1.0
    assert ops.channel_rms_norm_backward(grad_output=x, **given, eps=0.0)[1].isfinite().all()


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("restored_threads")
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, activation: str) -> None:
    """Tensors are large enough for several threads and non-temporal stores; tiles may begin anywhere in a sample. Bits
    do not depend on other samples or positions either; the kernels support 8 positions or more."""
    for shape in ((1, 24, 240, 1000), (3, 130, 1999), (2, 512, 30, 30), (3, 512, 10, 10)):
        given = arguments(shape, dtype) | {"grad_output": values(shape, dtype, 4)}
        torch.set_num_threads(1)
        expected = results(given, activation)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert_same_bits(results(given, activation), expected, (shape, threads))
        part = given | {name: given[name][:1, ..., -9:] for name in ("input", "grad_output")}
        assert_same_bits(results(part, activation)[:2], [result[:1, ..., -9:] for result in expected[:2]], shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.triton_release
def test_out_and_in_place(dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        given = arguments((2, 40, 6, 11), dtype)
        expected = ops.channel_rms_norm(**given)
        target = layout(torch.full_like(given["input"], torch.nan))
        assert ops.channel_rms_norm(**given, out=target) is target
        assert_same_bits([target], [expected], layout)
        replaced = layout(given["input"].clone())
        assert ops.channel_rms_norm_(**given | {"input": replaced}) is replaced
        assert_same_bits([replaced], [expected], layout)
        given["grad_output"] = values((2, 40, 6, 11), dtype, 4)
        gradients = ops.channel_rms_norm_backward(**given)
        for name in ("input", "grad_output"):
            over = given | {name: layout(given[name].clone())}
            others = {"grad_weight": torch.empty(80, dtype=dtype)[::2], "grad_bias": torch.empty(40)}
            written = ops.channel_rms_norm_backward(**over, grad_input=over[name], **others)
            assert_same_bits(written, gradients, (layout, name))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.triton
def test_outputs_may_overwrite_a_parameter(name: str) -> None:
    """Normalizes a single position: all threads must read the parameter before any overwrites it."""
    given = arguments((40,), torch.float32, dim=0) | {"grad_output": values((40,), torch.float32, 4)}
    output, grad_input, *_ = results(given, "silu")
    over = given | {name: given[name].clone(), "activation": "silu"}
    del over["grad_output"]
    assert_same_bits([ops.channel_rms_norm(**over, out=over[name])], [output])
    over = given | {name: given[name].clone(), "activation": "silu"}
    others = {"grad_weight": torch.empty(40), "grad_bias": torch.empty(40)}
    mask = [True, False, False]
    written = ops.channel_rms_norm_backward(**over, output_mask=mask, **others, grad_input=over[name])
    assert_same_bits(written[:1], [grad_input])


def test_one_forward_one_backward() -> None:
    x = torch.randn(2, 6, 5, 3, requires_grad=True)
    norm = normops.RMSNorm(6, EPS, bias=True, dim=1, activation="silu")
    forward, backward = trace(norm, x)
    assert backward is not None
    assert [name for name in operators(forward) if "normops" in name] == ["normops.channel_rms_norm.default"]
    assert [name for name in operators(backward) if "normops" in name] == ["normops.channel_rms_norm_backward.default"]


def test_flops_and_recompute() -> None:
    x, norm = torch.randn(2, 6, 5, 3), normops.RMSNorm(6, EPS, bias=True, dim=1, activation="silu")
    with FlopCounterMode(display=False) as counter:
        output = norm(x.requires_grad_())
        output.backward(torch.ones_like(output))
    forward = 2 + 1 + 1 + 1 + 4
    backward = 2 + (2 + 3 + 1) + 3 + 1 + (1 + 1 + 1 + 3 + 3 + 1)
    assert counter.get_total_flops() == x.numel() * (forward + backward)
    with normops.recompute_norms():
        again = norm(x)
        loss = (again * again.detach()).sum()
    loss.backward()


def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.randn(6, 4), torch.randn(6, 3)], layout=torch.jagged)
    assert message_of(lambda: ops.channel_rms_norm(nested, [6], dim=-2)) == (
        "channel_rms_norm: expected dim to be -1, the last dimension of input, which is nested, but got -2"
    )
    rows = torch.nested.nested_tensor([torch.randn(4, 6), torch.randn(3, 6)], layout=torch.jagged)
    for sample, each in zip(normops.rms_norm(rows, 6, activation="silu").unbind(), rows.unbind(), strict=True):
        torch.testing.assert_close(sample, normops.rms_norm(each, 6, activation="silu"))


NO_DIM = "expected dim to be one of the 4 dimensions of input, counted from the end as -1, but got"
BROADCAST = (
    "to have shape [6], the normalized_shape, or before it dimensions that broadcast to those of input, whose shape is "
    "[2, 5, 3, 6]"
)
OTHER_SIZE = "expected normalized_shape to be [{}], the size of dimension -{} of input, but got {}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dim": 1}, f"{NO_DIM} 1"),
        ({"dim": -5}, f"{NO_DIM} -5"),
        ({"dim": -2}, OTHER_SIZE.format(5, 2, [6])),
        ({"normalized_shape": [6, 5]}, OTHER_SIZE.format(6, 3, [6, 5])),
        ({"weight": torch.ones(5)}, f"expected weight {BROADCAST}, but got [5]"),
        ({"bias": torch.ones(3, 1, 1, 6)}, f"expected bias {BROADCAST}, but got [3, 1, 1, 6]"),
        ({"activation": "relu"}, 'expected activation to be "identity", "silu", "swish" or "sigmoid", but got "relu"'),
    ],
)
def test_errors(changes: dict[str, Any], expected: str) -> None:
    given = arguments((2, 6, 5, 3), torch.float32) | changes
    assert message_of(lambda: ops.channel_rms_norm(**given)) == f"channel_rms_norm: {expected}"
    grad_output = torch.ones(given["input"].shape)
    message = message_of(lambda: ops.channel_rms_norm_backward(grad_output=grad_output, **given))
    assert message == f"channel_rms_norm_backward: {expected}"


def test_gradient_of_another_shape_raises() -> None:
    given = arguments((2, 6, 5, 3), torch.float32)
    message = message_of(lambda: ops.channel_rms_norm_backward(torch.ones(2, 6, 5), **given))
    expected = "expected grad_output to have shape [2, 6, 5, 3], the shape of input, but got [2, 6, 5]"
    assert message == f"channel_rms_norm_backward: {expected}"


@pytest.mark.full
@pytest.mark.usefixtures("restored_threads")
def test_target_off_a_cache_line() -> None:
    """Threads begin in the middle of a sample, where the target may be aligned although the next sample is not."""
    torch.set_num_threads(2)
    shape, channels = (5, 60_000, 48), 60_000  # large enough for non-temporal stores
    given: dict[str, Any] = {
        "grad_output": torch.randn(shape),
        "input": torch.randn(shape),
        "normalized_shape": [channels],
        "weight": torch.randn(channels),
        "dim": -2,
        "output_mask": [True, True, False],
    }
    expected = ops.channel_rms_norm_backward(**given)[0]
    memory = torch.empty(expected.numel() + 32)
    first = -(memory.data_ptr() // memory.itemsize) % 16 + 8
    target = memory[first : first + expected.numel()].view(shape)
    ops.channel_rms_norm_backward.out(**given, grad_input=target, grad_weight=torch.empty(channels))
    assert torch.equal(target, expected)
