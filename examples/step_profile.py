"""Profiles a training step: the time in its norms, its operators and its memory."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

OPERATORS = ("aten::", "normops::")
NORM_OPERATORS = {
    "aten::rms_norm",
    "normops::rms_norm",
    "normops::add_rms_norm",
    "normops::rms_norm_backward",
    "normops::gated_rms_norm",
    "normops::gated_rms_norm_backward",
    "normops::rms_norm_rope",
    "normops::rms_norm_rope_backward",
}
# The name of the calls of norm modules.
RANGE = "norm"
AUTOGRAD_NODE = "autograd::engine::evaluate_function"


class StepProfile(NamedTuple):
    milliseconds: float
    norm_milliseconds: float
    operators: int
    peak_bytes: int


def profile_step(step: Callable[[], object], norms: Iterable[nn.Module], device: str) -> StepProfile:
    """Returns the times of a step, and the peak bytes of tensors beyond those at its start.

    Calls inside the modules `norms` count as time in norms; so do NORM_OPERATORS, as compiled code has no modules.
    """
    activities = [ProfilerActivity.CPU]
    if device == "cpu":
        # Kineto, which the profiler uses, logs each start and stop at a level above its errors, which concern GPUs.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats()
        bytes_at_start = torch.cuda.memory_allocated()
    with ExitStack() as stack, profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        for norm in norms:
            stack.enter_context(named(norm))
        start = time.perf_counter()
        step()
        milliseconds = (time.perf_counter() - start) * 1e3
    if device == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated() - bytes_at_start
    else:
        changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        peak_bytes = max(accumulate(event.nbytes() for event in changes))
    events = profiler.events()
    called = sum(
        event.name.startswith(OPERATORS)
        and not any(ancestor.name.startswith(OPERATORS) for ancestor in with_ancestors(event.cpu_parent))
        for event in events
    )
    return StepProfile(milliseconds, norm_microseconds(events, device) / 1e3, called, peak_bytes)


@contextmanager
def named(module: nn.Module) -> Iterator[None]:
    """Records a RANGE in the profile for each call of the module."""
    ranges: list[record_function] = []

    def enter(module: nn.Module, arguments: object) -> None:
        ranges.append(record_function(RANGE))
        ranges[-1].__enter__()

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave)
    yield
    for hook in hooks:
        hook.remove()


def norm_microseconds(events: Iterable[FunctionEvent], device: str) -> float:
    """Returns the time in the events of norms, and in the autograd nodes that were recorded there."""
    # An operator's event has the number that the next autograd node will get. If the operator records no node,
    # the next operator has the same number: the last event with a number is the one that recorded the node.
    recorded_in_norm: dict[int, bool] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        names = [each.name for each in with_ancestors(event)]
        if event.sequence_nr >= 0 and not any(name.startswith(AUTOGRAD_NODE) for name in names):
            recorded_in_norm[event.sequence_nr] = any(map(is_norm, with_ancestors(event)))

    def counts(event: FunctionEvent) -> bool:
        if event.name.startswith(AUTOGRAD_NODE):
            return recorded_in_norm.get(event.sequence_nr, False)
        return is_norm(event)

    counted = [event for event in events if counts(event)]
    outermost = [event for event in counted if not any(map(counts, with_ancestors(event.cpu_parent)))]
    times = (event.device_time_total if device == "cuda" else event.cpu_time_total for event in outermost)
    return sum(times)


def is_norm(event: FunctionEvent) -> bool:
    """Returns whether an event is an operator of a norm, or any event inside a RANGE."""
    return event.name in NORM_OPERATORS or any(ancestor.name == RANGE for ancestor in with_ancestors(event.cpu_parent))


def with_ancestors(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    while event is not None:
        yield event
        event = event.cpu_parent
