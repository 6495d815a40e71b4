"""Measures the memory that calls allocate and free."""

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def memory_changes(call: Callable[[], Result]) -> tuple[list[int], Result]:
    """Returns the bytes of each tensor that a call allocates, or frees (negative), and the result of the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"], result
