"""Times normops beside its peers, in turns, after checking every result: python -m bench.

Figures are medians with the 20th and 80th percentile. GB/s count the bytes that have to move, however a peer computes.
"over copy" compares with a copy of the input, "over normops" with normops, both timed in the same turns. Outputs are
either preallocated (calls write into given memory, such as the .out overloads; the copy is y.copy_(x)) or fresh (calls
allocate what they return, page faults included, which on Linux those of 32 MiB and more have each time; the copy is
x.clone()). rms_norm_backward is one operator where outputs are preallocated, and autograd's backward where they are
fresh.

Each problem is measured by itself, so that an output often finds the place in memory that the last one left. With
--interleave, single calls of all operators alternate on each size, in several processes: timings are the medians of the
processes, and ratios are those in each process, of which there are the median, the least and the most.
"""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import environment
from bench.arguments import parse_arguments
from bench.overhead import measure_overhead
from bench.report import Report
from bench.run import measure_in_processes, measure_problems, set_up


def main() -> None:
    arguments = parse_arguments(__doc__)
    set_up(arguments)
    console = Console(highlight=False)
    report = Report(environment.describe(), arguments.cache)
    report.print_header(console)
    if arguments.overhead:
        with console.status("overhead"):
            report.overhead = measure_overhead(arguments.device)
        report.print_overhead(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        measure_all = measure_problems if arguments.processes is None else measure_in_processes
        measure_all(arguments, report, progress)
    report.print_measurements(console)
    if arguments.save is not None:
        console.print(f"wrote {', '.join(map(str, report.save(arguments.save)))}", soft_wrap=True)


if __name__ == "__main__":
    main()
