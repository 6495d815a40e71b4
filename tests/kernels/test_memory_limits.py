"""If memory runs out, an operator raises torch's error and has no other effect."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import memory_limits
import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")

PROGRAM = Path(memory_limits.__file__)


@pytest.fixture(scope="module")
def happened() -> dict[str, list[str]]:
    """Returns the outcomes by operator."""
    malloc = {
        "MALLOC_MMAP_THRESHOLD_": str(memory_limits.STEP),  # allocations beyond the heap are mapped separately
        "MALLOC_TOP_PAD_": "0",  # otherwise a heap that has just grown has room for a weight of 128 KiB
        "MALLOC_ARENA_MAX": "1",  # otherwise malloc falls back to the arenas of other threads
    }
    environment = os.environ | malloc | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(PROGRAM.parents[2])}
    command = (sys.executable, str(PROGRAM))
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    by_operator = defaultdict(list)
    for line in printed.stdout.splitlines():
        name, _, what = line.partition(": ")
        by_operator[name].append(what)
    return by_operator


@pytest.mark.parametrize("name", memory_limits.CALLS)
@pytest.mark.full
def test_failed_allocation_raises_without_side_effects(name: str, happened: dict[str, list[str]]) -> None:
    """After any failed allocation the process lives, inputs are unchanged, and the next call is correct."""
    *outcomes, end = happened[name]
    assert end == "ended with 0"
    for kind in memory_limits.PROBLEMS:
        *before, done = (what for of, what in (outcome.split(": ", 1) for outcome in outcomes) if of == kind)
        # The heap's free memory varies between calls: a call may succeed under a lower limit than one that fails.
        failed = [what for what in before if what != "done"]
        assert failed or "weight" not in memory_limits.CALLS[name][0].names  # it allocates nothing for given sums
        assert all(what.startswith("no memory for ") and what.split()[-1].isdigit() for what in failed), failed
        assert done == "done"
