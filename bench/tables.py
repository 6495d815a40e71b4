"""Formats the tables of a run, for the terminal and as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import rich.box
import rich.table

from bench.measure import COPY, Measurement
from bench.overhead import BASE, Overhead
from bench.peers import NORMOPS, PEERS

Row = tuple[str, ...]


@dataclass
class Table:
    title: str
    header: Row
    groups: list[list[Row]]
    """Rows, with a line after each group."""
    notes: list[str] = field(default_factory=list)

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self.title, title_justify="left", caption_justify="left", box=rich.box.SIMPLE_HEAD
        )
        table.caption = "\n".join(self.notes)
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for group in self.groups:
            for row in group:
                table.add_row(*row, style="bold" if NORMOPS.name in row else None)
            table.add_section()
        return table

    def markdown(self) -> str:
        ruler = ("---", *("---:" for _ in self.header[1:]))
        rows = (row for group in self.groups for row in group)
        lines = ["| " + " | ".join(row) + " |" for row in (self.header, ruler, *rows)]
        notes = [f"* {note}" for note in self.notes]
        return "\n".join([f"### {self.title}", "", *lines, *([""] if notes else []), *notes, ""])


def format_seconds(seconds: float) -> str:
    """Formats a time with three digits, more than timings reproduce."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def overhead_table(overhead: Overhead) -> Table:
    names = dict.fromkeys(name for timings in overhead.timings.values() for name in timings)

    def cell(name: str, mode: str) -> str:
        timings = overhead.timings[mode]
        if name not in timings:
            return ""
        median = timings[name].median
        return format_seconds(median) + (f" ({median / timings[BASE].median:.2f}x)" if name != BASE else "")

    title = f"Overhead: a call on {overhead.size} with 1 thread, in brackets relative to {BASE}"
    return Table(
        title, ("", *overhead.timings), [[(name, *(cell(name, mode) for mode in overhead.timings)) for name in names]]
    )


def summary_table(measurements: Sequence[Measurement]) -> Table:
    names = [peer.name for peer in PEERS if any(peer.name in m.timings or peer.name in m.wrong for m in measurements)]
    peers = [name for name in names if name != NORMOPS.name]

    def cell(m: Measurement, name: str) -> str:
        if name not in m.timings or NORMOPS.name not in m.timings:
            return "wrong" if name in m.wrong else "-"
        if name == NORMOPS.name:
            return f"{format_seconds(m.timings[name].median)} ({m.ratio(name, COPY):.2f}x)"
        ratios = m.ratios(name, NORMOPS.name)
        extremes = "" if m.processes is None else f" ({min(ratios):.2f} to {max(ratios):.2f})"
        return f"{m.ratio(name, NORMOPS.name):.2f}x{extremes}"

    def row(m: Measurement) -> Row:
        cells = (cell(m, name) for name in (NORMOPS.name, *peers))
        return str(m.problem.size), format_seconds(m.timings[COPY].median), *cells

    title = f"{_title(measurements)}: normops over copy, peers over normops"
    if measurements[0].processes is not None:
        title += " (minimum to maximum)"
    return Table(title, ("", COPY, NORMOPS.name, *peers), [[row(m) for m in measurements]])


def details_table(measurements: Sequence[Measurement]) -> Table:
    header = ("problem", "call", "median", "p20", "p80", "GB/s", "of copy", "over copy", "over normops")
    return Table(_title(measurements), header, [list(_details(m)) for m in measurements], list(_notes(measurements)))


def _title(measurements: Sequence[Measurement]) -> str:
    problem = measurements[0].problem
    processes = measurements[0].processes
    interleaved = f", interleaved in {processes} processes" if processes is not None else ""
    return f"{problem.operator.name}, {problem.memory} outputs{interleaved}"


def _details(measurement: Measurement) -> Iterator[Row]:
    label = str(measurement.problem.size)
    for name, timing in measurement.timings.items():
        times = (format_seconds(seconds) for seconds in (timing.median, timing.p20, timing.p80))
        over_normops = f"{measurement.ratio(name, NORMOPS.name):.2f}x" if NORMOPS.name in measurement.timings else "-"
        over_copy = f"{measurement.ratio(name, COPY):.2f}x"
        bandwidth = f"{measurement.gb_per_s(name):.1f}", f"{measurement.of_copy(name):.0%}"
        yield label, name, *times, *bandwidth, over_copy, over_normops
        label = ""
    for name in measurement.wrong:
        yield label, name, "wrong", *["-"] * 6


def _notes(measurements: Sequence[Measurement]) -> Iterator[str]:
    # A peer is left out for all sizes or for none.
    for name, reason in measurements[0].left_out.items():
        yield f"{name} left out: {reason}"
    for measurement in measurements:
        for name, reason in measurement.wrong.items():
            yield f"{name} on {measurement.problem.size} is wrong: {reason}"
    for peer in PEERS:
        if peer.own_definition and peer.name in measurements[0].timings:
            yield f"{peer.name} computes another function; it is here for scale"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
