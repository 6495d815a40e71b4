"""What calls allocate and free."""

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def memory_changes(call: Callable[[], Result]) -> tuple[list[int], Result]:
    """The bytes of each tensor that a call makes, and, negative, of each that it frees; and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"], result
