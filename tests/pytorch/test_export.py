"""Tests torch.export, AOTInductor packages called from Python and C++, and torch.jit.trace."""

import subprocess
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from norms_between_layers import Block
from other_process import printed
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from traced_graphs import operators

import normops
from reference import cases
from reference.cases import Case
from reference.operators import OPERATORS, Operator, OperatorCase

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(device: str) -> Block:
    torch.manual_seed(0)
    return Block().to(device).eval()


def exported(model: Block, strict: bool, device: str) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim("batch", max=512), 1: torch.export.Dim("sequence", max=512)}
    x = torch.ones(4, 3, 16, device=device)
    return torch.export.export(model, (x,), dynamic_shapes=(sizes,), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_export(model: Block, strict: bool, tmp_path: Path, device: str) -> None:
    """The program accepts any batch and sequence, also after saving, loading and decomposing to core ATen."""
    program = exported(model, strict, device)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for version in (program, loaded, loaded.run_decompositions()):
        ours = [name for name in operators(version.graph_module) if name.startswith("normops.")]
        assert ours == ["normops.rms_norm.default", *["normops.add_rms_norm.default"] * 2]
        for batch, sequence in ((4, 3), (1, 7), (9, 1)):
            x = cases.values((batch, sequence, 16), torch.float32).to(device)
            assert torch.equal(version.module()(x), model(x))


@pytest.fixture(scope="module")
def run_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the C++ example, which never starts Python."""
    folder = Path(torch.__path__[0])
    program = tmp_path_factory.mktemp("cpp") / "run_package"
    command = ["g++", "-std=c++20", str(ROOT / "examples" / "run_package.cpp"), "-o", str(program)]
    command += [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include", f"-L{folder}/lib"]
    command += [f"-Wl,-rpath,{folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    return program


def sum_in_cpp(program: Path, package: str, *sizes: int) -> float:
    """Returns the sum of a package's output for an input of ones."""
    command = [str(program), normops.build_info()["library"], package, *map(str, sizes)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


@pytest.mark.full
def test_compiled_package(model: Block, tmp_path: Path, device: str, request: pytest.FixtureRequest) -> None:
    """Builds a package, then calls it from another Python process and from C++ without Python."""
    package = torch._inductor.aoti_compile_and_package(
        exported(model, False, device), package_path=str(tmp_path / "model.pt2")
    )
    code = "import sys, torch, normops; package = torch._inductor.aoti_load_package(sys.argv[1]); "
    code += f"print(package(torch.ones(7, 2, 16, device='{device}')).double().sum().item())"
    actual = float(printed(code, package))
    x = torch.ones(7, 2, 16, device=device)
    expected = model(x).double().sum().item()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0.0)
    if device != "cpu":
        return

    program: Path = request.getfixturevalue("run_package")
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    library = normops.build_info()["library"]
    linked += subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "python" not in "".join(line.split("=>")[0] for line in linked.splitlines())
    torch.testing.assert_close(sum_in_cpp(program, package, 7, 2, 16), expected, rtol=1e-5, atol=0.0)
    missing = subprocess.run([program, "/nowhere.so", package, "7"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "/nowhere.so" in missing.stderr


class Gradients(torch.nn.Module):
    """Computes all gradients: by each backward with every mask, and by torch.func.grad of each forward."""

    def __init__(self) -> None:
        super().__init__()
        like = Case((3, 16), torch.float32, weight_dtype=torch.float32, has_residual=True)
        self.cases = [(each, OperatorCase(each, like, each.flags[0], {}).arguments()) for each in OPERATORS]

    def forward(self, scale: Tensor) -> Tensor:
        found: list[Tensor] = []
        for operator, arguments in self.cases:
            given = {name: value * scale if isinstance(value, Tensor) else value for name, value in arguments.items()}
            if operator.has_mask:
                for mask, has_weight in product(operator.masks(), (True, False)):
                    without = {} if has_weight else {"weight": None}
                    results = operator.call(**given | without, output_mask=mask)
                    found += (result for result in results if result is not None)
            elif operator.gradient is not None:

                def total(x: Tensor, operator: Operator = operator, given: dict[str, Any] = given) -> Tensor:
                    return sum(map(torch.sum, map(torch.sin, operator.call(**given | {"input": x}))), torch.zeros(()))

                found.append(torch.func.grad(total)(given["input"]))
        return torch.cat([each.flatten() for each in found])


@pytest.mark.release  # takes most of a minute
def test_compiled_package_of_gradients(tmp_path: Path, run_package: Path) -> None:
    """Calls the package from another Python process and from C++."""
    scale = torch.ones(1)
    expected = Gradients()(scale)
    traced = make_fx(Gradients())(scale)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(traced, (scale,)), package_path=str(tmp_path / "gradients.pt2")
    )
    code = "import sys, torch, normops; package = torch._inductor.aoti_load_package(sys.argv[1]); "
    code += "torch.save(package(torch.ones(1)), sys.argv[2])"
    printed(code, package, str(tmp_path / "results.pt"))
    torch.testing.assert_close(torch.load(tmp_path / "results.pt"), expected, rtol=1e-5, atol=1e-6)
    of_cpp = sum_in_cpp(run_package, package, 1)
    torch.testing.assert_close(of_cpp, expected.double().sum().item(), rtol=1e-5, atol=1e-4)


def test_trace(model: Block, tmp_path: Path, device: str) -> None:
    x = cases.values((4, 3, 16), torch.float32).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model, x)
        torch.jit.save(traced, tmp_path / "model.pt")
        loaded = torch.jit.load(tmp_path / "model.pt")
    assert str(traced.inlined_graph).count("normops::") == 3
    other = cases.values((2, 5, 16), torch.float32, 1).to(device)
    for version in (traced, loaded):
        assert torch.equal(version(other), model(other))


def add_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y, residual = x.clone(), x.sin()
    normops.add_rms_norm_(y, residual, x.shape[-1:])
    return y, residual


TRACED: dict[str, Callable[[Tensor], Any]] = {
    "rms_norm": lambda x: normops.rms_norm(x, x.shape[-1:]),
    "with a weight": lambda x: normops.rms_norm(x, x.shape[-1:], x[0]),
    "a number": lambda x: normops.rms_norm(x, x.shape[-1]),
    "numbers of both kinds": lambda x: normops.rms_norm(x.unflatten(-1, (4, -1)), (4, x.shape[-1] // 4)),
    "add_rms_norm": lambda x: normops.add_rms_norm(x, x.sin(), x.shape[-1:]),
    "gated_rms_norm": lambda x: normops.gated_rms_norm(x, x.sin(), x.size()[-1:]),
    "rms_norm_rope": lambda x: normops.rms_norm_rope(x, x.cos(), x.sin(), x.size()[-1:]),
    "rms_norm_": lambda x: normops.rms_norm_(x.clone(), x.shape[-1:]),
    "add_rms_norm_": add_in_place,
    "F.rms_norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
    "RMSNorm of groups": lambda x: normops.RMSNorm(16, group_size=4)(x.view(-1, 16)),
    "RMSNorm of a sum": lambda x: normops.RMSNorm(16)(x.view(-1, 16), x.sin().view(-1, 16)),
    "GatedRMSNorm of groups": lambda x: normops.GatedRMSNorm(16, group_size=4)(x.view(-1, 16), x.sin().view(-1, 16)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", TRACED)
def test_traced_functions_accept_other_sizes(case: str) -> None:
    """torch.jit.trace also records sizes that come from the input's shape, as for torch's own functions."""
    function = TRACED[case]
    traced = torch.jit.trace(function, torch.randn(2, 32))
    for shape in ((2, 32), (7, 32), (3, 64)):
        x = torch.randn(shape)
        assert all(map(torch.equal, traced(x), function(x)))
