"""Times normops beside its peers, in turns, after checking every result: python -m bench.

Figures are medians with the 20th and 80th percentile. GB/s count the bytes that have to move, however a peer computes.
"over copy" compares with a copy of the input, "over normops" with normops, both timed in the same turns. Outputs are
either preallocated (calls write into given memory, such as the .out overloads; the copy is y.copy_(x)) or fresh (calls
allocate what they return, page faults included, which on Linux those of 32 MiB and more have each time; the copy is
x.clone()). rms_norm_backward is one operator where outputs are preallocated, and autograd's backward where they are
fresh.
"""

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import environment
from bench.arguments import Arguments, parse_arguments
from bench.measure import measure
from bench.overhead import measure_overhead
from bench.problems import MOST_SETS, count_sets, make_inputs
from bench.report import Report


def measure_problems(arguments: Arguments, report: Report, progress: Progress) -> None:
    problems = arguments.problems()
    reads = {name for operator in arguments.operators for name in operator.reads}
    task = progress.add_task("", total=sum(map(len, problems.values())))
    for size, of_size in problems.items():
        sets = count_sets(size, environment.cold_bytes(size.device) if arguments.cache == "cold" else 0)
        if sets > MOST_SETS:
            report.skipped.append(f"{size}: {sets} sets of buffers would be needed to keep it out of the caches")
            progress.advance(task, len(of_size))
            continue
        inputs = [make_inputs(size, reads, seed) for seed in range(sets)]
        for problem in of_size:
            progress.update(task, description=str(problem))
            report.measurements.append(
                measure(problem, inputs, arguments.peers, turns=arguments.turns, seconds=arguments.seconds)
            )
            if arguments.save is not None:
                report.save_results(arguments.save)
            progress.advance(task)


def main() -> None:
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(arguments.threads)
    environment.keep_freed_memory()
    if arguments.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default stream
    console = Console(highlight=False)
    report = Report(environment.describe(), arguments.cache)
    report.print_header(console)
    if arguments.overhead:
        with console.status("overhead"):
            report.overhead = measure_overhead(arguments.device)
        report.print_overhead(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        measure_problems(arguments, report, progress)
    report.print_measurements(console)
    if arguments.save is not None:
        console.print(f"wrote {', '.join(map(str, report.save(arguments.save)))}", soft_wrap=True)


if __name__ == "__main__":
    main()
