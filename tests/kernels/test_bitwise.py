"""Tests batch invariance and determinism: bits do not depend on batch, strides, alignment or threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from assertions import assert_same_bits
from sampling import pairwise
from torch import Tensor

from reference import cases
from reference.cases import EPS
from reference.operators import OF_ANY_DTYPE, Variant, fitted, of_argument, other_dtypes, variants

ops = torch.ops.normops

THREADS = (1, 2, 3, 7, 16, 61)
COLS = (5, 64, 100, 769, 4096, 9000)

# One activation is enough, as rows are gated in the same way with any.
VARIANTS = [variant for variant in variants() if variant.flags.get("activation") in (None, "silu")]
over_variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def problem(rows: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    made = (cases.values((rows, cols), dtype, seed) for seed in (1, 2))
    dy, x = (tensor.to(device) for tensor in made)
    return dy, x, cases.values((cols,), torch.float32, 3).to(device)


def norm(cols: int) -> dict[str, object]:
    return {"normalized_shape": [cols], "row_size": cols, "eps": EPS}


def compute(variant: Variant, dy: Tensor, x: Tensor, w: Tensor, **changes: object) -> dict[str, Tensor]:
    """Returns results by name; every tensor except input and weight is dy, in each dtype that it may have."""
    operator, found = variant.operator, {}
    for dtypes in ({}, *other_dtypes(operator, x.dtype, OF_ANY_DTYPE)):
        beside = {name: variant.beside(name, dy) for name in operator.tensors}
        beside |= {name: beside[name].to(dtype) for name, dtype in dtypes.items()}
        arguments = {"input": x, **beside, **norm(x.shape[-1]), "weight": w}
        results = operator.call(**operator.given(arguments), **fitted(variant.flags, x.shape[-1]), **changes)
        kind = "-".join(map(cases.short, dtypes.values()))
        found.update({f"{name} {kind}": r for name, r in zip(operator.outputs, results, strict=True) if r is not None})
    return found


def of_rows(results: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yields the results that have rows like the input's."""
    for name, result in results.items():
        if of_argument(name.split()[0]) != "weight":
            yield result


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], message: object = "") -> None:
    assert_same_bits(actual.values(), expected.values(), message)


@pairwise
@over_variants
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.triton_release
def test_rows_are_batch_invariant(cols: int, dtype: torch.dtype, device: str, variant: Variant) -> None:
    """A row has the same bits alone and anywhere in a batch of any size."""
    dy, x, w = problem(37, cols, dtype, device)
    expected = list(of_rows(compute(variant, dy, x, w)))
    for begin, end in ((0, 1), (36, 37), (3, 10), (0, 8), (1, 37), (5, 7)):
        actual = of_rows(compute(variant, dy[begin:end].clone(), x[begin:end].clone(), w))
        assert_same_bits(actual, (result[begin:end] for result in expected))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [32, 64, 128, 200, 512])
@pytest.mark.usefixtures("restored_threads")
def test_rows_do_not_depend_on_total_size(cols: int, dtype: torch.dtype, device: str) -> None:
    """Inputs that exceed a thread's caches, with even or uneven strides, have the bits of a few rows at a time."""
    torch.set_num_threads(1)
    rows = (3 << 19) // (cols * dtype.itemsize) // 4 * 4
    _, x, w = problem(rows, cols, dtype, device)
    expected = torch.cat([ops.rms_norm(part, [cols], w, EPS) for part in x.split(100)])
    assert torch.equal(ops.rms_norm(x, [cols], w, EPS), expected)
    heads = x.new_full((rows // 4, 7, cols), torch.nan)[:, 1:5]
    heads.copy_(x.view_as(heads))
    assert torch.equal(ops.rms_norm(heads, [cols], w, EPS).view_as(expected), expected)
    w_of_heads = torch.stack([w, w * 2, w, w * 2])
    actual = ops.rms_norm(x.view_as(heads), [cols], w_of_heads, EPS)
    assert torch.equal(actual[:, ::2], expected.view_as(heads)[:, ::2])


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),  # misaligned
    lambda t: torch.nn.functional.pad(t, (0, 3), value=torch.nan)[:, : t.shape[1]],  # longer rows
    lambda t: t.t().contiguous().t(),  # columns not contiguous
    lambda t: torch.stack([torch.full_like(t, torch.nan), t], 1)[:, 1],  # rows interleaved with others
)


@pairwise
@over_variants
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.triton_release
def test_bits_do_not_depend_on_memory_layout(cols: int, dtype: torch.dtype, device: str, variant: Variant) -> None:
    dy, x, w = problem(11, cols, dtype, device)
    expected = compute(variant, dy, x, w)
    for layout in LAYOUTS:
        assert_same(compute(variant, layout(dy), layout(x), w), expected)
    misaligned_weight = torch.cat([w.new_zeros(1), w])[1:]
    assert_same(compute(variant, dy, x, misaligned_weight), expected)


@over_variants
def test_bits_do_not_depend_on_dimension_order(device: str, variant: Variant) -> None:
    dy, x = (cases.values((3, 2, 4, 100), torch.float32, seed).to(device) for seed in (1, 2))
    w = cases.values((100,), torch.float32, 3).to(device)
    turned_dy, turned_x = (tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (dy, x))
    assert_same(compute(variant, turned_dy, turned_x, w), compute(variant, dy, x, w))


@pairwise
@over_variants
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *((1000, 64), (123, 769), (37, 4096), (2, 70000), (4000, 16)),
        *((3, 130, 64), (40, 3, 1024), (2, 70, 769), (3, 2, 33000)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("restored_threads")
def test_bits_do_not_depend_on_threads(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, variant: Variant
) -> None:
    """Samples of three dimensions have a weight each: rows of a group are consecutive."""
    dy, x = (cases.values(shape, dtype, seed).to(device) for seed in (1, 2))
    weight_shape = (shape[0], 1, shape[2]) if len(shape) == 3 else shape[1:]
    w = cases.values(weight_shape, torch.float32, 3).to(device)
    torch.set_num_threads(1)
    expected = compute(variant, dy, x, w)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert_same(compute(variant, dy, x, w), expected, threads)


@pairwise
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [32768, 40003])
@over_variants
@pytest.mark.usefixtures("restored_threads")
def test_bits_do_not_depend_on_threads_per_row(variant: Variant, cols: int, dtype: torch.dtype, device: str) -> None:
    """With fewer rows than threads, each row is split among threads."""
    operator = variant.operator
    dy, x, w = problem(6, cols, dtype, device)
    masks = [{"output_mask": mask} for mask in operator.masks()] if operator.has_mask else [{}]
    without = {name: None for name in operator.tensors if operator.is_optional(name)}

    def compute_all() -> list[Tensor | None]:
        results: list[Tensor | None] = []
        for mask in masks:
            results += compute(variant, dy, x, w, **mask).values()
        beside = {name: variant.beside(name, dy) for name in operator.tensors}
        arguments = operator.given({"input": x, **beside, **norm(cols)} | without)
        return results + list(operator.call(**arguments, **fitted(variant.flags, cols)))

    torch.set_num_threads(1)
    alone = compute_all()
    torch.set_num_threads(6)
    expected = compute_all()
    torch.set_num_threads(7)
    assert_same_bits(compute_all(), expected)
    assert_same_bits(alone, expected)


@pairwise
@over_variants
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "groups", "cols"),
    [(37, 3, 64), (3, 40, 1024), (130, 5, 100), (64, 17, 128), (1, 7, 769), (5, 2, 4096), (9, 2, 33000)],
)
@pytest.mark.usefixtures("restored_threads")
def test_groups_do_not_depend_on_each_other(
    rows: int, groups: int, cols: int, dtype: torch.dtype, device: str, variant: Variant, runs_cpu_kernels: bool
) -> None:
    """Each group has the bits that its rows and weight have alone, with any number of threads.

    This excludes grad_weight on GPUs: groups share the blocks, and a group has one partial sum per block.
    """
    dy, x = (cases.values((rows, groups, cols), dtype, seed).to(device) for seed in (1, 2))
    w = cases.values((groups, cols), torch.float32, 3).to(device)
    for threads in THREADS:
        torch.set_num_threads(threads)
        expected = compute(variant, dy, x, w)
        for g in range(groups):
            alone = compute(variant, dy[:, g], x[:, g], w[g])
            for name, result in expected.items():
                is_of_weight = of_argument(name.split()[0]) == "weight"
                if runs_cpu_kernels or not is_of_weight:
                    assert_same_bits([alone[name]], [result[g] if is_of_weight else result[:, g]], (name, threads))


@over_variants
def test_repeated_under_deterministic_algorithms(variant: Variant, device: str) -> None:
    """Deterministic mode raises no error and changes no bits."""
    dy, x, w = problem(50, 64, torch.float32, device)
    expected = compute(variant, dy, x, w)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(compute(variant, dy, x, w), expected)
    finally:
        torch.use_deterministic_algorithms(False)
