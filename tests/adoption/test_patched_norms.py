"""A patched norm behaves like the original: in traces, transforms, modes, memory."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import norms_of_others as others
import pytest
import torch
from alike import assert_alike, assert_is_what_it_was
from calls import Calls
from sampling import marked, pairwise
from subclasses import KnowsTorchAlone
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, jvp, vmap
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

import normops

SIZE = 32
every_norm = pytest.mark.parametrize("norm", others.NORMS, ids=lambda norm: norm.__name__)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def pair(norm: Callable[[int], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Returns the same norm twice, patched and unpatched."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        module = norm(SIZE)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -3.0, 3.0)
        made.append(module.to(dtype))
    assert len(others.patch(made[0], strict=True).patched) == 1
    return made[0], made[1]


def assert_both_alike(results: Sequence[Any], where: str, dtype: torch.dtype = torch.float32) -> None:
    actual, expected = results
    assert_alike(actual, expected, where, dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (5,)), 2, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_norm
def test_patched_equals_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    assert_is_what_it_was(patched, original)


# Traces and transforms.


@every_norm
def test_jit_trace_matches_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    traced = torch.jit.trace(nn.Sequential(patched), rows())
    for x in (rows(), rows(3), rows(7)):
        assert_alike(traced(x).detach(), original(x).detach(), "traced")


def test_unpatched_module_can_be_scripted() -> None:
    patched, original = pair(lambda size: nn.Sequential(nn.Linear(size, size), nn.RMSNorm(size, eps=1e-6)))
    normops.unpatch(patched)
    assert_alike(torch.jit.script(patched)(rows()), original(rows()), "scripted")


@every_norm
def test_fx_trace_matches_original(norm: Callable[[int], nn.Module]) -> None:
    class Caller(nn.Module):
        """A caller of the norm, as fx does not trace into torch's own modules."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1.0

    outcomes = []
    for module in pair(norm):
        try:
            outcomes.append(torch.fx.symbolic_trace(Caller(module))(rows()))
        except (torch.fx.proxy.TraceError, TypeError) as error:
            outcomes.append(type(error))
    assert_both_alike(outcomes, "traced")


@every_norm
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_exported_program_runs_normops(norm: Callable[[int], nn.Module], strict: bool) -> None:
    patched, original = pair(norm)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(nn.Sequential(patched), (rows(),), dynamic_shapes=({0: batch},), strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "normops" in str(node.target)]
    assert names == ["normops.rms_norm.default"]
    for x in (rows(), rows(9)):
        assert_alike(program.module()(x), original(x), "exported")


@every_norm
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_matches_original(norm: Callable[[int], nn.Module], dynamic: bool) -> None:
    patched, original = pair(norm)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch._dynamo.reset()
    for tensor in (rows(), rows(7), rows(3, 4).transpose(0, 1), rows(4, 6)[:, ::2], rows(1).expand(4, 2, SIZE)):
        leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
        results = [compiled(leaves[0]), original(leaves[1])]
        assert_both_alike(results, "compiled")
        assert_both_alike(
            [torch.autograd.grad(y.sin().sum(), x)[0] for x, y in zip(leaves, results, strict=True)], "grads"
        )


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


@every_norm
def test_transforms_match_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    parameters = {name: torch.randn_like(each) for name, each in original.named_parameters()}
    x, tangent = rows(), rows(seed=1)

    def loss(module: nn.Module) -> Callable[..., Tensor]:
        return lambda p, t: functional_call(module, p, (t,)).sin().sum()

    transforms: dict[str, Callable[[nn.Module], Any]] = {
        "second derivatives": second_derivatives,
        "checkpoint": in_a_checkpoint,
        "subclass": lambda m: m(rows().as_subclass(Rows)),
        "parameter": lambda m: m(nn.Parameter(rows())),
        "call": lambda m: functional_call(m, parameters, (x,)),
        "grad": lambda m: grad(loss(m), argnums=1)(parameters, x),
        "grad of the weight": lambda m: [*grad(loss(m))(parameters, x).values()],
        "vmap": lambda m: vmap(lambda t: functional_call(m, parameters, (t,)))(x),
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


def test_vmap_over_weights_matches_originals() -> None:
    makes = [others.LlamaNorm(SIZE) for _ in range(3)]
    for module in makes:
        nn.init.uniform_(module.weight, -3.0, 3.0)
    parameters, buffers = torch.func.stack_module_state(makes)
    patched = others.LlamaNorm(SIZE)
    others.patch(patched)
    x = rows()
    y = vmap(lambda p, b, t: functional_call(patched, (p, b), (t,)), in_dims=(0, 0, None))(parameters, buffers, x)
    assert_alike(y.detach(), torch.stack([module(x) for module in makes]).detach(), "ensemble")


# Modes.


@pairwise
@every_norm
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@every_dtype
def test_autocast_matches_original(norm: Callable[[int], nn.Module], dtype: torch.dtype, autocast: torch.dtype) -> None:
    patched, original = pair(norm, dtype)
    for x_dtype in (dtype, torch.float32, autocast):
        x = rows(dtype=x_dtype)
        with torch.autocast("cpu", autocast):
            y, expected = patched(x), original(x)
        assert_alike(y, expected, str(x_dtype), min((dtype, x_dtype), key=lambda each: -torch.finfo(each).eps))


@every_norm
def test_inference_mode_matches_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    with torch.inference_mode():
        y, expected = patched(rows()), original(rows())
        assert y.is_inference() == expected.is_inference()
        assert_alike(y, expected, "inference")
    made_inside = y
    with torch.no_grad():
        assert_alike(patched(made_inside), original(made_inside), "after inference")


@every_norm
@every_dtype
def test_default_dtype_matches_original(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        patched, original = pair(norm, dtype)
        assert_is_what_it_was(patched, original, some=True)
    finally:
        torch.set_default_dtype(torch.float32)


@every_norm
def test_meta_and_fake_tensors_match_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    assert_same_kind(patched.to("meta")(rows().to("meta")), original.to("meta")(rows().to("meta")))
    with FakeTensorMode():
        made = [norm(SIZE), norm(SIZE)]
        others.patch(made[0])  # may skip it
        assert_same_kind(made[0](torch.randn(3, 2, SIZE)), made[1](torch.randn(3, 2, SIZE)))


def assert_same_kind(actual: Tensor, expected: Tensor) -> None:
    assert (type(actual), actual.shape, actual.dtype, actual.device, actual.stride()) == (
        type(expected),
        expected.shape,
        expected.dtype,
        expected.device,
        expected.stride(),
    )


@every_norm
def test_hooks_match_original(norm: Callable[[int], nn.Module]) -> None:
    outcomes = []
    for module in pair(norm):
        seen: list[str] = []
        module.register_forward_pre_hook(lambda _, args, seen=seen: (seen.append("before"), (2 * args[0],))[1])
        module.register_forward_hook(lambda *args, seen=seen: (seen.append("after"), 3 * args[2])[1])
        module.register_full_backward_hook(lambda *args, seen=seen: seen.append("backward"))
        x = rows().requires_grad_()
        y = module(x)
        outcomes.append((y.detach(), torch.autograd.grad((y * rows(seed=2)).sum(), x)[0], seen))
    assert_alike(outcomes[0][:2], outcomes[1][:2], "hooks")
    assert outcomes[0][2] == outcomes[1][2] == ["before", "after", "backward"]


@every_norm
def test_subclass_that_rejects_the_operators_runs_the_original(norm: Callable[[int], nn.Module]) -> None:
    patched, original = pair(norm)
    assert torch.equal(patched(KnowsTorchAlone(rows())).held, original(KnowsTorchAlone(rows())).held)


def test_nested_tensor_runs_normops() -> None:
    patched, _ = pair(others.LlamaNorm)
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
    if outcomes[1] is not None:
        assert outcomes[0] is not None, "failed where it did not"
        coarse = min((dtype, x_dtype), key=lambda each: -torch.finfo(each).eps)
        assert_both_alike(outcomes, program.__name__, coarse)


# Views of outputs.


@every_norm
def test_transposed_heads_can_be_merged(norm: Callable[[int], nn.Module]) -> None:
    q = torch.randn(2, 5, 2 * SIZE * 2).view(2, 5, 2, 2, SIZE).transpose(1, 2)
    outcomes: list[Any] = []
    for module in pair(norm):
        try:
            outcomes.append(module(q).transpose(1, 2).view(2, 5, -1).detach())
        except RuntimeError as error:
            outcomes.append(str(error))
    if isinstance(outcomes[1], Tensor):  # torch's norm returns contiguous heads, which a view cannot merge
        assert_both_alike(outcomes, "heads")


# The memory that patching takes.

PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch, normops, norms_of_others
from torch import nn

class Embedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2.0

class Table(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta" if len(sys.argv) > 3 else "cpu"))

    def forward(self, input):
        return self.weight * (input * torch.rsqrt(input.square().mean(-1, keepdim=True) + 1e-6))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

norms_of_others.patch(nn.Sequential(*(norm(32) for norm in norms_of_others.NORMS), Embedding(8, 8), Table(4, 8)))
module = eval(sys.argv[2])
before = peak()
norms_of_others.patch(module)
print(peak() - before)
"""

MODULES = (
    "Embedding(20000, 256)",
    "Embedding(256, 1024)",
    "Embedding(2, 64)",
    *(f"Table({', '.join(map(str, shape))})" for shape in ((2**18,), (2**16,), (512, 512), (64, 64, 64), (4096, 4096))),
    "nn.Sequential(*(norm(8192) for norm in norms_of_others.NORMS))",
    "Table(262208, 2560) meta",  # the embedding of a model with 4 billion parameters
)


# Each runs in its own process. In core, a meta tensor detects most mistakes.
@pytest.mark.parametrize(
    "module",
    [MODULES[-1], *marked(pytest.mark.full, [MODULES[0], MODULES[-2]]), *marked(pytest.mark.release, MODULES[1:-2])],
)
def test_patching_takes_little_memory(module: str, tmp_path: Path) -> None:
    """Measures the process's peak memory in MB, which includes tensors and Python objects."""
    (tmp_path / "program.py").write_text(PROGRAM)  # gives its classes a source
    source, *device = module.rsplit(" meta")
    command = [sys.executable, str(tmp_path / "program.py"), str(Path(__file__).parents[1]), source, *device]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 50.0
