"""Measures the problems of a run, in this process or in several new ones."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from rich.progress import track

from bench import environment
from bench.arguments import Arguments, parse_arguments
from bench.measure import measure, merge
from bench.problems import make_inputs
from bench.report import Report
from reference import oracle


def set_up(arguments: Arguments) -> None:
    torch.set_num_threads(arguments.threads)
    environment.keep_freed_memory()
    oracle.sums_rows_by_tree = arguments.device == "cpu"
    if arguments.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default stream


def measure_problems(arguments: Arguments, report: Report) -> None:
    interleave = arguments.processes is not None
    reads = {name for operator in arguments.operators for name in operator.reads}
    for size, of_size in track(arguments.problems().items(), "sizes", disable=interleave):
        inputs = make_inputs(size, reads)
        groups = [of_size] if interleave else [[problem] for problem in of_size]
        for together in filter(None, groups):
            seconds = arguments.seconds * len(together)
            report.measurements += measure(
                together, inputs, arguments.peers, turns=arguments.turns, seconds=seconds, interleaved=interleave
            )
            if arguments.save is not None:
                report.save_results(arguments.save)


def measure_in_this_process() -> Report:
    """Measures the problems of the command line, which a process inherits from its parent."""
    arguments = replace(parse_arguments(None), save=None)
    set_up(arguments)
    report = Report({})
    measure_problems(arguments, report)
    return report


def measure_in_processes(arguments: Arguments, report: Report) -> None:
    reports = []
    for _ in track(range(arguments.processes or 1), "processes"):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # a new process, with unused memory
            reports.append(pool.submit(measure_in_this_process).result())
    report.measurements = [merge(of_problem) for of_problem in zip(*(r.measurements for r in reports), strict=True)]
    if arguments.save is not None:
        report.save_results(arguments.save)
