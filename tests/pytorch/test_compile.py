"""Tests torch.compile: number of compilations, data-dependent sizes, backends, modes and caches."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from assertions import assert_same_bits
from other_process import printed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.utils._pytree import tree_leaves
from traced_graphs import trace
from trained import train

import normops
from normops.compile_cache import OF_SCHEMAS, tag_of
from reference import cases
from reference.operators import OPERATORS

ops = torch.ops.normops


def plain(x: Tensor, w: Tensor) -> Tensor:
    return normops.rms_norm(x, x.shape[-1], w, 1e-5)


def with_residual(x: Tensor, w: Tensor) -> Tensor:
    y, h = normops.add_rms_norm(x, x * 2, x.shape[-1], w, weight_offset=1.0)
    return y + h


def of_heads(x: Tensor, w: Tensor) -> Tensor:
    return normops.rms_norm(torch.stack([x, x * 2], -2), x.shape[-1], torch.stack([w, w + 1]), 1e-5).sum(-2)


NORMS = pytest.mark.parametrize("norm", [plain, with_residual, of_heads], ids=lambda norm: norm.__name__)


def problem(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    x, w = cases.values(shape, torch.float32).to(device), cases.values(shape[-1:], torch.float32, 1).to(device)
    return x.requires_grad_(), w.requires_grad_()


def derivatives(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    output = call(*inputs)
    return output.detach(), *torch.autograd.grad(output.sum(), inputs)


ROWS = [(rows, 16) for rows in (5, 9, 7, 33, 1024, 2, 3)]
# Dynamo specializes on sizes 0 and 1 unless they are unbacked; the operators do not force it to.
WITH_0_AND_1 = [(rows, 16) for rows in (5, 0, 1, 2, 33)]
COLUMNS = [(5, 16), (5, 17), (9, 64), (3, 1000)]
THREE_SIZES = [(2, 5, 8), (3, 7, 8), (4, 2, 9)]
SIZES: dict[str, tuple[Sequence[tuple[int, ...]], Callable[[Tensor, int], None] | None, bool | None]] = {
    "varying": (ROWS, None, None),
    "marked": (ROWS, torch._dynamo.mark_dynamic, None),
    "unbacked": (WITH_0_AND_1, torch._dynamo.decorators.mark_unbacked, None),
    "dynamic": (ROWS, None, True),
    "dynamic columns": (COLUMNS, None, True),
    "all dynamic": (THREE_SIZES, None, True),
}


@pytest.mark.parametrize("sizes", SIZES)
@NORMS
def test_sizes_compile_once(norm: Callable[..., Tensor], sizes: str, device: str) -> None:
    """The second size compiles once more unless a size is marked or ``dynamic`` is set."""
    shapes, mark, dynamic = SIZES[sizes]
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=backend, fullgraph=True, dynamic=dynamic)
    counts = []
    for shape in shapes:
        x, w = problem(shape, device)
        if mark is not None:
            mark(x, 0)
        assert_same_bits(derivatives(compiled, (x, w)), derivatives(norm, (x, w)))
        counts.append(backend.frame_count)
    assert counts == [1] + [2 if sizes == "varying" else 1] * (len(shapes) - 1)


def masked(norm: Callable[..., Tensor], x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    return norm(x[rows < rows[-1]], w)


def item(norm: Callable[..., Tensor], x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    count = rows[-1].item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return norm(x[:count], w)


@pytest.mark.parametrize(
    ("norm", "select", "backend"),
    [
        *((norm, select, "aot_eager") for norm in (plain, with_residual) for select in (masked, item)),
        (plain, item, "inductor"),
        (with_residual, masked, "inductor"),
    ],
)
def test_sizes_that_depend_on_data(
    norm: Callable[..., Tensor], select: Callable[..., Tensor], backend: str, device: str
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    x, w = problem((8, 16), device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(select, backend=counter, fullgraph=True)
        for count in (3, 1, 0, 7):
            rows = torch.arange(8, device=device)
            rows[-1] = count
            actual, expected = (
                derivatives(lambda x, w, call=call, rows=rows: call(norm, x, w, rows), (x, w))
                for call in (compiled, select)
            )
            assert actual[0].shape == (count, 16)
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("norm", "is_batched", "backend"),
    [
        *((norm, is_batched, "aot_eager") for norm in (plain, with_residual) for is_batched in (False, True)),
        (plain, True, "inductor"),
        (with_residual, False, "inductor"),
    ],
)
def test_derivatives_inside_compiled_function(
    norm: Callable[..., Tensor], is_batched: bool, backend: str, dynamic: bool, device: str
) -> None:
    x, w = (tensor.detach() for tensor in problem((4, 3, 16), device))
    gradient = torch.func.grad(lambda x, w: norm(x, w).pow(3).sum(), argnums=(0, 1))
    if is_batched:
        gradient = torch.vmap(gradient, in_dims=(0, None))
    torch._dynamo.reset()
    compiled = torch.compile(gradient, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, w), gradient(x, w))


@pytest.mark.parametrize(
    ("backend", "mode"), [("inductor", "reduce-overhead"), ("inductor", "max-autotune"), ("cudagraphs", None)]
)
def test_modes_and_cuda_graphs(backend: str, mode: str | None, device: str) -> None:
    """On a GPU, all three record a CUDA graph and replay it."""
    torch._dynamo.reset()
    counters.clear()
    module = normops.RMSNorm(64, 1e-5).to(device)
    compiled = torch.compile(module, backend=backend, mode=mode, fullgraph=True)
    for seed in range(4):
        x = cases.values((5, 64), torch.float32, seed).to(device).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        for actual, expected in zip(derivatives(compiled, (x,)), derivatives(module, (x,)), strict=True):
            assert torch.equal(actual, expected)
    if device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
@NORMS
def test_graphs_can_be_captured_by_cuda_graphs(norm: Callable[..., Tensor], dynamic: bool) -> None:
    """Graphs have no CPU scalar tensors, no writes to inputs and no data-dependent shapes."""
    x, w = (tensor.detach().to("meta").requires_grad_() for tensor in problem((6, 16), "cpu"))
    for graph in trace(norm, x, w, dynamic=dynamic):
        assert graph is not None
        values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
        values += [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        assert {value.device.type for value in tree_leaves(values) if isinstance(value, Tensor)} == {"meta"}
    for operator in OPERATORS:
        assert not operator.default._schema.is_mutable
        assert operator.default.tags == [torch.Tag.pt2_compliant_tag]


@pytest.mark.full
def test_cpp_wrapper(device: str) -> None:
    torch._dynamo.reset()
    x, w = problem((4, 16), device)
    with torch._inductor.config.patch(cpp_wrapper=True), torch.no_grad():
        y = torch.compile(with_residual, fullgraph=True)(x, w)
    torch.testing.assert_close(y, with_residual(x, w))


STEP = """
norm = normops.RMSNorm(16, 1e-3)
step = torch.compile(lambda x, residual: norm(*norm(x, residual)), fullgraph=True)
"""


@pytest.mark.full
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    aot_autograd, inductor, _ = train(tmp_path, STEP)
    assert (aot_autograd["autograd_cache_miss"], aot_autograd["autograd_cache_saved"]) == (1, 1)
    assert inductor["fxgraph_cache_miss"] == 2  # forward and backward graph
    aot_autograd, inductor, _ = train(tmp_path, STEP)
    assert (aot_autograd["autograd_cache_hit"], inductor["fxgraph_cache_hit"]) == (1, 2)
    assert "autograd_cache_miss" not in aot_autograd
    assert "fxgraph_cache_miss" not in inductor


def test_cache_key_tag_depends_on_schemas() -> None:
    assert tag_of(["normops::rms_norm(Tensor input) -> Tensor"]) != tag_of(["normops::rms_norm(Tensor x) -> Tensor"])


def test_users_cache_key_tag_is_kept() -> None:
    """normops appends its tag in every thread, also to a tag that is set later."""
    program = """
import normops, torch
from concurrent.futures import ThreadPoolExecutor
config = torch.compiler.config
print(config.cache_key_tag)
with normops.override_torch():
    print(config.cache_key_tag)
    with ThreadPoolExecutor() as threads:
        print(threads.submit(lambda: config.cache_key_tag).result())
    with config.patch(cache_key_tag="another"):
        print(config.cache_key_tag)
config.cache_key_tag = config.cache_key_tag
print(config.cache_key_tag)
"""
    tags = [
        line.split(",")
        for line in printed(program, TORCH_COMPILE_CACHE_KEY_TAG="theirs,normops-of-a-user").splitlines()
    ]
    ours = [OF_SCHEMAS]
    overridden = [*ours, "normops.override_torch"]
    theirs = ["theirs", "normops-of-a-user"]
    assert tags == [theirs + ours, *[theirs + overridden] * 2, ["another", *overridden], theirs + ours]


def test_dynamic_functions_are_traced_once() -> None:
    """A float default would become a symbolic float, for which torch.compile traces the function again."""

    def norms(x: Tensor, w: Tensor) -> Tensor:
        y, h = normops.add_rms_norm(x, x, 8, w)
        return normops.rms_norm(y, 8, w) + normops.gated_rms_norm(h, x, 8, w)

    torch._dynamo.reset()
    torch.compile(norms, backend="aot_eager", dynamic=True, fullgraph=True)(torch.randn(3, 8), torch.randn(8))
    assert not get_compilation_metrics()[-1].restart_reasons
