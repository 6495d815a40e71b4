"""What is called on the way to the CUDA kernels: the runtime, torch's devices, streams and memory, without a GPU.

The cases are in fake_gpu_cases.py, which is imported for that.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import emulated_cuda
import fake_gpu_cases
import fake_gpus
import pytest

import normops

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine"),
    pytest.mark.skipif(not emulated_cuda.toolkit_includes(), reason="no headers of the CUDA toolkit on this machine"),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each case raised, of those cases that are asked for."""
    if not normops.build_info()["cuda_archs"] or not (fake_gpus.BUILT / "cuda" / "device.o").exists():
        if os.environ.get("NORMOPS_CUDA") == "1":
            pytest.fail("NORMOPS_CUDA=1, but no CUDA kernels were built in place")
        pytest.skip("no CUDA kernels were built in place")
    folder = tmp_path_factory.mktemp("fake_gpus")
    fake_gpus.build(folder, Path(normops.build_info()["library"]), emulated_cuda.toolkit_includes())
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = [item.callspec.params["name"] for item in items]
    # Without the normops that is installed, whose operators have the same names.
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, fake_gpu_cases.__file__, str(folder), *wanted]
    subprocess.run(command, env=environment, check=True)
    return folder


@pytest.mark.parametrize("name", fake_gpus.CASES)
def test_calls(name: str, outcomes: Path) -> None:
    error = (outcomes / name).read_text()
    if error:
        pytest.fail(error, pytrace=False)
