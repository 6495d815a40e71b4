"""The bits of a result depend on what the contract names, and on nothing else."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from reference import cases
from reference.cases import EPS, on

ops = torch.ops.normops

THREADS = (1, 2, 3, 7)
COLS = (5, 64, 100, 769, 4096, 9000)


def problem(rows: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    made = (cases.values((rows, cols), dtype, seed) for seed in (1, 2))
    dy, x = (tensor.to(device) for tensor in made)
    return dy, x, cases.values((cols,), torch.float32, 3).to(device)


# What has rows like the input's, and grad_weight comes last.
Compute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def rms_norm(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    cols = x.shape[-1]
    return (ops.rms_norm(x, [cols], w, EPS), *ops.rms_norm_backward(dy, x, [cols], w, EPS))


def gated_rms_norm(dy: Tensor, x: Tensor, w: Tensor, norm_before_gate: bool) -> tuple[Tensor, ...]:
    cols = x.shape[-1]
    gate = dy  # as good as any
    order = {"norm_before_gate": norm_before_gate}
    output = ops.gated_rms_norm(x, gate, [cols], w, EPS, **order)
    return (output, *ops.gated_rms_norm_backward(dy, x, gate, [cols], w, EPS, **order))


@pytest.fixture(params=("rms_norm", "norm first", "gate first"))
def compute(request: pytest.FixtureRequest) -> Compute:
    return (
        rms_norm
        if request.param == "rms_norm"
        else partial(gated_rms_norm, norm_before_gate=request.param == "norm first")
    )


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
def test_a_row_does_not_know_its_batch(cols: int, dtype: torch.dtype, device: str, compute: Compute) -> None:
    """Alone, or anywhere in a batch of any size: the same bits."""
    dy, x, w = problem(37, cols, dtype, device)
    *expected, _ = compute(dy, x, w)
    for begin, end in ((0, 1), (36, 37), (3, 10), (0, 8), (1, 37), (5, 7)):
        *actual, _ = compute(dy[begin:end].clone(), x[begin:end].clone(), w)
        for of_part, of_all in zip(actual, expected, strict=True):
            assert torch.equal(of_part, of_all[begin:end])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [32, 64, 128, 200, 512])
@pytest.mark.usefixtures("restored_threads")
def test_a_row_does_not_know_how_much_there_is(cols: int, dtype: torch.dtype, device: str) -> None:
    """More than the caches of a thread hold, in rows at equal distances or not: the bits of a few rows at a time."""
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


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
def test_strides_and_alignment_do_not_show(cols: int, dtype: torch.dtype, device: str, compute: Compute) -> None:
    dy, x, w = problem(11, cols, dtype, device)
    expected = compute(dy, x, w)
    for layout in LAYOUTS:
        for actual, reference in zip(compute(layout(dy), layout(x), w), expected, strict=True):
            assert torch.equal(actual, reference)
    misaligned_weight = torch.cat([w.new_zeros(1), w])[1:]
    for actual, reference in zip(compute(dy, x, misaligned_weight), expected, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1000, 64), (123, 769), (37, 4096), (2, 70000), (4000, 16)])
@pytest.mark.usefixtures("restored_threads")
def test_thread_count_does_not_show(rows: int, cols: int, dtype: torch.dtype, device: str, compute: Compute) -> None:
    dy, x, w = problem(rows, cols, dtype, device)
    torch.set_num_threads(1)
    expected = compute(dy, x, w)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for _ in range(3):
            for actual, reference in zip(compute(dy, x, w), expected, strict=True):
                assert torch.equal(actual, reference), threads


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [32768, 40003])
@pytest.mark.usefixtures("restored_threads")
def test_threads_that_share_a_row_do_not_show(cols: int, dtype: torch.dtype, device: str) -> None:
    """Fewer rows than threads: each row is split among them."""
    dy, x, w = problem(6, cols, dtype, device)
    residual = cases.values((6, cols), dtype, 4).to(device)

    gated: list[Compute] = [partial(gated_rms_norm, norm_before_gate=norm_first) for norm_first in (True, False)]

    def compute_all() -> list[Tensor]:
        results = [ops.rms_norm(x, [cols])]
        for compute in (rms_norm, *gated):
            results += compute(dy, x, w)
        for mask in ([True, True], [True, False], [False, True]):
            for grad_residual in (None, residual) if mask[0] else (None,):
                gradients = ops.rms_norm_backward(dy, x, [cols], w, EPS, grad_residual=grad_residual, output_mask=mask)
                results += [gradient for gradient in gradients if gradient is not None]
        return results

    torch.set_num_threads(6)
    expected = compute_all()
    torch.set_num_threads(7)
    for actual, reference in zip(compute_all(), expected, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "groups", "cols"), [(37, 3, 64), (1, 40, 64), (130, 5, 100), (1, 7, 769), (5, 2, 4096)]
)
@pytest.mark.usefixtures("restored_threads")
def test_a_group_does_not_know_the_others(
    rows: int, groups: int, cols: int, dtype: torch.dtype, device: str, compute: Compute
) -> None:
    """Each has the bits that its rows and its weight have alone, whatever the threads."""
    dy, x = (cases.values((rows, groups, cols), dtype, seed).to(device) for seed in (1, 2))
    w = cases.values((groups, cols), torch.float32, 3).to(device)
    for threads in THREADS:
        torch.set_num_threads(threads)
        *of_rows, grad_weight = compute(dy, x, w)
        for g in range(groups):
            of_group = (*(tensor[:, g] for tensor in of_rows), grad_weight[g])
            for actual, reference in zip(of_group, compute(dy[:, g], x[:, g], w[g]), strict=True):
                assert torch.equal(actual, reference)


def test_grad_weight_alone_has_the_same_bits(device: str) -> None:
    dy, x, w = problem(130, 100, torch.bfloat16, device)
    _, both = ops.rms_norm_backward(dy, x, [100], w, EPS)
    _, alone = ops.rms_norm_backward(dy, x, [100], w, EPS, output_mask=[False, True])
    assert torch.equal(both, alone)


def test_repeated_under_deterministic_algorithms(device: str) -> None:
    """The operators need no exception and no other path there."""
    dy, x, w = (on(device, t) for t in problem(50, 64, torch.float32, "cpu"))
    assert dy is not None
    assert x is not None
    assert w is not None
    expected = rms_norm(dy, x, w)
    torch.use_deterministic_algorithms(True)
    try:
        for actual, reference in zip(rms_norm(dy, x, w), expected, strict=True):
            assert torch.equal(actual, reference)
    finally:
        torch.use_deterministic_algorithms(False)
