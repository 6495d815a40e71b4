"""The passes for torch.compile fuse norms and the rotary embeddings that follow them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adopted_graphs import compiled_with_passes, norms
from profiles import operators_run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import normops

BATCH, SEQUENCE, HEADS, COLUMNS, EPS = 2, 5, 3, 16, 1e-3

Rotated = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""A function of a projection [B, S, H * D], a weight, and cos and sin [B, S, D]."""


def normed(x: Tensor, w: Tensor) -> Tensor:
    """Returns queries as in Qwen3, [B, H, S, D]."""
    return F.rms_norm(x.view(*x.shape[:2], HEADS, COLUMNS), (COLUMNS,), w, EPS).transpose(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, turned: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    return (x * cos.unsqueeze(1)) + (turned(x) * sin.unsqueeze(1))


def qwen(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(normed(x, w), cos, sin)


def gemma4(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, cos, sin = normed(x, w).transpose(1, 2), cos.unsqueeze(2), sin.unsqueeze(2)
    return ((q * cos) + (rotate_half(q) * sin)).transpose(1, 2)


def glm4_moe(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = normed(x, w)
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.cat([rotated(q[..., :8], cos, sin), q[..., 8:]], dim=-1)


def glm(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, cos, sin = normed(x, w), cos.unsqueeze(1), sin.unsqueeze(1)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rot, rest = q[..., : cos.shape[-1]], q[..., cos.shape[-1] :]
    return torch.cat([(rot * cos) + (rotate_pairs(rot) * sin), rest], dim=-1)


def cohere(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = normed(x, w)
    return rotated(q.float(), cos, sin, rotate_pairs).to(dtype=x.dtype)


def deepseek_v4(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = normed(x, w)
    cos, sin = (table[..., :3].repeat_interleave(2, dim=-1).unsqueeze(1) for table in (cos, sin))
    nope, rope = q[..., :-6], q[..., -6:]
    return torch.cat([nope, ((rope.float() * cos) + (rotate_pairs(rope).float() * sin)).to(x.dtype)], dim=-1)


def handwritten(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = x.view(*x.shape[:2], HEADS, COLUMNS).float()
    q = (q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w.float())).type_as(x)
    return rotated(q.transpose(1, 2), cos, sin)


def flat_rows(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = F.rms_norm(x.reshape(x.shape[0] * x.shape[1] * HEADS, COLUMNS), (COLUMNS,), w, EPS)
    return rotated(q.view(*x.shape[:2], HEADS, COLUMNS).permute(0, 2, 1, 3), cos, sin)


def chunks(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (q := normed(x, w)).chunk(2, dim=-1)
    return sin[:, None].mul(torch.cat([second.neg(), first], -1)) + cos[:, None] * q


def narrowed(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = normed(x, w)
    turned = torch.cat((-q.narrow(-1, 8, 8), torch.split(q, 8, dim=-1)[0]), 3)
    return torch.add(torch.mul(turned, sin.unsqueeze(1)), torch.mul(q, cos.unsqueeze(1)))


def by_normops(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = normops.rms_norm(x.view(*x.shape[:2], HEADS, COLUMNS), COLUMNS, w.expand(HEADS, COLUMNS), EPS)
    return rotated(q.transpose(1, 2), cos, sin)


def in_a_checkpoint(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda *arguments: qwen(*arguments).sin(), x, w, cos, sin, use_reentrant=False)
    return result


JOINED: dict[str, tuple[Rotated, str]] = {
    "qwen": (qwen, "interleaved: False, rotary_dim: None, rotary_offset: 0"),
    "gemma4": (gemma4, "interleaved: False, rotary_dim: None, rotary_offset: 0"),
    "glm4_moe": (glm4_moe, "interleaved: False, rotary_dim: None, rotary_offset: 0"),
    "glm": (glm, "interleaved: True, rotary_dim: 16, rotary_offset: 0"),
    "cohere": (cohere, "interleaved: True, rotary_dim: None, rotary_offset: 0"),
    "deepseek_v4": (deepseek_v4, "interleaved: True, rotary_dim: 6, rotary_offset: 10"),
    "transposed before": (
        lambda x, w, cos, sin: rotated(
            F.rms_norm(x.view(*x.shape[:2], HEADS, COLUMNS).transpose(1, 2), (COLUMNS,), w, EPS), cos, sin
        ).to(x.dtype),
        "rotary_offset: 0",
    ),
    "handwritten": (handwritten, "weight_offset: 1.0"),
    "flat rows": (flat_rows, "rotary_offset: 0"),
    "copied between": (lambda x, w, cos, sin: rotated(normed(x, w).contiguous(), cos, sin), "rotary_offset: 0"),
    "chunks": (chunks, "interleaved: False"),
    "narrowed": (narrowed, "interleaved: False"),
    "tables of fewer dimensions": (
        lambda x, w, cos, sin: (q := normed(x, w)) * cos[0] + rotate_half(q) * sin[0],
        "rotary_offset: 0",
    ),
    "by normops": (by_normops, "rotary_offset: 0"),
    "in a checkpoint": (in_a_checkpoint, ""),
    # Keys that are concatenated with others along the sequence.
    "cached": (
        lambda x, w, cos, sin: torch.cat([x.view(BATCH, HEADS, SEQUENCE, COLUMNS), qwen(x, w, cos, sin)], dim=-2),
        "rotary_offset: 0",
    ),
}


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns inputs with different columns of cos and sin, which exposes reads of wrong columns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQUENCE, HEADS * COLUMNS, generator=generator)
    w = torch.rand(COLUMNS, generator=generator) + 0.5
    cos, sin = torch.randn(2, BATCH, SEQUENCE, COLUMNS, generator=generator)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), cos.to(dtype), sin.to(dtype)


def results(fn: Rotated, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the outputs and the gradients."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    out = fn(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    gradients = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], gradients)]


def assert_close(actual: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert (a.double() - b.double()).abs().max() <= bound * b.double().abs().max()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", JOINED)
@pytest.mark.covering(core=1)
def test_rotations_fuse_into_one_operator_each_way(case: str, dtype: torch.dtype, dynamic: bool) -> None:
    (fn, found), inputs = JOINED[case], problem(dtype)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    # The originals round the norm, the products and their sum to 16 bits.
    assert_close(results(compiled, inputs), results(fn, inputs), 3e-6 if dtype == torch.float32 else 3e-2)
    assert norms(graphs.forward) == ["rms_norm_rope"]
    recomputed = ["rms_norm_rope"] if fn is in_a_checkpoint else []
    assert norms(graphs.backward) == [*recomputed, "rms_norm_rope_backward"]
    assert found in graphs.of_dynamo[1]
    leftovers = {"neg", "mul", "add", "stack", "repeat_interleave", "clone"}
    assert leftovers.isdisjoint(name.split(".")[1] for name in graphs.forward if name.startswith("aten."))


def test_fused_result_is_rounded_once() -> None:
    x, w, cos, sin = problem(torch.bfloat16)
    compiled, _ = compiled_with_passes(qwen)
    q = x.view(BATCH, SEQUENCE, HEADS, COLUMNS)
    expected = normops.rms_norm_rope(q, cos[:, :, None], sin[:, :, None], COLUMNS, w, EPS)
    assert torch.equal(compiled(x, w, cos, sin), expected.transpose(1, 2))
    assert not torch.equal(qwen(x, w, cos, sin), expected.transpose(1, 2))


def test_float32_tables_with_16_bit_rows_fuse() -> None:
    x, w, _, _ = problem(torch.bfloat16)
    inputs = (x, w, *problem(torch.float32)[2:])
    compiled, graphs = compiled_with_passes(cohere)
    assert_close(results(compiled, inputs), results(cohere, inputs), 3e-2)
    assert norms(graphs.forward) == ["rms_norm_rope"]


def test_slice_of_a_packed_projection_is_read_in_place() -> None:
    def packed(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, _, _ = x.view(BATCH, SEQUENCE, HEADS, COLUMNS).unbind(2)
        return rotated(F.rms_norm(q[:, :, None], (COLUMNS,), w, EPS).transpose(1, 2), cos, sin)

    inputs = problem(torch.float32)
    compiled, graphs = compiled_with_passes(packed)
    assert_close(results(compiled, inputs), results(packed, inputs), 3e-6)
    assert norms(graphs.forward) == ["rms_norm_rope"]
    assert not [name for name in graphs.forward if "clone" in name]


def test_queries_and_keys_share_tables() -> None:
    def both(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = normed(x, w), normed(x * 2, w + 1)
        cos, sin = (table.unsqueeze(1)[..., :8].repeat_interleave(2, dim=-1) for table in (cos, sin))
        return (q * cos) + (rotate_pairs(q) * sin), (k * cos) + (rotate_pairs(k) * sin)

    inputs = problem(torch.float32)
    compiled, graphs = compiled_with_passes(both)
    assert_close(results(compiled, inputs), results(both, inputs), 3e-6)
    assert norms(graphs.forward) == ["rms_norm_rope"] * 2
    assert "repeat_interleave" not in graphs.of_dynamo[1]


def write_first(table: Tensor) -> Tensor:
    repeated = table[..., :8].repeat_interleave(2, dim=-1)
    table.zero_()
    return repeated


def test_repeated_tables_keep_their_values_if_tables_are_written() -> None:
    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = write_first(cos * 1), write_first(sin * 1)
        return rotated(normed(x, w), cos, sin, rotate_pairs)

    inputs = problem(torch.float32)
    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, inputs), results(fn, inputs), 3e-6)
    assert "interleaved: True, rotary_dim: None" in graphs.of_dynamo[1]


@pytest.mark.parametrize("written", ["input", "weight", "cos", "sin"])
def test_arguments_written_after_the_rotation_are_copied(written: str) -> None:
    """Without a copy, autograd would raise, because the operator saves the tensor that is written."""

    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, w, cos, sin = x.float() * 1, w.float() * 1, cos * 1, sin * 1
        y = normops.rms_norm(x.view(*x.shape[:2], HEADS, COLUMNS), COLUMNS, w, EPS).transpose(1, 2)
        y = rotated(y, cos, sin)
        {"input": x, "weight": w, "cos": cos, "sin": sin}[written].add_(1)
        return y, x * w.sum() + cos.sum() + sin.sum()

    inputs = problem(torch.float32)
    expected = results(lambda *leaves: unwritten(fn, written, *leaves), inputs)
    compiled, graphs = compiled_with_passes(fn)
    assert_close(results(compiled, inputs), expected, 3e-6)
    assert norms(graphs.forward) == ["rms_norm_rope"]
    assert graphs.of_dynamo[1].count("target=clone") == 1


def unwritten(fn: Rotated, written: str, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    after = {"input": x, "weight": w, "cos": cos, "sin": sin}
    after[written] = after[written] + 1
    x_after, w_after, cos_after, sin_after = after.values()
    return qwen(x, w, cos, sin), x_after * w_after.sum() + cos_after.sum() + sin_after.sum()


def turned_by(turned: Callable[[Tensor], Tensor]) -> Rotated:
    return lambda x, w, cos, sin: rotated(normed(x, w), cos, sin, turned)


def half_used_elsewhere(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    first, second = (q := normed(x, w)).chunk(2, dim=-1)
    return (q * cos[:, None]) + (torch.cat([-second, first], -1) * sin[:, None]), second


def of_another(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = normed(x, w), normed(x, w * 2)
    return (q * cos[:, None]) + (rotate_half(k) * sin[:, None])


def norm_across_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Normalizes across heads, like Olmo2."""
    q = F.rms_norm(x, (HEADS * COLUMNS,), w.repeat(HEADS), EPS)
    return rotated(q.view(BATCH, SEQUENCE, -1, COLUMNS).transpose(1, 2), cos, sin)


def norm_afterwards(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Normalizes after the rotation, like Hunyuan."""
    q = x.view(*x.shape[:2], HEADS, COLUMNS).transpose(1, 2)
    return F.rms_norm(rotated(q, cos, sin), (COLUMNS,), w, EPS)


def of_other_rows(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (q * cos[:, :1]) + (rotate_half(q) * sin[:, :1])


def columns_transposed(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = F.rms_norm(x[:, :5, :COLUMNS].repeat(1, 4, 1)[:, :COLUMNS], (COLUMNS,), w, EPS).transpose(1, 2)
    return of_other_rows(q, cos, sin)


def reshaped_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Has one weight per head."""
    q = normops.rms_norm(x.view(BATCH, SEQUENCE, HEADS, COLUMNS), COLUMNS, torch.stack([w, w * 2, w * 3]), EPS)
    return of_other_rows(q.view(BATCH, SEQUENCE * HEADS, COLUMNS), cos, sin)


def strided_rows(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Has rows that cannot be viewed in the shape of the result without a copy."""
    q = F.rms_norm(x.view(BATCH, SEQUENCE, HEADS, COLUMNS)[:, :, :2], (COLUMNS,), w, EPS)
    return of_other_rows(q.reshape(BATCH, SEQUENCE * 2, COLUMNS), cos, sin)


def written_between(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    with torch.no_grad():
        h, cos = x * 1, cos * 1
        q = normed(h, w)
        h.zero_()
        cos.add_(1)
        return rotated(q, cos, sin)


def norm_written_between(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = normed(x, w)
    q.mul_(2)
    return rotated(q, cos, sin)


def tables_written_between(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    with torch.no_grad():
        q, cos = normed(x, w), cos * 1
        product = q * cos[:, None]
        cos.zero_()
        return product + rotate_half(q) * cos[:, None]


def without_gradient_in_part(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = normed(x, w)
    with torch.no_grad():
        turned = rotate_half(q) * sin[:, None]
    return (q * cos[:, None]) + turned


def norm_without_gradient(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    with torch.no_grad():
        q = normed(x, w)
    return rotated(q, cos, sin) * x.sum() * w.sum()


LEFT: dict[str, Rotated] = {
    "used elsewhere": lambda x, w, cos, sin: rotated(q := normed(x, w), cos, sin) + q.sum(),
    "half used elsewhere": half_used_elsewhere,
    "other signs": turned_by(lambda x: torch.cat((x[..., 8:], -x[..., :8]), dim=-1)),
    "halves in place": turned_by(lambda x: torch.cat((-x[..., :8], x[..., 8:]), dim=-1)),
    "unequal halves": turned_by(lambda x: torch.cat((-x[..., 6:], x[..., :6]), dim=-1)),
    "pairs and halves": turned_by(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)),
    "stacked elsewhere": turned_by(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-2).flatten(-2)),
    "detached in part": turned_by(lambda x: rotate_half(x.detach())),
    "of another": of_another,
    "subtracted": lambda x, w, cos, sin: (q := normed(x, w)) * cos[:, None] - rotate_half(q) * sin[:, None],
    "scaled": lambda x, w, cos, sin: torch.add(
        (q := normed(x, w)) * cos[:, None], rotate_half(q) * sin[:, None], alpha=2
    ),
    "rest before": lambda x, w, cos, sin: torch.cat(
        [(q := normed(x, w))[..., 8:], rotated(q[..., :8], cos[..., :8], sin[..., :8])], dim=-1
    ),
    "rest missing": lambda x, w, cos, sin: rotated(normed(x, w)[..., :8], cos[..., :8], sin[..., :8]),
    "rest in part": lambda x, w, cos, sin: torch.cat(
        [rotated((q := normed(x, w))[..., :8], cos[..., :8], sin[..., :8]), q[..., 9:]], dim=-1
    ),
    "one column of the tables": lambda x, w, cos, sin: rotated(normed(x, w), cos[..., :1], sin[..., :1]),
    "tables that widen": lambda x, w, cos, sin: rotated(normed(x[:1], w), cos, sin),
    "tables with gradients": lambda x, w, cos, sin: rotated(normed(x, w), cos * w, sin * w),
    "tables of two dtypes": lambda x, w, cos, sin: rotated(normed(x, w).float(), cos, sin.float()).to(x.dtype),
    "wider result": lambda x, w, cos, sin: rotated(normed(x, w), cos.double(), sin.double()),
    "norm across heads": norm_across_heads,
    "norm afterwards": norm_afterwards,
    "columns transposed": columns_transposed,
    "reshaped heads": reshaped_heads,
    "strided rows": strided_rows,
    "written between": written_between,
    "norm written between": norm_written_between,
    "tables written between": tables_written_between,
    "without gradient in part": without_gradient_in_part,
    "norm without gradient": norm_without_gradient,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", LEFT)
@pytest.mark.covering(core=1)
def test_unsupported_rotations_are_not_fused(case: str, dynamic: bool) -> None:
    """The norm becomes an operator, and the rotation is unchanged."""
    fn, dtype = LEFT[case], torch.bfloat16 if case == "tables of two dtypes" else torch.float32
    inputs = problem(dtype)
    compiled, graphs = compiled_with_passes(fn, dynamic=dynamic)
    if fn in (written_between, tables_written_between):
        torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    else:
        actual, expected = results(compiled, inputs), results(fn, inputs)
        assert_close(actual, expected, 3e-2 if dtype == torch.bfloat16 else 3e-6)
    assert set(norms(graphs.forward)) == {"rms_norm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_result_of_16_bit_rows_is_not_fused(dtype: torch.dtype) -> None:
    inputs = (*problem(torch.bfloat16)[:2], *problem(dtype)[2:])
    compiled, graphs = compiled_with_passes(qwen)
    y = compiled(*inputs)
    assert y.dtype == dtype
    assert norms(graphs.forward) == ["rms_norm" if dtype == torch.float32 else "rms_norm_rope"]
    torch.testing.assert_close(y, qwen(*inputs), rtol=3e-2, atol=3e-2)


def test_inductor_runs_the_fused_operators() -> None:
    torch._dynamo.reset()
    inputs = problem(torch.float32)
    compiled = torch.compile(glm, fullgraph=True, options=normops.inductor_options())
    assert_close(results(compiled, inputs), results(glm, inputs), 3e-6)
    ran = operators_run(lambda: results(compiled, inputs))
    assert ran == ["normops::rms_norm_rope", "normops::rms_norm_rope_backward"]
