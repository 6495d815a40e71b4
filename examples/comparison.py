"""Results of variants that have trained in turn: a table, and the curves of their losses."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from tables import print_table

COLUMNS = ["norms", "tokens/s", "times torch", "norms ms", "peak MB", "loss", "val. loss"]


@dataclass(frozen=True)
class Result:
    label: str
    losses: list[float]
    validation_loss: float
    tokens_per_second: list[float]
    """Of each turn."""
    compile_seconds: float | None
    operators: int | None
    norm_milliseconds: float
    norm_share: float
    peak_bytes: int


def speedup(result: Result, baseline: Result) -> tuple[float, float, float]:
    """Return how many times as fast it is: the median over the rounds, and the quartiles around it."""
    pairs = zip(result.tokens_per_second, baseline.tokens_per_second, strict=True)
    ratios = [one / other for one, other in pairs]
    low, median, high = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4, method="inclusive")
    return median, low, high


def table_row(result: Result, baseline: Result | None) -> list[str]:
    speed = "-"
    if baseline is not None and baseline is not result:
        speed = "{:.2f} ({:.2f} to {:.2f})".format(*speedup(result, baseline))
    return [
        result.label,
        f"{statistics.median(result.tokens_per_second):.0f}",
        speed,
        f"{result.norm_milliseconds:.1f} ({result.norm_share:.1%})",
        f"{result.peak_bytes / 1e6:.1f}",
        f"{statistics.mean(result.losses[-10:]):.4f}",
        f"{result.validation_loss:.4f}",
    ]


def print_results(results: Sequence[Result], label: str) -> None:
    """Print a table of the results, beside the one with this label if it is there, and what the table does not say."""
    baseline = next((result for result in results if result.label == label), None)
    print_table([COLUMNS, *(table_row(result, baseline) for result in results)])
    print("\nNorms: forward and backward, milliseconds and share of a step.")
    if baseline is not None:
        print(
            f"Times torch: tokens/s over those of {label} in the same round; median and middle half.\n"
            f"Norms are {baseline.norm_share:.1%} of a step with {label}; without them it would be "
            f"{1 / (1 - baseline.norm_share):.2f} times as fast."
        )
        if any(speedup(result, baseline)[1] < 1 for result in results):
            print("Steps vary by more than that here. Compare the time in norms.")
    counts = [f"{result.operators} ({result.label})" for result in results if result.operators is not None]
    if counts:
        print(f"Operators in a step: {', '.join(counts)}.")
    for result in results:
        if result.compile_seconds is not None:
            print(f"Compiling took {result.compile_seconds:.1f} s.")


def plot_losses(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # The curves all but coincide, so each is drawn thinner than those below it.
    for width, result in zip((7.0, 4.0, 2.0, 0.8), results, strict=False):
        steps = len(result.losses)
        (line,) = axes.plot(range(1, steps + 1), result.losses, linewidth=width, label=result.label)
        ring, color = 5 + 2 * width, line.get_color()
        axes.plot(steps, result.validation_loss, "o", markersize=ring, markerfacecolor="none", color=color)
    axes.set(title="A small language model on Python source code", xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(title="rings: validation loss")
    figure.savefig(path, dpi=120)
