"""Tests forked processes, such as DataLoader workers, after the parent has used threads; and thread limits."""

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
    tests = Path(__file__).parent
    printed(LIMITED, cwd=tests, OMP_THREAD_LIMIT="2", PYTHONPATH=str(tests.parent))


FIRST_CALLS = """
import os, threading, time
import torch
import memory_limits
torch.set_num_threads(1)
calls = [memory_limits.Problem(*call, 2, 64, False) for call in memory_limits.CALLS.values()]
started = threading.Event()

def first_calls():
    started.set()
    for call in calls:
        call.call()

thread = threading.Thread(target=first_calls)
thread.start()
started.wait()
children = []
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        for call in calls:
            call.call()
        os._exit(0)
    children.append(pid)
thread.join()
end = time.monotonic() + 60
while children:
    children = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
    assert time.monotonic() < end, "a child waits"
    time.sleep(0.01)
"""


@pytest.mark.release
def test_fork_during_the_first_calls_of_another_thread() -> None:
    """A child inherits static variables that another thread of the parent may be initializing."""
    tests = Path(__file__).parent
    for _ in range(10):
        printed(FIRST_CALLS, cwd=tests, PYTHONPATH=str(tests.parent))
