"""Tests forked processes, such as DataLoader workers, after the parent has used threads; and thread limits."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import memory_limits
import pytest
import torch
from other_process import printed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")

COLS = 16384


def results() -> list[Tensor]:
    """Returns the results of every operator, its out and in-place variants, on rows that threads share."""
    tensors: list[Tensor] = []
    for call in memory_limits.CALLS.values():
        tensors += memory_limits.Problem(*call, 8, COLS, False).call()
    return tensors


class Results(Dataset[list[Tensor]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[Tensor]:
        return results()


@pytest.mark.usefixtures("restored_threads")
def test_dataloader_workers_match_parent() -> None:
    """Workers have one thread each; a forked process has none of the threads that its parent started."""
    torch.set_num_threads(3)
    expected = results()
    # RuntimeError after a minute without an answer.
    loader = DataLoader(Results(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    batches: Iterator[list[Tensor]] = iter(loader)
    for _ in range(2):
        for actual, wanted in zip(next(batches), expected, strict=True):
            assert torch.equal(actual, wanted)


LIMITED = """
import torch
from test_fork import results
torch.set_num_threads(1)
expected = results()
torch.set_num_threads(4)
assert all(map(torch.equal, results(), expected))
"""


def test_fewer_threads_than_requested() -> None:
    """OpenMP starts only as many threads as its limit allows, which must do all the work."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, here.parents[:2]))
    printed(LIMITED, cwd=here, OMP_THREAD_LIMIT="2", PYTHONPATH=path)


# Prints the static variables of functions that are not initialized. A guard's first byte is 1 afterwards.
STATICS = """
import ctypes, subprocess
from pathlib import Path
import normops
for line in Path("/proc/self/maps").read_text().splitlines():
    fields = line.split()
    name = Path(fields[-1]).name
    if fields[2] != "00000000" or not name.startswith(("libnormops", "_C.")) or "normops" not in fields[-1]:
        continue
    base = int(fields[0].split("-")[0], 16)
    symbols = subprocess.run(["nm", "--demangle", fields[-1]], check=True, capture_output=True, text=True).stdout
    for address, _, symbol in (symbol.split(" ", 2) for symbol in symbols.splitlines() if symbol[0] != " "):
        is_of_normops = symbol.startswith("guard variable for normops::")
        if is_of_normops and ctypes.c_uint8.from_address(base + int(address, 16)).value == 0:
            print(symbol.removeprefix("guard variable for "))
"""


def test_static_variables_are_initialized_at_import() -> None:
    """A child waits forever for a variable that another thread of its parent was initializing.

    The only others are those of compiled autograd, which refuses concurrent backwards, and of GPUs, which forked
    processes cannot use.
    """
    names = printed(STATICS).splitlines()
    assert [
        name for name in names if not any(part in name for part in ("apply_with_saved", "triton::", "cuda::"))
    ] == []
