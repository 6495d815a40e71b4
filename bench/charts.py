"""Draws charts of the measurements of one operator in one kind of memory."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from bench.measure import COPY, Measurement
from bench.peers import NORMOPS, PEERS
from bench.problems import dtype_name

# Colors of a saved chart: enough for its lines and their edges, in a fraction of the bytes.
PALETTE = 64
COLORS = {peer.name: f"C{index}" for index, peer in enumerate(PEERS)} | {COPY: "black"}


def save_charts(measurements: Sequence[Measurement], stem: str, folder: Path) -> list[Path]:
    """Writes the charts whose lines have enough points, and returns their paths."""
    charts: dict[str, tuple[dict[str, list[Measurement]], Callable[[Axes, list[Measurement]], None]]] = {
        "over_width": (_panels(measurements, "cols", "rows"), partial(_draw_ratios, along="cols")),
        "over_rows": (_panels(measurements, "rows", "cols"), partial(_draw_ratios, along="rows")),
        "bandwidth": (_panels(measurements, "cols", "tensor_bytes", least=3), _draw_bandwidths),
        "roofline": (_panels(measurements, "tensor_bytes", "device"), _draw_roofline),
    }
    paths = []
    for name, (panels, draw) in charts.items():
        if panels:
            figure, axes = _subplots(len(panels))
            for ax, (title, panel) in zip(axes, panels.items(), strict=True):
                draw(ax, panel)
                ax.set_title(title)
                ax.grid(alpha=0.3)
            by_label = {t: handle for ax in axes for handle, t in zip(*ax.get_legend_handles_labels(), strict=True)}
            figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=4, frameon=False)
            problem = measurements[0].problem
            figure.suptitle(f"{problem.operator.name}, {problem.memory} outputs")
            paths.append(folder / f"{stem}_{name}.png")
            save_figure(figure, paths[-1])
    return paths


def save_figure(figure: Figure, path: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100, bbox_inches="tight")  # the legend may be wider than the panels
    Image.open(drawn).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(path, optimize=True)


def _panels(
    measurements: Sequence[Measurement], along: str, fixed: str, least: int = 2
) -> dict[str, list[Measurement]]:
    """Returns the measurements of each dtype and fixed property of the size, in order along another one, by title."""
    dtypes = list(dict.fromkeys(m.problem.size.dtype for m in measurements))
    panels = defaultdict[tuple[torch.dtype, Any], list[Measurement]](list)

    def key(measurement: Measurement) -> tuple[Any, ...]:
        size = measurement.problem.size
        return dtypes.index(size.dtype), getattr(size, fixed), getattr(size, along), measurement.problem.bytes

    for measurement in sorted(measurements, key=key):
        panels[measurement.problem.size.dtype, getattr(measurement.problem.size, fixed)].append(measurement)

    def title(dtype: torch.dtype, value: Any) -> str:
        if fixed == "device":
            return dtype_name(dtype)
        of_value = f"{value / 2**20:g} MiB per tensor" if fixed == "tensor_bytes" else f"{value} {fixed}"
        return f"{dtype_name(dtype)}, {of_value}"

    return {title(*of): panel for of, panel in panels.items() if len(panel) >= least}


def _draw_ratios(ax: Axes, panel: Sequence[Measurement], along: str) -> None:
    """Draws the time relative to the copy along one dimension."""
    sizes = [getattr(m.problem.size, along) for m in panel]
    _draw(ax, panel, sizes, lambda m, name: m.ratio(name, COPY))
    # The operator's time if it moved its bytes at the copy's bandwidth.
    least = [m.problem.bytes / (2 * m.problem.size.tensor_bytes) for m in panel]
    ax.plot(sizes, least, color="black", linestyle="--", label="at a copy's GB/s")
    ax.set(xlabel=along, ylabel="time / time of a copy", xscale="log", yscale="log")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    _plain_numbers(ax)


def _draw_bandwidths(ax: Axes, panel: Sequence[Measurement]) -> None:
    """Draws the fraction of the copy's GB/s over width."""
    sizes = [m.problem.size.cols for m in panel]
    _draw(ax, panel, sizes, Measurement.of_copy)
    ax.axhline(1, color="black", linestyle="--", label="copy")
    ax.set(xlabel="cols", ylabel="GB/s / GB/s of copy", xscale="log", ylim=(0, None))
    ax.set_xticks(sizes, [f"{size >> 10}K" if size % 1024 == 0 else str(size) for size in sizes])
    ax.xaxis.set_minor_formatter(NullFormatter())


def _draw_roofline(ax: Axes, panel: Sequence[Measurement]) -> None:
    """Draws the achieved GB/s over the bytes moved, with the copies as the roof."""
    sizes = [m.problem.bytes for m in panel]
    _draw(ax, panel, sizes, Measurement.gb_per_s, linestyle="")
    ax.plot(sizes, [m.gb_per_s(COPY) for m in panel], color="black", marker="o", label=COPY)
    ax.set(xlabel="bytes that have to move", ylabel="GB/s", xscale="log", yscale="log")
    ax.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    _plain_numbers(ax)


def _draw(
    ax: Axes,
    panel: Sequence[Measurement],
    xs: Sequence[int],
    y: Callable[[Measurement, str], float],
    linestyle: str = "-",
) -> None:
    """Draws a line for each peer."""
    for name in (peer.name for peer in PEERS):
        points = [(x, y(m, name)) for x, m in zip(xs, panel, strict=True) if name in m.timings]
        if points:
            width = 2.5 if name == NORMOPS.name else 1.2
            style: dict[str, Any] = {"color": COLORS[name], "linewidth": width, "linestyle": linestyle, "label": name}
            ax.plot(*zip(*points, strict=True), marker="o", markersize=5, **style)


def _subplots(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.5 + 4.2 * columns, 1.2 + 3.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _plain_numbers(ax: Axes) -> None:
    # Powers of ten alone would leave an axis of two decades almost without numbers.
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
