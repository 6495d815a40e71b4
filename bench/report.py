"""Reports a run: tables in the terminal; results.json, results.md and charts in a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.measure import COPY, Measurement
from bench.overhead import Overhead
from bench.peers import NORMOPS
from bench.problems import dtype_name
from bench.tables import Table, details_table, overhead_table, summary_table
from bench.timing import Timing


@dataclass
class Report:
    environment: Mapping[str, str]
    overhead: Overhead | None = None
    measurements: list[Measurement] = field(default_factory=list)

    def header(self) -> str:
        return "\n".join(f"{name + ':':9}{value}" for name, value in self.environment.items())

    def tables(self) -> list[Table]:
        """Returns the tables in the order of importance."""
        groups = self._groups().values()
        overhead = [overhead_table(self.overhead)] if self.overhead is not None else []
        return [*overhead, *map(summary_table, groups), *map(details_table, groups)]

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
        overhead = self.overhead.timings if self.overhead is not None else {}
        results = {
            "environment": dict(self.environment),
            "overhead": {
                mode: {name: _timing_json(timing) for name, timing in timings.items()}
                for mode, timings in overhead.items()
            },
            "measurements": [_measurement_json(measurement) for measurement in self.measurements],
        }
        images = [f"![{path.stem}]({path.name})" for path in charts]
        parts = ["```", self.header(), "```", "", *(table.markdown() for table in self.tables()), *images, ""]
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / "results.md").write_text("\n".join(parts))
        return [folder / "results.json", folder / "results.md"]

    def _groups(self) -> dict[tuple[str, str], list[Measurement]]:
        def key(measurement: Measurement) -> tuple[str, str]:
            return measurement.problem.operator.name, measurement.problem.memory

        # A stable order: operators and memories as they were measured on the first size.
        order = list(dict.fromkeys(map(key, self.measurements)))
        ordered = sorted(self.measurements, key=lambda measurement: order.index(key(measurement)))
        return {name: list(group) for name, group in groupby(ordered, key)}


def _timing_json(timing: Timing) -> dict[str, Any]:
    names = ("median", "p20", "p80", "calls_per_turn", "seconds")
    return {name: getattr(timing, name) for name in names}


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    problem, size = measurement.problem, measurement.problem.size

    def call(name: str, timing: Timing) -> dict[str, Any]:
        bases = [base for base in (COPY, NORMOPS.name) if base in measurement.timings]
        bandwidth = {"gb_per_s": measurement.gb_per_s(name), "of_copy": measurement.of_copy(name)}
        return _timing_json(timing) | bandwidth | {f"over_{base}": measurement.ratio(name, base) for base in bases}

    return {
        "operator": problem.operator.name,
        "rows": size.rows,
        "cols": size.cols,
        "dtype": dtype_name(size.dtype),
        "device": size.device,
        "memory": problem.memory,
        "bytes": problem.bytes,
        "processes": measurement.processes,
        "calls": {name: call(name, timing) for name, timing in measurement.timings.items()},
        "wrong": measurement.wrong,
        "left_out": measurement.left_out,
    }
