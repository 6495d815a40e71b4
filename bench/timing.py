"""Timing calls in turns, so that a machine that drifts slows all of them alike."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from timeit import Timer

import torch

Call = Callable[[], object]

# A turn is made of as many calls as take this long: well above the clock's resolution and its own cost.
TURN_SECONDS = 1e-3

# A turn shorter than this is made once untimed first: it is too short to outlast what the call before it left behind
# (threads that still spin, caches full of other tensors).
SETTLE_SECONDS = 1e-2


@dataclass(frozen=True)
class Timing:
    seconds: list[float]
    """Per call, one for each turn."""
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


def clock(device: str) -> Callable[[], float]:
    if device == "cpu":
        return time.perf_counter

    def synchronized() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return synchronized


def alternate(calls: Mapping[str, Call], device: str, *, turns: int, seconds: float) -> dict[str, Timing]:
    """Times each of the calls at least ``turns`` times, and all of them for at least ``seconds``."""
    timers = {name: Timer(call, timer=clock(device)) for name, call in calls.items()}
    counts = {}
    for name, timer in timers.items():
        timer.timeit(1)
        counts[name] = max(1, math.ceil(TURN_SECONDS / min(timer.repeat(repeat=3, number=1))))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    turn = 0
    while turn < turns or time.perf_counter() - start < seconds:
        shuffle(order)  # no call always follows the same other one
        for name in order:
            taken[name].append(_take_turn(timers[name], counts[name]))
        turn += 1
    return {name: Timing(taken[name], counts[name]) for name in calls}


def _take_turn(timer: Timer, count: int) -> float:
    seconds = timer.timeit(count)
    if seconds < SETTLE_SECONDS:
        seconds = timer.timeit(count)
    return seconds / count
