"""Measures the problems of a run, in this process or in several new ones."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from rich.progress import Progress

from bench import environment
from bench.arguments import Arguments, parse_arguments
from bench.measure import measure, merge
from bench.problems import MOST_SETS, count_sets, make_inputs
from bench.report import Report
from reference import oracle


def set_up(arguments: Arguments) -> None:
    torch.set_num_threads(arguments.threads)
    environment.keep_freed_memory()
    oracle.sums_rows_by_tree = arguments.device == "cpu"
    if arguments.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default stream


def measure_problems(arguments: Arguments, report: Report, progress: Progress) -> None:
    problems = arguments.problems()
    interleave = arguments.processes is not None
    reads = {name for operator in arguments.operators for name in operator.reads}
    task = progress.add_task("", total=sum(map(len, problems.values())))
    for size, of_size in problems.items():
        sets = count_sets(size, environment.cold_bytes(size.device) if arguments.cache == "cold" else 0)
        if sets > MOST_SETS:
            report.skipped.append(f"{size}: {sets} sets of buffers would be needed to keep it out of the caches")
            progress.advance(task, len(of_size))
            continue
        inputs = [make_inputs(size, reads, seed) for seed in range(sets)]
        groups = [of_size] if interleave else [[problem] for problem in of_size]
        for together in filter(None, groups):
            progress.update(task, description=str(together[0]))
            seconds = arguments.seconds * len(together)
            report.measurements += measure(
                together, inputs, arguments.peers, turns=arguments.turns, seconds=seconds, interleaved=interleave
            )
            if arguments.save is not None:
                report.save_results(arguments.save)
            progress.advance(task, len(together))


def measure_in_this_process() -> Report:
    """Measures the problems of the command line, which a process inherits from its parent."""
    arguments = replace(parse_arguments(None), save=None)
    set_up(arguments)
    report = Report({}, arguments.cache)
    measure_problems(arguments, report, Progress(disable=True))
    return report


def measure_in_processes(arguments: Arguments, report: Report, progress: Progress) -> None:
    reports = []
    for _ in progress.track(range(arguments.processes or 1), description="processes"):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # a new process, with unused memory
            reports.append(pool.submit(measure_in_this_process).result())
    report.measurements = [merge(of_problem) for of_problem in zip(*(r.measurements for r in reports), strict=True)]
    report.skipped = reports[0].skipped
    if arguments.save is not None:
        report.save_results(arguments.save)
