"""Draws charts of the measurements of one operator in one kind of memory."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from bench.measure import COPY, Measurement
from bench.peers import NORMOPS, PEERS
from bench.problems import dtype_name

Dimension = Literal["rows", "cols"]

# Colors of a saved chart: enough for its lines and their edges, in a fraction of the bytes.
PALETTE = 64
COLORS = {peer.name: f"C{index}" for index, peer in enumerate(PEERS)} | {COPY: "black"}


def save_charts(measurements: Sequence[Measurement], stem: str, folder: Path) -> list[Path]:
    """Writes the charts whose lines have more than one point, and returns their paths."""
    figures = {
        "over_width": _ratios(measurements, along="cols", fixed="rows"),
        "over_rows": _ratios(measurements, along="rows", fixed="cols"),
        "bandwidth": _bandwidths(measurements),
        "roofline": _roofline(measurements),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{stem}_{name}.png"
            problem = measurements[0].problem
            figure.suptitle(f"{problem.operator.name}, {problem.memory} outputs")
            save_figure(figure, path)
            paths.append(path)
    return paths


def save_figure(figure: Figure, path: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100, bbox_inches="tight")  # the legend may be wider than the panels
    Image.open(drawn).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(path, optimize=True)


def _ratios(measurements: Sequence[Measurement], *, along: Dimension, fixed: Dimension) -> Figure | None:
    """Draws the time relative to the copy along one dimension: a panel for each dtype and value of the other one."""
    panels = [
        (f"{dtype_name(dtype)}, {value} {fixed}", panel)
        for dtype, of_dtype in _by_dtype(measurements)
        for value in sorted({getattr(m.problem.size, fixed) for m in of_dtype})
        if len(panel := _sorted([m for m in of_dtype if getattr(m.problem.size, fixed) == value], along)) > 1
    ]
    if not panels:
        return None
    figure, axes = _subplots(len(panels))
    for ax, (title, panel) in zip(axes, panels, strict=True):
        sizes = [getattr(m.problem.size, along) for m in panel]
        for name in _names(panel):
            timed = [(size, m.ratio(name, COPY)) for size, m in zip(sizes, panel, strict=True) if name in m.timings]
            _draw(ax, name, timed)
        # The operator's time if it moved its bytes at the copy's bandwidth.
        least = [(s, m.problem.bytes / (2 * m.problem.size.tensor_bytes)) for s, m in zip(sizes, panel, strict=True)]
        ax.plot(*zip(*least, strict=True), color="black", linestyle="--", label="at a copy's GB/s")
        ax.set(title=title, xlabel=along, ylabel="time / time of a copy", xscale="log", yscale="log")
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.xaxis.set_minor_locator(NullLocator())
        _plain_numbers(ax)
    _legend(figure, axes)
    return figure


def _bandwidths(measurements: Sequence[Measurement]) -> Figure | None:
    """Draws the fraction of the copy's GB/s over width: a panel for each dtype and size of tensors."""
    panels = [
        (f"{dtype_name(dtype)}, {size >> 20} MiB per tensor", panel)
        for dtype, of_dtype in _by_dtype(measurements)
        for size in sorted({m.problem.size.tensor_bytes for m in of_dtype})
        if len(panel := _sorted([m for m in of_dtype if m.problem.size.tensor_bytes == size], "cols")) > 2
    ]
    if not panels:
        return None
    figure, axes = _subplots(len(panels))
    for ax, (title, panel) in zip(axes, panels, strict=True):
        sizes = [m.problem.size.cols for m in panel]
        for name in _names(panel):
            timed = [(size, m.of_copy(name)) for size, m in zip(sizes, panel, strict=True) if name in m.timings]
            _draw(ax, name, timed)
        ax.axhline(1, color="black", linestyle="--", label="copy")
        ax.set(title=title, xlabel="cols", ylabel="GB/s / GB/s of copy", xscale="log", ylim=(0, None))
        ax.set_xticks(sizes, [_short_number(size) for size in sizes])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def _short_number(number: int) -> str:
    return f"{number >> 10}K" if number % 1024 == 0 else str(number)


def _roofline(measurements: Sequence[Measurement]) -> Figure | None:
    """Draws the achieved GB/s over the bytes moved, with the copies as the roof: a panel for each dtype."""
    panels = [
        (dtype_name(dtype), sorted(panel, key=lambda m: m.problem.bytes))
        for dtype, panel in _by_dtype(measurements)
        if len({m.problem.bytes for m in panel}) > 1
    ]
    if not panels:
        return None
    figure, axes = _subplots(len(panels))
    for ax, (title, panel) in zip(axes, panels, strict=True):
        for name in _names(panel):
            _draw(ax, name, [(m.problem.bytes, m.gb_per_s(name)) for m in panel if name in m.timings], linestyle="")
        roof = [(m.problem.bytes, m.gb_per_s(COPY)) for m in panel]
        _draw(ax, COPY, roof)
        ax.set(title=title, xlabel="bytes that have to move", ylabel="GB/s", xscale="log", yscale="log")
        ax.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
        _plain_numbers(ax)
    _legend(figure, axes)
    return figure


def _by_dtype(measurements: Sequence[Measurement]) -> Iterator[tuple[torch.dtype, list[Measurement]]]:
    for dtype in dict.fromkeys(m.problem.size.dtype for m in measurements):
        yield dtype, [m for m in measurements if m.problem.size.dtype == dtype]


def _sorted(measurements: Sequence[Measurement], along: Dimension) -> list[Measurement]:
    return sorted(measurements, key=lambda m: int(getattr(m.problem.size, along)))


def _names(measurements: Sequence[Measurement]) -> list[str]:
    return [peer.name for peer in PEERS if any(peer.name in m.timings for m in measurements)]


def _subplots(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.5 + 4.2 * columns, 1.2 + 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    axes = list(grid)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _draw(ax: Axes, name: str, points: Sequence[tuple[float, float]], linestyle: str = "-") -> None:
    width = 2.5 if name == NORMOPS.name else 1.2
    xs, ys = zip(*points, strict=True)
    ax.plot(xs, ys, color=COLORS[name], linewidth=width, marker="o", markersize=5, linestyle=linestyle, label=name)


def _plain_numbers(ax: Axes) -> None:
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    # Powers of ten alone would leave an axis of two decades almost without numbers.
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(plain)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.3)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    by_label = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=4, frameon=False)
