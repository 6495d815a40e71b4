"""Measures one problem: builds the calls, checks their results, times them in turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch

from bench.checks import find_error
from bench.peers import Builder, Peer
from bench.problems import Problem, Tensors
from bench.timing import Call, Timer, Timing, alternate, device_timer

COPY = "copy"


@dataclass
class Measurement:
    problem: Problem
    timings: dict[str, Timing] = field(default_factory=dict)
    """By peer, and of the copy of the input."""
    wrong: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def gb_per_s(self, name: str) -> float:
        moved = 2 * self.problem.size.tensor_bytes if name == COPY else self.problem.bytes
        return moved / self.timings[name].median / 1e9

    def of_copy(self, name: str) -> float:
        """The share of the copy's GB/s."""
        return self.gb_per_s(name) / self.gb_per_s(COPY)

    def ratio(self, name: str, base: str) -> float:
        return self.timings[name].median / self.timings[base].median


def measure(
    problem: Problem, sets: Sequence[Tensors], peers: Sequence[Peer], *, turns: int, seconds: float
) -> Measurement:
    """Measures on these sets of inputs, each call on the next of them."""
    measurement = Measurement(problem)
    position = cycle(range(len(sets)))
    device = problem.size.device
    timers = {COPY: device_timer(_rotate(_copy(problem.memory), sets, position), device)}
    torch.compiler.reset()  # beyond a number of shapes, torch.compile gives up on a function
    for peer in peers:
        build = peer.builder(problem)
        if reason := peer.why_not(problem):
            measurement.left_out[peer.name] = reason
        elif build is not None:
            try:
                error = find_error(peer, build, problem.operator, sets[0], build(sets[0])())
                if error is None:
                    timers[peer.name] = _tried(device_timer(_rotate(build, sets, position), device))
            except Exception as failure:  # a peer that fails is reported, and the others are measured
                error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            if error is not None:
                measurement.wrong[peer.name] = error
    measurement.timings = alternate(timers, turns=turns, seconds=seconds, period=len(sets))
    return measurement


def _tried(timer: Timer) -> Timer:
    timer(1)
    return timer


def _copy(memory: str) -> Builder:
    if memory == "fresh":
        return lambda inputs: inputs["input"].clone
    return lambda inputs: partial(torch.empty_like(inputs["input"]).copy_, inputs["input"])


def _rotate(build: Builder, sets: Sequence[Tensors], position: Iterator[int]) -> Call:
    """The calls on all sets as one; the position is shared, so that no call finds a set that another just left."""
    calls = [build(inputs) for inputs in sets]
    for call in calls:
        call()  # maps the memory that was allocated for its results
    if len(calls) == 1:
        return calls[0]
    return lambda: calls[next(position)]()
