"""Tests that need a GPU: every launch configuration, streams, CUDA graphs, and many rows."""

import pytest
import torch
from other_process import printed
from torch import Tensor

import normops
from reference import cases, oracle
from reference.cases import EPS

ops = torch.ops.normops

# Row widths in bytes around which the configuration changes, as each holds a number of 16-byte packs.
WIDTHS = tuple(128 << n for n in range(14))


@pytest.fixture(autouse=True)
def _gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs --device cuda")


def problem(rows: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, cols), (rows, cols), (cols,))
    dy, x, w = (cases.values(shape, dtype, seed).to(device) for seed, shape in enumerate(shapes))
    return dy, x, w


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 8], ids=["odd", "full", "beyond"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_configuration(width: int, extra: int, dtype: torch.dtype, device: str) -> None:
    cols = width // dtype.itemsize + extra
    dy, x, w = problem(3, cols, dtype, "cpu")
    dy_there, x_there, w_there = (tensor.to(device) for tensor in (dy, x, w))
    oracle.assert_within(ops.rms_norm(x_there, [cols], w_there, EPS), oracle.rms_norm(x, (cols,), w, EPS))
    expected = oracle.rms_norm_backward(dy, x, (cols,), w, EPS)
    grad_input, grad_weight, _ = ops.rms_norm_backward(dy_there, x_there, [cols], w_there, EPS)
    oracle.assert_within(grad_input, expected.grad_input, "grad_input")
    assert expected.grad_weight is not None
    oracle.assert_within(grad_weight, expected.grad_weight, "grad_weight")


@pytest.mark.parametrize("cols", [64, 1000, 4096, 65536, 262144])
def test_rows_beyond_the_grid_are_batch_invariant(cols: int, device: str) -> None:
    """Each block of the backward processes several rows."""
    rows = max(300, (1 << 22) // cols)
    dy, x, w = problem(rows, cols, torch.bfloat16, device)
    y = ops.rms_norm(x, [cols], w, EPS)
    dx, dw, _ = ops.rms_norm_backward(dy, x, [cols], w, EPS)
    again = ops.rms_norm_backward(dy, x, [cols], w, EPS)
    assert torch.equal(dx, again[0])
    assert torch.equal(dw, again[1])
    for row in (0, 1, rows // 2, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(y[one], ops.rms_norm(x[one], [cols], w, EPS))
        assert torch.equal(dx[one], ops.rms_norm_backward(dy[one], x[one], [cols], w, EPS)[0])


@pytest.mark.parametrize("cols", [128, 4096, 65536])
def test_replayed_cuda_graph_matches_eager(cols: int, device: str) -> None:
    dy, x, w = problem(9, cols, torch.bfloat16, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rms_norm(x, [cols], w, EPS)
        dx, dw, _ = ops.rms_norm_backward(dy, x, [cols], w, EPS)
    for factor in (2, 0.5):
        x.mul_(factor)
        graph.replay()
        assert torch.equal(y, ops.rms_norm(x, [cols], w, EPS))
        for actual, expected in zip((dx, dw), ops.rms_norm_backward(dy, x, [cols], w, EPS)[:2], strict=True):
            assert torch.equal(actual, expected)


FIRST_CALL = """
import sys
import torch, normops

backend, mode, is_warm, cols = sys.argv[1], sys.argv[2], sys.argv[3] == "warm", int(sys.argv[4])
normops.set_backend(backend)
x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((9, cols), (cols,)))

def call():
    y = torch.ops.normops.rms_norm(x, [cols], w, 1e-5)
    return y, *torch.ops.normops.rms_norm_backward(y, x, [cols], w, 1e-5)[:2]

if is_warm:
    call()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=mode):
    results = call()
x.mul_(2)
graph.replay()
assert all(map(torch.equal, results, call()))
"""


@pytest.mark.parametrize("cols", [128, 4096, 65536])
@pytest.mark.parametrize(
    ("backend", "mode", "before"),
    [("cuda", "global", "cold"), ("triton", "relaxed", "cold"), ("triton", "global", "warm")],
)
def test_first_call_of_a_process_can_be_captured(backend: str, mode: str, before: str, cols: int) -> None:
    """Checks the statements of docs/pytorch.md on both backends."""
    try:
        with normops.set_backend(backend):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    printed(FIRST_CALL, backend, mode, before, str(cols))


def test_operators_run_on_current_stream(device: str) -> None:
    """The operator runs after earlier work of the current stream."""
    _, x, w = problem(64, 4096, torch.float32, device)
    expected = ops.rms_norm(x * 2, [4096], w, EPS)
    changed = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        changed.copy_(x * 2)
        actual = ops.rms_norm(changed, [4096], w, EPS)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(actual, expected)


def test_operators_run_on_device_of_input() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, x, w = problem(5, 100, torch.float32, "cpu")
    first, second = (ops.rms_norm(x.to(name), [100], w.to(name), EPS) for name in ("cuda:0", "cuda:1"))
    assert second.device.index == 1
    assert torch.equal(first.cpu(), second.cpu())
