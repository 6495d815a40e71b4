"""Prints a table of the results of trained variants, and draws their loss curves."""

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
    is_baseline: bool
    """True for the baseline of the compiled variants, and for that of the others."""
    losses: list[float]
    validation_loss: float
    tokens_per_second: list[float]
    """One number for each turn."""
    compile_seconds: float | None
    operators: int | None
    norm_milliseconds: float | None
    """The time in norms of a profiled step, like ``milliseconds``; None if it cannot be measured."""
    milliseconds: float
    peak_bytes: int

    @property
    def norm_share(self) -> float | None:
        return None if self.norm_milliseconds is None else self.norm_milliseconds / self.milliseconds


def speedup(result: Result, baseline: Result) -> tuple[float, float, float]:
    """Returns the speedup over the baseline: the median over the rounds, and the quartiles."""
    pairs = zip(result.tokens_per_second, baseline.tokens_per_second, strict=True)
    ratios = [one / other for one, other in pairs]
    low, median, high = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4, method="inclusive")
    return median, low, high


def baseline_of(result: Result, results: Sequence[Result]) -> Result | None:
    """Returns the variant without normops that is compiled if this one is, or None."""
    is_compiled = result.compile_seconds is not None
    alike = (each for each in results if each.is_baseline and (each.compile_seconds is not None) == is_compiled)
    return next(alike, None)


def times_as_fast(result: Result, baseline: Result) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*speedup(result, baseline))


def table_row(result: Result, baseline: Result | None) -> list[str]:
    share = result.norm_share
    return [
        result.label,
        f"{statistics.median(result.tokens_per_second):.0f}",
        "-" if baseline is None or baseline is result else times_as_fast(result, baseline),
        "-" if share is None else f"{result.norm_milliseconds:.1f} ({share:.1%})",
        f"{result.peak_bytes / 1e6:.1f}",
        f"{statistics.mean(result.losses[-10:]):.4f}",
        f"{result.validation_loss:.4f}",
    ]


def print_results(results: Sequence[Result]) -> None:
    """Prints a table of the results relative to their baselines, and further results below it."""
    pairs = [(result, baseline_of(result, results)) for result in results]
    print_table([COLUMNS, *(table_row(result, baseline) for result, baseline in pairs)])
    print("\nNorms: forward and backward, milliseconds and share of a step.")
    baselines = {baseline.label: baseline for _, baseline in pairs if baseline is not None}.values()
    if baselines:
        print("Times torch: tokens/s over those without normops in the same round; median and middle half.")
    for baseline in baselines:
        if (share := baseline.norm_share) is not None:
            print(
                f"Norms are {share:.1%} of a step with {baseline.label}; without them it would be "
                f"{1 / (1 - share):.2f} times as fast."
            )
        elif len(baselines) > 1:
            eager = next(iter(baselines))
            print(f"{baseline.label} is {times_as_fast(baseline, eager)} times as fast as {eager.label}.")
    if any(baseline is not None and speedup(result, baseline)[1] < 1 for result, baseline in pairs):
        print("Steps vary by more than that here. Compare the time in norms.")
    counts = [f"{result.operators} ({result.label})" for result in results if result.operators is not None]
    if counts:
        print(f"Operators in a step: {', '.join(counts)}.")
    for result in results:
        if result.compile_seconds is not None:
            print(f"Compiling took {result.compile_seconds:.1f} s ({result.label}).")


def plot_losses(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # The curves nearly coincide, so each is drawn thinner than those below it.
    for width, result in zip((9.0, 6.5, 4.0, 2.0, 0.8), results, strict=False):
        steps = len(result.losses)
        (line,) = axes.plot(range(1, steps + 1), result.losses, linewidth=width, label=result.label)
        ring, color = 5 + 2 * width, line.get_color()
        axes.plot(steps, result.validation_loss, "o", markersize=ring, markerfacecolor="none", color=color)
    axes.set(title="A small language model on Python source code", xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(title="rings: validation loss")
    figure.savefig(path, dpi=120)
