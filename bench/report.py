"""Reports a run: tables in the terminal; results.json, results.md and charts in a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import Measurement
from bench.overhead import Overhead
from bench.problems import dtype_name
from bench.tables import Table, details_table, overhead_table, summary_table
from bench.timing import Timing

TABLE_WIDTH = 160


@dataclass
class Report:
    environment: Mapping[str, str]
    cache: str
    overhead: Overhead | None = None
    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def header(self) -> str:
        return "\n".join(f"{name + ':':9}{value}" for name, value in self.environment.items())

    def print_header(self, console: Console) -> None:
        console.print(self.header(), soft_wrap=True)

    def print_overhead(self, console: Console) -> None:
        print_tables(console, self.overhead_tables())

    def print_measurements(self, console: Console) -> None:
        print_tables(console, [*self.details(), *self.summaries()])
        for reason in self.skipped:
            console.print(f"skipped {reason}", soft_wrap=True)

    def overhead_tables(self) -> list[Table]:
        return [overhead_table(self.overhead)] if self.overhead is not None else []

    def summaries(self) -> list[Table]:
        return [summary_table(group, self.cache) for group in self._groups().values()]

    def details(self) -> list[Table]:
        return [details_table(group, self.cache) for group in self._groups().values()]

    def save(self, folder: Path) -> list[Path]:
        if find_spec("matplotlib") is None:
            return self.save_results(folder)
        from bench.charts import save_charts

        charts = [
            path
            for (operator, memory), group in self._groups().items()
            for path in save_charts(group, f"{operator}_{memory}", folder)
        ]
        return [*self.save_results(folder, charts), *charts]

    def save_results(self, folder: Path, charts: Sequence[Path] = ()) -> list[Path]:
        """Saves the results so far, as later measurements may fail."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self._json(), indent=1) + "\n")
        (folder / "results.md").write_text(self._markdown(charts))
        return [folder / "results.json", folder / "results.md"]

    def _groups(self) -> dict[tuple[str, str], list[Measurement]]:
        def key(measurement: Measurement) -> tuple[str, str]:
            return measurement.problem.operator.name, measurement.problem.memory

        # A stable order: operators and memories as they were measured on the first size.
        order = list(dict.fromkeys(map(key, self.measurements)))
        ordered = sorted(self.measurements, key=lambda measurement: order.index(key(measurement)))
        return {name: list(group) for name, group in groupby(ordered, key)}

    def _markdown(self, charts: Sequence[Path]) -> str:
        tables = [*self.overhead_tables(), *self.summaries(), *self.details()]
        return "\n".join(
            [
                "```",
                self.header(),
                "```",
                "",
                *(table.markdown() for table in tables),
                *(f"skipped {reason}\n" for reason in self.skipped),
                *(f"![{path.stem}]({path.name})" for path in charts),
                "",
            ]
        )

    def _json(self) -> dict[str, Any]:
        return {
            "environment": dict(self.environment),
            "cache": self.cache,
            "overhead": {
                mode: {name: _timing_json(timing) for name, timing in timings.items()}
                for mode, timings in (self.overhead.timings if self.overhead is not None else {}).items()
            },
            "measurements": [_measurement_json(measurement) for measurement in self.measurements],
            "skipped": self.skipped,
        }


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    # Wrapped lines in a narrow terminal are more useful than truncated columns.
    wide = Console(width=max(console.width, TABLE_WIDTH), highlight=False)
    for table in tables:
        wide.print(table.rich())


def _timing_json(timing: Timing) -> dict[str, Any]:
    return {
        "median": timing.median,
        "p20": timing.p20,
        "p80": timing.p80,
        "calls_per_turn": timing.calls_per_turn,
        "seconds": timing.seconds,
    }


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    problem = measurement.problem
    return {
        "operator": problem.operator.name,
        "rows": problem.size.rows,
        "cols": problem.size.cols,
        "dtype": dtype_name(problem.size.dtype),
        "device": problem.size.device,
        "memory": problem.memory,
        "bytes": problem.bytes,
        "processes": measurement.processes,
        "calls": {
            name: _timing_json(timing)
            | {"gb_per_s": measurement.gb_per_s(name), "of_copy": measurement.of_copy(name)}
            | {
                f"over_{base}": measurement.ratio(name, base)
                for base in ("copy", "normops")
                if base in measurement.timings
            }
            for name, timing in measurement.timings.items()
        },
        "wrong": measurement.wrong,
        "left_out": measurement.left_out,
    }
