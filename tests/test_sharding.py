"""The operators on several processes: DTensor, tensor parallelism, FSDP.

The cases are in sharded_*.py, which are imported for that.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import sharded_errors  # noqa: F401
import sharded_models  # noqa: F401
import sharded_operators  # noqa: F401
import sharded_rows  # noqa: F401
from processes import CASES, run
from torch.multiprocessing.spawn import spawn


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each case raised in each process, of those cases that are asked for."""
    folder = tmp_path_factory.mktemp("sharding")
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    for processes in sorted({case.processes for case in CASES.values()}):
        functions = {
            name: case.function for name, case in CASES.items() if case.processes == processes and name in wanted
        }
        if functions:
            spawn(run, (functions, processes, folder), processes)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_in_processes(name: str, outcomes: Path) -> None:
    for rank in range(CASES[name].processes):
        outcome = outcomes / f"{name}.{rank}"
        if not outcome.exists():
            pytest.fail("not run, as a case before it failed in some of the processes")
        error = outcome.read_text()
        if error:
            pytest.fail(f"in process {rank}:\n{error}", pytrace=False)


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_importing_normops_does_not_import_dtensor() -> None:
    run_python(
        "import sys, torch, normops\nassert {'torch.distributed.tensor', 'normops.sharding'}.isdisjoint(sys.modules)"
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import normops, torch.distributed.tensor",
        "import torch.distributed.tensor, normops",
        # To ask whether there is such a module is not to import it.
        "import normops, importlib.util; importlib.util.find_spec('torch.distributed.tensor'); "
        "import torch.distributed.tensor",
    ],
)
def test_strategies_are_there_whatever_is_imported_first(imports: str) -> None:
    run_python(
        f"import torch; {imports}\n"
        "strategies = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs\n"
        "assert torch.ops.normops.rms_norm.default in strategies"
    )


def test_a_torch_without_dtensor() -> None:
    run_python(
        "import sys, torch\n"
        "class Missing:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name.startswith('torch.distributed.tensor'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "import normops\n"
        "assert normops.rms_norm(torch.ones(2, 8), 8).shape == (2, 8)"
    )


def test_an_import_that_fails_is_a_warning() -> None:
    """Who imports DTensor for other reasons is not kept from it."""
    run_python(
        "import sys, warnings, torch, normops\n"
        "sys.modules['normops.sharding'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import torch.distributed.tensor\n"
        "(text,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]\n"
        "assert text.startswith('expected to import normops.sharding after torch.distributed.tensor, but got')"
    )
