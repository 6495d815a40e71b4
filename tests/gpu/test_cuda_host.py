"""Tests the host side of the CUDA kernels without a GPU: calls of the runtime, devices, streams and memory.

The cases are in fake_gpu_cases.py.
"""

import shutil
from pathlib import Path

import fake_gpu_builds
import fake_gpu_cases
import fake_gpus
import pytest

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine"),
    pytest.mark.skipif(not fake_gpu_builds.toolkit_includes(), reason="no headers of the CUDA toolkit on this machine"),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the error, if any, of each selected case."""
    folder = tmp_path_factory.mktemp("fake_gpus")
    fake_gpu_builds.build(folder)
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    result = fake_gpu_builds.run(
        Path(fake_gpu_cases.__file__), folder, *(item.callspec.params["name"] for item in items)
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("name", fake_gpus.CASES)
def test_host_calls(name: str, outcomes: Path) -> None:
    error = (outcomes / name).read_text()
    if error:
        pytest.fail(error, pytrace=False)
