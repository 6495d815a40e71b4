import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

import normops
from reference import oracle

# The slowest files run first, in this order: only short files remain when the first process has no more work.
LONGEST = (
    "test_cuda_kernels.py",
    "test_cpu_kernels.py",
    "test_sharding.py",
    "test_examples.py",
    "test_opinfo_inductor.py",
    "test_families.py",
    "test_check_gpu.py",
    "test_cuda_host.py",
    "test_patched_norms.py",
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if config.getoption("--device") != "cpu":  # other tests do not depend on the machine

        def is_taken(item: pytest.Item) -> bool:
            return "device" in getattr(item, "fixturenames", ())

        config.hook.pytest_deselected(items=[item for item in items if not is_taken(item)])
        items[:] = filter(is_taken, items)


def _fail_if_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fails a skipped test if its reason contains a word of NORMOPS_REQUIRE, which lists available dependencies."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if missing := {*os.environ.get("NORMOPS_REQUIRE", "").split()} & {*reason.replace("'", " ").split()}:
            report.outcome = "failed"
            report.longrepr = f"{reason}; but NORMOPS_REQUIRE has {', '.join(missing)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_required(report)
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes the collected tests, so that the garbage collector does not traverse thousands of them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return name


@pytest.fixture(scope="session")
def runs_cpu_kernels(request: pytest.FixtureRequest) -> bool:
    """Returns True if the CPU kernels are tested, not GPU kernels or the composite fallback."""
    is_cpu = request.config.getoption("--device") == "cpu" and not request.config.getoption("--triton")
    return is_cpu and normops.build_info()["cpu_isa"] != "composite"


@pytest.fixture(scope="session", autouse=True)
def order_of_sums(runs_cpu_kernels: bool) -> None:
    oracle.sums_rows_by_tree = runs_cpu_kernels


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder for the programs of kernel_programs.build."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with NaN, which exposes unwritten elements; operators must accept deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
