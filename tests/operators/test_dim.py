"""Tests rms_norm over a dimension other than the last."""

import copy
from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from assertions import message_of
from channels import channels_last
from torch import Tensor, nn

import normops
from normops.functional import ACTIVATIONS
from reference.cases import DTYPES, EPS, values

SHAPES = ((2, 6, 5, 3), (3, 8, 2, 3, 4), (4, 5, 7), (2, 1, 3, 3), (2, 6, 1, 1), (0, 4, 3, 3))


def moved(x: Tensor, dim: int, *parameters: Tensor | None, **others: Any) -> Tensor:
    """Returns the norm over the last dimension of a copy, moved back."""
    weight, bias = (each if each is None else each.flatten() for each in parameters)
    rows = x.movedim(dim, -1).contiguous()
    return normops.rms_norm(rows, x.shape[dim], weight, EPS, bias=bias, **others).movedim(-1, dim)


def every_other(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [Tensor.contiguous, channels_last, every_other], ids=lambda layout: layout.__name__)
def test_values(dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    for shape in SHAPES:
        x = layout(values(shape, dtype))
        for dim in (0, 1, -2, -1):
            size, behind = shape[dim], (-1 - dim) % len(shape)
            weight, bias = values((size,), dtype, 1), values((size, *[1] * behind), torch.float32, 2)
            for parameters in ((weight, None), (weight.view(1, *bias.shape), bias), (None, None)):
                output = normops.rms_norm(x, size, parameters[0], EPS, bias=parameters[1], dim=dim)
                assert torch.equal(output, moved(x, dim, *parameters))
    options: dict[str, Any] = {"rounding": "llama", "weight_offset": 1.0}
    output = normops.rms_norm(x := values((2, 6, 5), dtype), 6, weight := values((6, 1), dtype), EPS, dim=1, **options)
    assert torch.equal(output, moved(x, 1, weight, None, **options))


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields tensors of all orders of dimensions in memory, and memory formats."""
    for order in permutations(range(len(shape))):
        yield torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    if len(shape) == 4:
        yield torch.randn(shape).to(memory_format=torch.channels_last)
    yield torch.randn(shape).repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("shape", list(product((0, 1, 2), repeat=4)), ids=str)
def test_strides_are_those_of_fake_tensors(shape: tuple[int, ...]) -> None:
    """Both are contiguous, or contiguous with ``dim`` moved to the end, also where a dimension has size 0 or 1."""
    for x in layouts(shape):
        on_meta = torch.empty_strided(x.size(), x.stride(), device="meta")
        for dim in (0, 1, 2):
            of_contiguous = torch.empty(x.shape, device="meta").stride()
            of_moved = torch.empty(x.movedim(dim, -1).shape, device="meta").movedim(-1, dim).stride()
            is_moved = x.stride(dim) == 1 != x.stride(-1)
            expected = of_moved if is_moved else of_contiguous
            activation: Any
            for activation in (None, "silu"):
                fake = normops.rms_norm(on_meta, shape[dim], dim=dim, activation=activation)
                real = normops.rms_norm(x, shape[dim], dim=dim, activation=activation)
                module = normops.RMSNorm(shape[dim], dim=dim, activation=activation)
                assert {fake.stride(), real.stride(), module(x).stride()} == {expected}, (x.stride(), dim)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_strides_of_one_position(memory_format: torch.memory_format) -> None:
    """Inductor asserts the strides that the fake tensor had."""
    model = nn.Sequential(normops.RMSNorm(8, dim=1), nn.ConvTranspose2d(8, 6, 4))
    x = torch.randn(2, 8, 1, 1).to(memory_format=memory_format)
    compiled = torch.compile(model, options={"layout_optimization": False})
    torch.testing.assert_close(compiled(x), model(x))


def test_sizes_that_depend_on_data() -> None:
    """The path depends on two strides, not on the sizes of the other dimensions."""
    mask = torch.arange(6) % 2
    image, rows = torch.randn(6, 8, 5, 3), torch.randn(6, 8)
    norms: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: normops.rms_norm(x, 8, dim=1), image),
        (lambda x: normops.rms_norm(x.to(memory_format=torch.channels_last), 8, dim=1), image),
        (lambda x: normops.rms_norm(x.t(), 8, dim=0), rows),
        (lambda x: normops.rms_norm(x.t().contiguous(), 8, dim=0), rows),
        (lambda x: normops.rms_norm(x[None], x.shape[0], dim=1), rows),
    ]
    for norm, x in norms:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            torch._dynamo.reset()

            def selected(x: Tensor, mask: Tensor) -> Tensor:
                return norm(x[mask.nonzero().squeeze(1)])  # noqa: B023  called at once

            compiled = torch.compile(selected, backend="aot_eager", fullgraph=True)
            actual, expected = compiled(x, mask), selected(x, mask)
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


def test_channels_last_input_is_not_copied() -> None:
    x, weight = torch.randn(2, 6, 5, 3).to(memory_format=torch.channels_last), torch.randn(6)
    with torch.profiler.profile() as profile:
        normops.rms_norm(x, 6, weight, dim=1)
    assert not {"aten::clone", "aten::contiguous", "aten::copy_"} & {event.name for event in profile.events()}


def test_derivatives() -> None:
    for layout in (Tensor.contiguous, channels_last):
        x = layout(torch.randn(2, 4, 3, 2, dtype=torch.float64)).requires_grad_()
        weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 1, 1), (4,)))

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return normops.rms_norm(x, 4, weight, EPS, bias=bias, dim=1)

        assert torch.autograd.gradcheck(norm, (x, weight, bias), check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(norm, (x, weight, bias))


def test_vmap_compile_export_meta_and_autocast() -> None:
    x, weight = torch.randn(3, 2, 6, 5, 4), torch.randn(6, 1, 1)

    def norm(x: Tensor) -> Tensor:
        return normops.rms_norm(x, 6, weight, EPS, dim=1)

    assert torch.equal(torch.vmap(norm)(x), torch.stack([norm(each) for each in x]))
    assert torch.equal(torch.compile(norm, fullgraph=True)(x[0]), norm(x[0]))
    program = torch.export.export(normops.RMSNorm(6, EPS, dim=1), (x[0],), strict=True)
    assert torch.equal(program.module()(x[0]), norm_of_ones := normops.rms_norm(x[0], 6, eps=EPS, dim=1))
    assert normops.rms_norm(x[0].to("meta"), 6, dim=1).shape == norm_of_ones.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x[0]).dtype == torch.float32


NO_DIM = "expected dim to be one of 4 dimensions of input, but got"
OTHER_SIZE = "expected normalized_shape to be [{}], the size of dimension {} of input, but got {}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dim": 4}, f"{NO_DIM} 4"),
        ({"dim": -5}, f"{NO_DIM} -5"),
        ({"dim": 2}, OTHER_SIZE.format(5, 2, [6])),
        ({"normalized_shape": [6, 5]}, OTHER_SIZE.format(6, 1, [6, 5])),
        ({"weight": torch.ones(1, 6, 1)}, "expected weight to have shape [6] or [6, 1, 1], but got [1, 6, 1]"),
        ({"bias": torch.ones(6, 5, 1)}, "expected bias to have shape [6] or [6, 1, 1], but got [6, 5, 1]"),
        ({"activation": "relu"}, 'expected activation to be "silu", "swish", "sigmoid" or None, but got \'relu\''),
    ],
)
def test_errors(changes: dict[str, Any], expected: str) -> None:
    arguments: dict[str, Any] = {"input": torch.randn(2, 6, 5, 3), "normalized_shape": 6, "dim": 1} | changes
    assert message_of(lambda: normops.rms_norm(**arguments)) == f"rms_norm: {expected}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype) -> None:
    """Norms of rows use PyTorch's activations; other norms apply the activation before rounding the result."""
    x = values((2, 6, 5, 3), dtype)
    for name, function in ACTIVATIONS.items():
        activation: Any = name
        of_rows = normops.rms_norm(x, (5, 3), eps=EPS, activation=activation)
        assert torch.equal(of_rows, function(normops.rms_norm(x, (5, 3), eps=EPS)))
        assert torch.equal(
            normops.rms_norm(x, 3, eps=EPS, dim=-1, activation=activation), function(moved(x, -1, None, None))
        )
        output = normops.rms_norm(channels_last(x), 6, eps=EPS, dim=1, activation=activation)
        assert torch.equal(output, function(moved(x, 1, None, None)))
        assert output.is_contiguous(memory_format=torch.channels_last)
        wide = torch.promote_types(dtype, torch.float32)
        unrounded = function(normops.rms_norm(x.to(wide), 6, eps=EPS, dim=1)).to(dtype)
        torch.testing.assert_close(normops.rms_norm(x, 6, eps=EPS, dim=1, activation=activation), unrounded)


def test_module() -> None:
    norm = normops.RMSNorm(6, EPS, bias=True, dim=1)
    with torch.no_grad():
        norm.weight.normal_()
        assert norm.bias is not None
        norm.bias.normal_()
    x = torch.randn(2, 6, 5, 3)
    assert torch.equal(norm(x), moved(x, 1, norm.weight, norm.bias))
    assert repr(norm) == "RMSNorm((6,), eps=0.01, elementwise_affine=True, bias=True, dim=1)"
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))
    with pytest.raises(ValueError, match=r"^dim: expected None in a module with group_size=3, but got 1$"):
        normops.RMSNorm(6, group_size=3, dim=1)
    with pytest.raises(RuntimeError, match="RMSNorm: expected no residual with a bias, a dim or an activation"):
        normops.RMSNorm(6, dim=1)(x, x)
