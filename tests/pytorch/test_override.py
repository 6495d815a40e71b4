"""override_torch makes torch's rms_norm run normops."""

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from other_process import python
from profiles import operators_run
from subclasses import KnowsTorchAlone
from torch import Tensor, nn
from trained import train

import normops


@pytest.fixture
def overridden() -> Iterator[None]:
    with normops.override_torch():
        yield


FORWARD, BACKWARD, OWN = "normops::rms_norm", "normops::rms_norm_backward", "aten::_fused_rms_norm"


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_override_torch_switches_on_and_off() -> None:
    norm, x = nn.RMSNorm(64), rows().requires_grad_()

    def step() -> None:
        norm(x).sum().backward()

    assert operators_run(step) == [OWN]
    with normops.override_torch():
        assert operators_run(step) == [FORWARD, BACKWARD]
        assert normops.build_info()["overrides_torch"]
        with normops.override_torch(False):
            assert operators_run(step) == [OWN]
        with normops.override_torch():
            assert operators_run(step) == [FORWARD, BACKWARD]
        assert operators_run(step) == [FORWARD, BACKWARD]
    assert operators_run(step) == [OWN]
    assert not normops.build_info()["overrides_torch"]
    normops.override_torch()
    assert operators_run(step) == [FORWARD, BACKWARD]
    normops.override_torch(False)
    assert operators_run(step) == [OWN]


def test_override_torch_raises_no_warning() -> None:
    code = "import normops, torch; normops.override_torch(); normops.override_torch(False); print('done')"
    done = python("-W", "error", "-c", code)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("eps", [None, 1e-3, -0.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_override_has_normops_bits(dtype: torch.dtype, weight_dtype: torch.dtype | None, eps: float | None) -> None:
    x = rows(dtype)
    weight = None if weight_dtype is None else torch.rand(64, dtype=weight_dtype)
    y = F.rms_norm(x, (64,), weight, eps)
    assert y.dtype == dtype
    assert torch.equal(y, normops.rms_norm(x, 64, weight, eps))


OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: F.rms_norm(torch.complex(rows(), rows()), (64,)),
    "meta": lambda: F.rms_norm(rows().to("meta"), (64,)),
    "eps is NaN": lambda: F.rms_norm(rows(), (64,), None, float("nan")),
    "a subclass that knows torch's operators alone": lambda: F.rms_norm(KnowsTorchAlone(rows()), (64,)).held,  # type: ignore[attr-defined]
    "vmap": lambda: torch.vmap(nn.RMSNorm(64))(rows()),
    "nested": lambda: nn.RMSNorm(64)(torch.nested.nested_tensor([rows(), rows()[:2]], layout=torch.jagged)),
    "double weight of a meta input": lambda: F.rms_norm(rows().to("meta"), (64,), torch.ones(64, device="meta")),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_unsupported_calls_run_torch(case: str) -> None:
    torch.manual_seed(0)
    expected = OUTSIDE[case]()
    torch.manual_seed(0)
    with normops.override_torch():
        actual = OUTSIDE[case]()
        assert FORWARD not in operators_run(OUTSIDE[case])
    assert actual.dtype == expected.dtype
    if actual.is_nested:
        actual, expected = actual.values(), expected.values()
    if actual.device.type != "meta":
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "weight", "expected"),
    [
        ((), None, "Expected normalized_shape to be at least 1-dimensional"),
        ((63,), None, "Given normalized_shape="),
        ((2, 4, 64), None, "Input tensor must have at least 3 dimensions"),
        ((64,), (63,), "Expected weight to be of same shape as normalized_shape"),
        ((64,), (4, 64), "Expected weight to be of same shape as normalized_shape"),  # which only normops supports
    ],
)
def test_invalid_shapes_raise_the_error_of_torch(
    shape: tuple[int, ...], weight: tuple[int, ...] | None, expected: str
) -> None:
    errors = []
    for enabled in (False, True):
        with normops.override_torch(enabled), pytest.raises((RuntimeError, ValueError)) as error:
            F.rms_norm(rows(), shape, None if weight is None else torch.ones(weight))
        errors.append((error.type, str(error.value)))
    assert errors[0][1].startswith(expected)
    assert errors[0] == errors[1]


@pytest.mark.usefixtures("overridden")
def test_invalid_dtype_raises() -> None:
    with pytest.raises(RuntimeError, match="not implemented for 'Long'"):
        F.rms_norm(rows().long(), (64,))


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_output_dtype_of_torch(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = nn.RMSNorm(64)(rows(dtype))
    with normops.override_torch(False), torch.autocast("cpu", torch.bfloat16):
        assert nn.RMSNorm(64)(rows(dtype)).dtype == y.dtype


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_compiled_code_follows_the_override(context: Callable[[], Any]) -> None:
    norm, x = nn.RMSNorm(64), rows()
    compiled = torch.compile(norm, fullgraph=True)
    with context():
        for enabled in (False, True, False, True):
            with normops.override_torch(enabled):
                compiled(x)
                assert (FORWARD in operators_run(lambda: compiled(x))) == enabled


STEP = """
normops.override_torch({})
norm = torch.nn.RMSNorm(16)
step = torch.compile(lambda x, _: [norm(x)], fullgraph=True)
"""


@pytest.mark.release  # compiles in four new processes
def test_caches_distinguish_the_override(tmp_path: Path) -> None:
    runs = [train(tmp_path, STEP.format(enabled)) for enabled in (False, True, False, True)]
    assert [ran for *_, ran in runs] == [[], [FORWARD, BACKWARD]] * 2
    assert ["autograd_cache_hit" in counts for counts, *_ in runs] == [False, False, True, True]


@pytest.mark.parametrize("written", ["input", "weight"])
@pytest.mark.parametrize("needs", [("input",), ("weight",), ("input", "weight")])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_in_place_writes_after_the_norm_work_as_with_torch(
    dtype: torch.dtype, weight_dtype: torch.dtype, needs: tuple[str, ...], written: str
) -> None:
    """Writes to saved tensors raise, unless torch's norm saves copies."""

    def gradients() -> list[Tensor] | None:
        leaves = {"input": rows(dtype), "weight": torch.linspace(0.5, 1.5, 64, dtype=weight_dtype)}
        for name in needs:
            leaves[name].requires_grad_()
        tensors = {name: leaf * 1 for name, leaf in leaves.items()}
        y = F.rms_norm(tensors["input"], (64,), tensors["weight"])
        tensors[written] += 1
        try:
            return list(torch.autograd.grad(y.square().sum(), [leaves[name] for name in needs]))
        except RuntimeError:
            return None

    expected = gradients()
    with normops.override_torch():
        actual = gradients()
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.usefixtures("overridden")
def test_onnx_export_decomposes_torch_norm() -> None:
    """The export is the same as without the override."""
    for opset_version, expected in ((23, ["RMSNormalization"]), (18, ["Pow", "ReduceMean", "Add", "Sqrt"])):
        program = torch.onnx.export(nn.RMSNorm(64), (rows(),), opset_version=opset_version, verbose=False)
        assert program is not None
        assert [node.op_type for node in program.model.graph][: len(expected)] == expected
    assert operators_run(lambda: nn.RMSNorm(64)(rows())) == [FORWARD]


@pytest.mark.usefixtures("overridden")
def test_exported_program_runs_normops() -> None:
    norm, x = nn.RMSNorm(64), rows()
    program = torch.export.export(norm, (x,))
    torch.testing.assert_close(program.module()(x), norm(x))
    decomposed = program.run_decompositions()
    assert operators_run(lambda: decomposed.module()(x)) == [FORWARD]


def permuted(sizes: tuple[int, ...], order: tuple[int, ...], gap: int = 1) -> Tensor:
    """Returns a tensor of these sizes whose dimensions have this order in memory, the outermost first."""
    stored = torch.randn([sizes[dim] for dim in order[:-1]] + [sizes[order[-1]] * gap])
    return stored[..., ::gap].permute([order.index(dim) for dim in range(len(order))])


def strides(tensor: Tensor) -> list[int]:
    """Returns the strides that matter: those of dimensions longer than 1."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize(
    "sizes", [(3, 4), (2, 3, 4), (2, 3, 4, 8), (2, 3, 2, 5, 4), (2, 1, 3, 4), (1, 3, 1, 4), (2, 3, 1)]
)
@pytest.mark.parametrize("normalized", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_have_the_memory_format_of_torch(sizes: tuple[int, ...], normalized: int, dtype: torch.dtype) -> None:
    shape = sizes[-normalized:]
    for order in permutations(range(len(sizes))):
        for gap in (1, 2):
            x, weight = permuted(sizes, order, gap).to(dtype), torch.randn(shape)
            for expanded in (x, x[:1].expand(sizes)):
                expected = F.rms_norm(expanded, shape, weight)
                with normops.override_torch():
                    actual = F.rms_norm(expanded, shape, weight)
                assert strides(actual) == strides(expected), (order, gap)
                torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_compiled_outputs_have_the_memory_format_of_torch(order: tuple[int, ...]) -> None:
    x, found = permuted((2, 3, 4, 8), order).requires_grad_(), []
    for enabled in (False, True):
        with normops.override_torch(enabled):
            y = torch.compile(lambda x: F.rms_norm(x, (8,)), backend="aot_eager", fullgraph=True)(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            found.append((y, grad))
    (expected, expected_grad), (actual, actual_grad) = found
    assert actual.stride() == expected.stride()
    torch.testing.assert_close((actual, actual_grad), (expected, expected_grad))


def test_documented_script_runs_a_program(tmp_path: Path) -> None:
    """The program receives its arguments, and imports modules from its folder."""
    text = (Path(__file__).parents[2] / "docs" / "adoption.md").read_text()
    (shown,) = (block.partition("```")[0] for block in text.split("```python\n") if "runpy.run_path" in block)
    (tmp_path / "with_normops.py").write_text(shown)
    (tmp_path / "beside.py").touch()
    program = "import sys, beside, normops; print(__name__, sys.argv[1:], normops.build_info()['overrides_torch'])"
    (tmp_path / "program.py").write_text(program)
    result = python("with_normops.py", "program.py", "--steps", "3", cwd=tmp_path)
    assert result.stdout == "__main__ ['--steps', '3'] True\n", result.stderr
