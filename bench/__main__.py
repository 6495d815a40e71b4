"""Times normops and its peers in alternating turns, after checking every result: python -m bench.

Timings are medians with the 20th and 80th percentiles. GB/s count the bytes that an operator must move, regardless of
how a peer computes. "over copy" is relative to a copy of the input, "over normops" to normops, in the same turns.
Preallocated outputs are written into given memory, as by the .out overloads; their copy is y.copy_(x). Fresh outputs
are allocated by each call; their copy is x.clone(). Their time includes page faults, which Linux causes in every call
for outputs of 32 MiB and more. rms_norm_backward is one operator with preallocated outputs, and autograd's backward
with fresh ones.

Each problem is measured separately, so an output often reuses the memory of the previous one. With --interleave, single
calls of all operators alternate on each size, in several processes. Timings are then medians over the processes. Ratios
are computed in each process; their median, minimum and maximum are shown.
"""

from rich.console import Console

from bench import environment
from bench.arguments import parse_arguments
from bench.overhead import measure_overhead
from bench.report import Report
from bench.run import measure_in_processes, measure_problems, set_up


def main() -> None:
    arguments = parse_arguments(__doc__)
    set_up(arguments)
    report = Report(environment.describe())
    print(report.header(), flush=True)
    if arguments.overhead:
        report.overhead = measure_overhead(arguments.device)
    measure_all = measure_problems if arguments.processes is None else measure_in_processes
    measure_all(arguments, report)
    # Wrapped lines in a narrow terminal are more useful than truncated columns.
    wide = Console(width=max(Console().width, 160), highlight=False)
    for table in report.tables()[::-1]:  # the end of the output is read first
        wide.print(table.rich())
    if arguments.save is not None:
        print(f"wrote {', '.join(map(str, report.save(arguments.save)))}")


if __name__ == "__main__":
    main()
