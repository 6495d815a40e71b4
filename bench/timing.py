"""Times calls in alternating turns, so that drifts of the machine's speed affect all of them equally."""

import math
import random
import statistics
import time
import timeit
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

# A turn has as many calls as take this long: well above the clock's resolution and cost.
TURN_SECONDS = 1e-3

# A turn shorter than this runs once untimed first: it is too short to outlast the effects of the previous call
# (threads that still spin, caches full of other tensors).
SETTLE_SECONDS = 1e-2


@dataclass(frozen=True)
class Timing:
    seconds: list[float]
    """Seconds per call: one number for each turn, or the median of each process."""
    calls_per_turn: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p20(self) -> float:
        return statistics.quantiles(self.seconds, n=5, method="inclusive")[0]

    @property
    def p80(self) -> float:
        return statistics.quantiles(self.seconds, n=5, method="inclusive")[3]


# Returns the seconds that a number of consecutive calls takes.
Timer = Callable[[int], float]


def host_timer(call: Call, device: str) -> Timer:
    """Returns a timer with the host's clock, which includes the overhead of the calls."""

    def clock() -> float:
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    return timeit.Timer(call, timer=clock).timeit


def device_timer(call: Call, device: str) -> Timer:
    """Returns a timer with the device's clock, for calls captured into a CUDA graph; on the CPU, the host timer."""
    if device == "cpu":
        return host_timer(call, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Captures on the current stream, as autograd runs a backward on the stream of its forward.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(count):
                call()
        return graph

    def timer(count: int) -> float:
        if count not in graphs:
            call()
            graphs[count] = capture(count)
        start.record()
        graphs[count].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return timer


def alternate(timers: Mapping[Key, Timer], *, turns: int, seconds: float) -> dict[Key, Timing]:
    """Runs at least ``turns`` turns of each timer, and all of them for at least ``seconds`` in total."""
    counts = {}
    for name, timer in timers.items():
        timer(1)
        shortest = min(timer(1) for _ in range(3))
        counts[name] = max(1, math.ceil(TURN_SECONDS / shortest))
    takes = {name: partial(_take_turn, timer, counts[name]) for name, timer in timers.items()}
    taken = _shuffled(takes, random.Random(0), turns, seconds)
    return {name: Timing(taken[name], counts[name]) for name in timers}


def interleave(timers: Mapping[Key, Timer], *, turns: int, seconds: float) -> dict[Key, Timing]:
    """Alternates single calls, so that no output reuses the memory of the same call's previous output."""
    takes = {name: partial(timer, 1) for name, timer in timers.items()}
    # The order differs between processes, as it determines the addresses of outputs.
    return {name: Timing(taken, 1) for name, taken in _shuffled(takes, random.Random(), turns, seconds).items()}


def _shuffled(
    takes: Mapping[Key, Callable[[], float]], generator: random.Random, turns: int, seconds: float
) -> dict[Key, list[float]]:
    taken: dict[Key, list[float]] = {name: [] for name in takes}
    order = list(takes)
    start = time.perf_counter()
    turn = 0
    while turn < turns or time.perf_counter() - start < seconds:
        generator.shuffle(order)  # no call always follows the same other one
        for name in order:
            taken[name].append(takes[name]())
        turn += 1
    return taken


def _take_turn(timer: Timer, count: int) -> float:
    seconds = timer(count)
    if seconds < SETTLE_SECONDS:
        seconds = timer(count)
    return seconds / count
