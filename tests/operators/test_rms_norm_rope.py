"""Tests specific to rms_norm_rope: rotated columns, tables that heads share, gradients of angles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_within, message_of, same_bits
from sampling import pairwise
from torch import Tensor

import normops
from reference import cases, definitions
from reference.cases import DTYPES, EPS
from reference.operators import named

ops = torch.ops.normops

B, S, H, D = 2, 7, 3, 64


def angles(columns: int, dtype: torch.dtype, device: str, positions: int = S) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the shape [positions, columns], with a different frequency in each column."""
    frequencies = 10000 ** -(torch.arange(columns, dtype=torch.float64) / columns)
    table = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return table.cos().to(device, dtype), table.sin().to(device, dtype)


def query(dtype: torch.dtype, device: str, shape: tuple[int, ...] = (B, S, H, D)) -> tuple[Tensor, Tensor]:
    return (
        cases.values(shape, dtype, 1).to(device),
        (cases.values(shape[-1:], torch.float64, 2, 0.5) + 1).to(device, dtype),
    )


def assert_like_rms_norm(actual: Tensor, expected: Tensor, runs_cpu_kernels: bool) -> None:
    """Compares bits on the CPU; GPUs sum rotated rows in another order."""
    if runs_cpu_kernels:
        assert same_bits(actual, expected)
    else:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [D, 16, 40])
@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_pairs_have_the_bits_of_angles_of_columns(
    interleaved: bool, rotary_dim: int, dtype: torch.dtype, device: str, runs_cpu_kernels: bool
) -> None:
    """Columns that are not rotated are those of rms_norm."""
    x, w = query(dtype, device)
    cos, sin = (table[:, None] for table in angles(rotary_dim // 2, dtype, device))
    options: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    of_pairs = normops.rms_norm_rope(x, cos, sin, D, w, EPS, **options)
    wide_cos, wide_sin = (
        table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1) for table in (cos, sin)
    )
    assert same_bits(normops.rms_norm_rope(x, wide_cos, wide_sin, D, w, EPS, **options), of_pairs)
    plain = normops.rms_norm(x, D, w, EPS)[..., rotary_dim:]
    assert_like_rms_norm(of_pairs[..., rotary_dim:], plain, runs_cpu_kernels)


@pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["rms_norm_rope", "rms_norm_rope_backward"])
@pytest.mark.parametrize(
    ("cols", "rotary_dim", "offset"),
    [
        (512, 512, 0),
        (512, 64, 448),
        (80, 80, 0),
        (96, 48, 24),
        (100, 34, 1),
        (5, 2, 3),
        (1030, 1026, 3),
        (9001, 4500, 7),
    ],
)
def test_widths_and_offsets_are_within_bounds(
    cols: int, rotary_dim: int, offset: int, name: str, interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    """Tables have one angle for each column or for each pair; with 16-bit rows they have either dtype."""
    operator = named(name)
    x, dy, w = (
        cases.values(shape, dtype, i).to(device) for i, shape in enumerate(((5, 3, cols), (5, 3, cols), (cols,)))
    )
    given = {"grad_output": dy} if "grad_output" in operator.names else {}
    for columns in (rotary_dim, rotary_dim // 2):
        for table_dtype in {dtype, torch.float32 if dtype in cases.HALVES else dtype}:
            cos, sin = (cases.values((5, 1, columns), table_dtype, i, 0.5).to(device) for i in (3, 4))
            options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "rotary_offset": offset}
            arguments = {**given, "input": x, "cos": cos, "sin": sin, "normalized_shape": (cols,), "weight": w}
            arguments |= {"eps": EPS, "weight_offset": 1.0, **options}
            assert_within(operator.call(**arguments), operator.expected(arguments), f"{columns} {table_dtype}")


@pytest.mark.parametrize("shape", [(S, 1, D), (1, S, 1, D), (B, S, 1, D), (S, H, D), (D,), (1, 1, 1, D)], ids=str)
def test_tables_shared_by_heads_and_samples_are_not_copied(shape: tuple[int, ...], device: str) -> None:
    x, w = query(torch.float32, device)
    packed = torch.cat((x, x, x), -2)[:, :, H : 2 * H]
    cos, sin = (cases.values(shape, torch.float32, seed).to(device) for seed in (3, 4))
    expected = ops.rms_norm_rope(x, cos.expand(x.shape).contiguous(), sin.expand(x.shape).contiguous(), [D], w, EPS)
    transposed = [table.expand(x.shape).transpose(1, 2) for table in (cos, sin)]
    results = []
    with torch.profiler.profile() as profile:
        for rows, tables in ((packed, (cos, sin)), (packed.transpose(1, 2), transposed)):
            results.append(ops.rms_norm_rope(rows, *tables, [D], w, EPS))
            ops.rms_norm_rope_backward(rows, rows, *tables, [D], w, EPS)
    assert same_bits(results[0], expected)
    assert same_bits(results[1].transpose(1, 2), expected)
    ran = {event.name for event in profile.events()}
    assert not ran & {"aten::clone", "aten::contiguous"}


def test_cos_and_sin_may_have_different_strides(device: str) -> None:
    x, w = query(torch.float32, device)
    cos, sin = (table[:, None] for table in angles(D, torch.float32, device))
    expected = ops.rms_norm_rope(x, cos, sin, [D], w, EPS)
    wide_cos, wide_sin = (torch.cat((table, table + 1), -1)[..., :D] for table in (cos, sin))
    assert same_bits(ops.rms_norm_rope(x, cos, wide_sin, [D], w, EPS), expected)
    assert same_bits(ops.rms_norm_rope(x, wide_cos, sin, [D], w, EPS), expected)


@pytest.mark.parametrize(("shape", "of_table"), [((B, S, H, D), ()), ((2,) * 9 + (D,), (1, 2) * 4 + (1,))], ids=str)
def test_empty_tables_rotate_nothing(
    shape: tuple[int, ...], of_table: tuple[int, ...], device: str, runs_cpu_kernels: bool
) -> None:
    x, w = query(torch.float32, device, shape)
    nothing = torch.empty(*of_table, 0, device=device)
    unrotated = normops.rms_norm_rope(x, nothing, nothing, D, w, EPS, rotary_dim=0)
    assert_like_rms_norm(unrotated, normops.rms_norm(x, D, w, EPS), runs_cpu_kernels)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [D, D // 2])
@pytest.mark.parametrize("asked", [("cos",), ("sin",), ("cos", "sin", "input", "weight")], ids=str)
def test_gradients_of_angles_are_correct(asked: tuple[str, ...], columns: int, interleaved: bool, device: str) -> None:
    """Compares first and second derivatives with those of the definition in torch's operators."""
    x, w = query(torch.float64, device, (3, 2, D))
    cos, sin = (cases.values((3, 1, columns), torch.float64, seed).to(device) for seed in (3, 4))
    tensors = {"input": x, "cos": cos, "sin": sin, "weight": w}
    others: dict[str, Any] = {"normalized_shape": (D,), "eps": EPS, "interleaved": interleaved, "rotary_dim": D}

    def derivatives(norm: Callable[..., Tensor]) -> list[Tensor]:
        leaves = {name: tensor.detach().clone().requires_grad_(name in asked) for name, tensor in tensors.items()}
        wanted = [leaves[name] for name in asked]
        output = norm(**leaves, **others)
        first = torch.autograd.grad(output.pow(3).sum(), wanted, create_graph=True)
        second = torch.autograd.grad([g.square().sum() for g in first], wanted)
        return [*first, *second]

    torch.testing.assert_close(derivatives(normops.rms_norm_rope), derivatives(definitions.rms_norm_rope))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_for_any_sequence_length(dynamic: bool, device: str) -> None:
    """Tables have half the width, which does not determine rotary_dim; the sequence length varies."""
    w = torch.ones(D, device=device)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return normops.rms_norm_rope(x, cos.unsqueeze(1), sin.unsqueeze(1), D, w, EPS, rotary_dim=D)

    torch._dynamo.reset()
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True, dynamic=dynamic or None)
    for length in (7, 11, 1):
        x = cases.values((B, length, H, D), torch.float32).to(device)
        tables = angles(D // 2, torch.float32, device, length)
        assert same_bits(compiled(x, *tables), rotate(x, *tables))


def test_narrow_tables_require_rotary_dim(device: str) -> None:
    """Half the width may be a partial rotation or one angle for each pair: the error shows both spellings."""
    x, w = query(torch.float32, device)
    cos, sin = (table[:, None] for table in angles(D // 2, torch.float32, device))
    message = (
        f"rms_norm_rope: expected cos to have {D} columns, those of input, but got {D // 2}: pass rotary_dim={D // 2} "
        f"to rotate {D // 2} columns, or rotary_dim={D} or torch.cat((cos, cos), -1) if each column of cos is for a "
        "pair of columns"
    )
    assert message_of(lambda: normops.rms_norm_rope(x, cos, sin, D, w, EPS)) == message
    wide_cos, wide_sin = (torch.cat((table, table), -1) for table in (cos, sin))
    of_columns = normops.rms_norm_rope(x, wide_cos, wide_sin, D, w)
    assert same_bits(normops.rms_norm_rope(x, cos, sin, D, w, rotary_dim=D), of_columns)
