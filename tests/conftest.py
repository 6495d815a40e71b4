import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import normops

# Files that take long come first, the longest of all at the beginning: what is left for the end, when one process has
# nothing to do any more, are short ones.
LONGEST = (
    "test_cuda_kernels.py",
    "test_cpu_kernels.py",
    "test_examples.py",
    "test_inductor.py",
    "test_gated_rms_norm.py",
    "test_families.py",
    "test_adoption_fuzz.py",
    "test_check_gpu.py",
    "test_cuda_host.py",
    "test_running.py",
    "test_patched_norms.py",
    "test_lookalikes.py",
    "test_export.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=("cpu", "cuda"), help="the device that the operators are tested on"
    )

    parser.addoption("--triton", action="store_true", help="on the CPU, test the Triton kernels, as compiled for GPUs")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--triton"):
        import triton_on_ptx

        config.add_cleanup(triton_on_ptx.serve_cpu().close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if config.getoption("--device") == "cpu":
        for item in items:
            # The interpreter of PTX takes long: to the kernels, float16 is another bfloat16, groups of several
            # dimensions are groups, rows of any dtype, and wide rows are read alike with a gate.
            few = r"-float16-w:|-float64-w:.*-\dg-|-[23]g-|first-9000-"
            # CUDA's kernels for float64 are those of any width alone, which have 512 threads for each row.
            is_cuda = item.path.name == "test_cuda_kernels.py"
            is_rare = re.search(few + ("|-float64-w:" if is_cuda else ""), item.name) is not None
            if is_rare and (is_cuda or config.getoption("--triton")):
                item.add_marker(pytest.mark.release)
        return
    # The others are the same on any machine.
    on_device = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(on_device)])
    items[:] = on_device


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector need not look through thousands of tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        if os.environ.get("NORMOPS_REQUIRE_CUDA") == "1":
            pytest.fail("NORMOPS_REQUIRE_CUDA=1, but torch sees no GPU")
        pytest.skip("torch sees no GPU")
    return name


@pytest.fixture(scope="session")
def serves_cpu(request: pytest.FixtureRequest) -> bool:
    """Whether the CPU kernels are tested, not those of a GPU, nor the definition where there are none."""
    is_cpu = request.config.getoption("--device") == "cpu" and not request.config.getoption("--triton")
    return is_cpu and normops.build_info()["cpu_isa"] != "composite"


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernel_programs.build builds, so that the kernels are compiled once."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that is never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
