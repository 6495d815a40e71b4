"""A patched norm behaves like the original: in traces, transforms, modes, memory."""

import ctypes
import inspect
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import norms_of_others as others
import pytest
import torch
from alike import SIZE, assert_alike, assert_is_what_it_was
from calls import Calls
from graphs import computed_besides_views
from sampling import pairwise
from subclasses import KnowsTorchAlone
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from traced_graphs import trace
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

every_norm = pytest.mark.parametrize("norm", others.NORMS, ids=lambda norm: norm.__name__)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def pair(norm: Callable[[int], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Returns a norm, and a patched copy."""
    return others.patched_pair(partial(norm, SIZE), dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (5,)), 2, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_norm
def test_patched_equals_original(norm: Callable[[int], nn.Module]) -> None:
    original, patched = pair(norm)
    assert_is_what_it_was(patched, original)


# Traces and transforms.


@every_norm
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_exported_program_runs_normops(norm: Callable[[int], nn.Module], strict: bool) -> None:
    original, patched = pair(norm)
    shapes = {name: {0: torch.export.Dim("batch", min=2)} for name in inspect.signature(original.forward).parameters}
    program = torch.export.export(patched, (rows(),), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "normops" in str(node.target)]
    assert names == ["normops.rms_norm.default"]
    for x in (rows(), rows(9)):
        assert_alike(program.module()(x), original(x), "exported")


@every_norm
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_norm_is_one_operator_and_matches_original(norm: Callable[[int], nn.Module], dynamic: bool) -> None:
    original, patched = pair(norm)
    graphs = trace(patched, rows().requires_grad_(), dynamic=dynamic)
    assert graphs.backward is not None
    # A weight per group is a view of the module's weight.
    assert computed_besides_views(graphs.forward) == ["normops.rms_norm.default"]
    assert computed_besides_views(graphs.backward) == ["normops.rms_norm_backward.default"]
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch._dynamo.reset()
    for tensor in (rows(), rows(7), rows(3, 4).transpose(0, 1), rows(4, 6)[:, ::2], rows(1).expand(4, 2, SIZE)):
        leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
        results = compiled(leaves[0]), original(leaves[1])
        assert_alike(*results, "compiled")
        actual, expected = (torch.autograd.grad(y.sin().sum(), x) for x, y in zip(leaves, results, strict=True))
        assert_alike(actual, expected, "grads")


class Rows(Tensor):
    """A subclass that operations preserve."""


def second_derivatives(module: nn.Module) -> tuple[Tensor, ...]:
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), (x, *module.parameters()))


def in_a_checkpoint(module: nn.Module) -> tuple[Tensor, ...]:
    x = rows().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    return torch.autograd.grad(y.sin().sum(), (x, *module.parameters()))


def traced_by_fx(module: nn.Module) -> Any:
    class Caller(nn.Module):
        """A caller of the norm, as fx does not trace into torch's own modules."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1.0

    try:
        return torch.fx.symbolic_trace(Caller())(rows())
    except (torch.fx.proxy.TraceError, TypeError) as error:
        return str(error)


def inferred(module: nn.Module) -> tuple[Tensor, bool, Tensor]:
    with torch.inference_mode():
        y = module(rows())
    with torch.no_grad():
        return y, y.is_inference(), module(y)


def five_times(module: nn.Module, grads: Any, others: Any) -> Any:
    return tuple(5 * each for each in grads)


def hooked(module: nn.Module) -> tuple[Tensor, ...]:
    handles = [
        module.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
        module.register_forward_hook(lambda _, args, y: 3 * y),
        module.register_full_backward_hook(five_times),
    ]
    x = rows().requires_grad_()
    y = module(x)
    (gradient,) = torch.autograd.grad(y.sin().sum(), x)
    for handle in handles:
        handle.remove()
    return y, gradient


@every_norm
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_transforms_match_original(norm: Callable[[int], nn.Module]) -> None:
    original, patched = pair(norm)
    parameters = {name: torch.randn_like(each) for name, each in original.named_parameters()}
    stacked = {name: torch.stack([each, -2.0 * each]) for name, each in parameters.items()}
    x, tangent = rows(), rows(seed=1)

    def loss(module: nn.Module) -> Callable[..., Tensor]:
        return lambda p, t: functional_call(module, p, (t,)).sin().sum()

    transforms: dict[str, Callable[[nn.Module], Any]] = {
        "jit trace": lambda m: torch.jit.trace(nn.Sequential(m), rows())(rows(7)),
        "fx trace": traced_by_fx,
        "inference mode": inferred,
        "hooks": hooked,
        "subclass without normops": lambda m: m(KnowsTorchAlone(rows())).held,
        "second derivatives": second_derivatives,
        "checkpoint": in_a_checkpoint,
        "subclass": lambda m: m(rows().as_subclass(Rows)),
        "parameter": lambda m: m(nn.Parameter(rows())),
        "call": lambda m: functional_call(m, parameters, (x,)),
        "grad": lambda m: grad(loss(m), argnums=1)(parameters, x),
        "grad of the weight": lambda m: [*grad(loss(m))(parameters, x).values()],
        "vmap": lambda m: vmap(lambda t: functional_call(m, parameters, (t,)))(x),
        "vmap over weights": lambda m: vmap(lambda p, t: functional_call(m, p, (t,)))(stacked, torch.stack([x, x])),
        "vmap over another dimension": lambda m: vmap(m, in_dims=1, out_dims=1)(x),
        "gradients of samples": lambda m: [*vmap(grad(loss(m)), in_dims=(None, 0))(parameters, x).values()],
        "jvp": lambda m: list(jvp(lambda t: functional_call(m, parameters, (t,)), (x,), (tangent,))),
        "jvp of grad": lambda m: list(jvp(lambda t: grad(loss(m), argnums=1)(parameters, t), (x,), (tangent,))),
        "jacobian": lambda m: jacrev(lambda t: functional_call(m, parameters, (t,)))(x[:1, :1]) if x.dim() < 3 else 0,
    }
    for name, transform in transforms.items():
        if norm is others.torch_norm_of_two and "vmap" in name and name.endswith("dimension"):
            continue  # vmap would remove a normalized dimension
        assert_alike(transform(patched), transform(original), name)


# Modes.


@pairwise
@every_norm
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@every_dtype
def test_autocast_matches_original(norm: Callable[[int], nn.Module], dtype: torch.dtype, autocast: torch.dtype) -> None:
    original, patched = pair(norm, dtype)
    for x_dtype in (dtype, torch.float32, autocast):
        x = rows(dtype=x_dtype)
        with torch.autocast("cpu", autocast):
            y, expected = patched(x), original(x)
        assert_alike(y, expected, str(x_dtype), min((dtype, x_dtype), key=lambda each: -torch.finfo(each).eps))


def test_nested_tensor_runs_normops() -> None:
    _, patched = pair(others.LlamaNorm)
    with Calls() as calls:
        patched(torch.nested.nested_tensor([rows()[0], rows()[1]], layout=torch.jagged))
    assert calls.names == ["rms_norm"]


# In-place writes.


@pytest.mark.parametrize(
    "norm", [*others.NORMS, partial(MambaRMSNormGated, group_size=8)], ids=lambda norm: getattr(norm, "__name__", "")
)
def test_results_of_no_grad_allow_recorded_writes(norm: Callable[[int], nn.Module]) -> None:
    factor = torch.ones(SIZE, requires_grad=True)
    for module in pair(norm):
        with torch.no_grad():
            y = module(rows(4, 5).transpose(0, 1))
        y.mul_(factor).sum().backward()


def residual(module: nn.Module, x: Tensor) -> Tensor:
    h = x * 1
    y = module(h)
    h += y.to(h.dtype)
    return h


def overwritten(module: nn.Module, x: Tensor) -> Tensor:
    h = x * 1
    y = module(h)
    h.zero_()
    return y + h


def scaled_in_place(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x * 1)
    y *= 2
    return y


def weight_written(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x * 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    return y


@pairwise
@pytest.mark.parametrize("program", [residual, overwritten, scaled_in_place, weight_written])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@every_dtype
@every_norm
def test_writes_after_the_norm_match_original(
    norm: Callable[[int], nn.Module],
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    program: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Gradients equal the original's; if the original's backward raises, the patched one may succeed."""
    outcomes: list[Any] = []
    for module in pair(norm, dtype):
        x = rows(dtype=x_dtype).requires_grad_()
        y = program(module, x)
        try:
            outcomes.append(torch.autograd.grad(y.float().sin().sum(), (x, *module.parameters())))
        except RuntimeError:  # a saved tensor was modified in place
            outcomes.append(None)
    expected, actual = outcomes
    if expected is not None:
        assert actual is not None, "failed where it did not"
        coarse = min((dtype, x_dtype), key=lambda each: -torch.finfo(each).eps)
        assert_alike(actual, expected, program.__name__, coarse)


# The memory that patching takes.


class Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


class Table(nn.Module):
    def __init__(self, *shape: int, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def peak() -> int:
    """Returns the most memory in kB that this process had since the last reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
@pytest.mark.parametrize(
    "make",
    [
        partial(Table, 262208, 2560, device="meta"),  # the embedding of a model with 4 billion parameters
        partial(Table, 4096, 4096),
        partial(Embedding, 20000, 256),
        pytest.param(lambda: nn.Sequential(*(norm(8192) for norm in others.NORMS)), marks=pytest.mark.full),
    ],
)
def test_patching_takes_little_memory(make: Callable[[], nn.Module]) -> None:
    others.patch(nn.Sequential(*(norm(32) for norm in others.NORMS), Embedding(8, 8), Table(4, 8)))  # imports modules
    module = make()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that the allocator keeps would be used
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    others.patch(module)
    assert peak() - before < 50_000
