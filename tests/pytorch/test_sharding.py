"""The operators on several processes: DTensor, tensor parallelism, FSDP.

Importing sharded_*.py registers the cases.
"""

from pathlib import Path
from typing import Any

import pytest
import sharded_errors  # noqa: F401
import sharded_models  # noqa: F401
import sharded_operators  # noqa: F401
import sharded_rows  # noqa: F401
from processes import CASES, run
from torch.multiprocessing.spawn import spawn


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the selected cases and returns a folder with the exception of each case in each process."""
    folder = tmp_path_factory.mktemp("sharding")
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    for processes in sorted({case.processes for case in CASES.values()}):
        functions = {
            name: case.function for name, case in CASES.items() if case.processes == processes and name in wanted
        }
        if functions:
            spawn(run, (functions, processes, folder), processes)
    return folder


def marks_of(name: str) -> Any:
    case = CASES[name]
    if case.processes == 4 and f"{case.function.__name__}-2" in CASES:
        return pytest.mark.release
    return () if case.function.__module__ in ("sharded_errors", "sharded_operators") else pytest.mark.full


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_case_passes_in_every_process(name: str, outcomes: Path) -> None:
    for rank in range(CASES[name].processes):
        outcome = outcomes / f"{name}.{rank}"
        if not outcome.exists():
            pytest.fail("not run, as a case before it failed in some of the processes")
        error = outcome.read_text()
        if error:
            pytest.fail(f"in process {rank}:\n{error}", pytrace=False)
