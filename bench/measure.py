"""Measures problems of one size: builds the calls, checks their results, times them in turns."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.checks import find_error
from bench.operators import Operator
from bench.peers import Peer
from bench.problems import Problem, Tensors
from bench.timing import Call, Timer, Timing, alternate, device_timer, interleave

COPY = "copy"


@dataclass
class Measurement:
    problem: Problem
    timings: dict[str, Timing] = field(default_factory=dict)
    """By peer; COPY is the copy of the input."""
    wrong: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    processes: int | None = None
    """The number of processes whose medians the timings are; None if they are the timings of turns."""

    def gb_per_s(self, name: str) -> float:
        moved = 2 * self.problem.size.tensor_bytes if name == COPY else self.problem.bytes
        return moved / self.timings[name].median / 1e9

    def of_copy(self, name: str) -> float:
        """Returns the fraction of the copy's GB/s."""
        return self.gb_per_s(name) / self.gb_per_s(COPY)

    def ratio(self, name: str, base: str) -> float:
        if self.processes is not None:
            return statistics.median(self.ratios(name, base))
        return self.timings[name].median / self.timings[base].median

    def ratios(self, name: str, base: str) -> list[float]:
        """Returns a ratio for each turn or process."""
        pairs = zip(self.timings[name].seconds, self.timings[base].seconds, strict=True)
        return [seconds / of_base for seconds, of_base in pairs]


def measure(
    problems: Sequence[Problem],
    inputs: Tensors,
    peers: Sequence[Peer],
    *,
    turns: int,
    seconds: float,
    interleaved: bool = False,
) -> list[Measurement]:
    """Measures problems of one size and memory, and one copy."""
    measurements = [Measurement(problem) for problem in problems]
    copy: Call = inputs["input"].clone
    if problems[0].memory == "preallocated":
        copy = partial(torch.empty_like(inputs["input"]).copy_, inputs["input"])
    timers: dict[tuple[Operator | None, str], Timer] = {(None, COPY): device_timer(copy, problems[0].size.device)}
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()  # beyond a number of shapes, torch.compile gives up on a function
    for measurement in measurements:
        # Problems of one size share their inputs; each operator gets those that it reads.
        read = {name: inputs[name] for name in measurement.problem.operator.reads}
        for peer in peers:
            if timer := _timer(measurement, peer, read):
                timers[measurement.problem.operator, peer.name] = timer
    timings = (interleave if interleaved else alternate)(timers, turns=turns, seconds=seconds)
    for measurement in measurements:
        of_problem = (None, measurement.problem.operator)
        measurement.timings = {name: timing for (of, name), timing in timings.items() if of in of_problem}
    return measurements


def merge(measurements: Sequence[Measurement]) -> Measurement:
    """Merges the measurements of one problem in several processes."""
    first = measurements[0]
    wrong = {name: error for measurement in measurements for name, error in measurement.wrong.items()}
    timings = {
        name: Timing([measurement.timings[name].median for measurement in measurements], timing.calls_per_turn)
        for name, timing in first.timings.items()
        if name not in wrong
    }
    return Measurement(first.problem, timings, wrong, first.left_out, len(measurements))


def _timer(measurement: Measurement, peer: Peer, inputs: Tensors) -> Timer | None:
    """Returns a timer for the peer, or None after recording the reason in the measurement."""
    problem, build = measurement.problem, peer.builder(measurement.problem)
    if reason := peer.why_not(problem):
        measurement.left_out[peer.name] = reason
    elif build is not None:
        try:
            call = build(inputs)
            error = find_error(peer, build, problem.operator, inputs, call())
            if error is None:
                timer = device_timer(call, problem.size.device)
                timer(1)
                return timer
        except Exception as failure:  # a peer that fails is reported, and the others are measured
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        measurement.wrong[peer.name] = error
    return None
