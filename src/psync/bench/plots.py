"""Plots of the figures, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psync.bench.figures import Figures
from psync.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigurationError(
            "the benchmark draws with matplotlib, which is not installed",
            hint="pip install 'psync[examples]'",
        ) from exc
    return Figure(figsize=(width, height), layout="constrained")


def plot_training(settings: Sequence[Sequence[Figures]], clock: str, path: Path) -> None:
    """Draw one row for each setting: rates, staleness, and the loss over time.

    Args:
        settings: Of each setting, the figures of its runs.
        clock: What the seconds are: "s" or "virtual s".
        path: Where to.
    """
    figure = new_figure(15, 4.6 * len(settings))
    rows = figure.subplots(len(settings), 3, squeeze=False)
    for (rates, staleness, losses), results in zip(rows, settings, strict=True):
        title = f"{results[0]['workers']} workers, {results[0]['setting']}"
        colors = _colors(len(results))
        _draw_rates(rates, results, colors)
        _draw_staleness(staleness, results, colors)
        _draw_losses(losses, results, colors)
        rates.set(title=f"{title}: gradients", xlabel=f"per {clock}")
        staleness.set(title=f"{title}: staleness", ylabel="share of accepted gradients")
        losses.set(title=f"{title}: loss", xlabel=clock, ylabel="test loss, nats")
    figure.savefig(path, dpi=DPI)


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["turbo"](0.05 + 0.9 * n / max(1, count - 1)) for n in range(count)]


def _draw_rates(axes: Axes, results: Sequence[Figures], colors: Sequence[Any]) -> None:
    """Bars: gradients that were accepted, and behind them those that were dropped."""
    names = [result["mode"] for result in results]
    accepted = [result["gradients_per_s"] for result in results]
    dropped = [result["dropped"] / result["seconds"] for result in results]
    axes.barh(names, accepted, color=colors, label="accepted")
    if any(dropped):
        axes.barh(
            names, dropped, left=accepted, color="none", edgecolor="black", hatch="///",
            label="dropped as stale",
        )  # fmt: skip
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _draw_staleness(axes: Axes, results: Sequence[Figures], colors: Sequence[Any]) -> None:
    """Histograms; synchronous modes share one line, as they accept nothing that is stale."""
    from matplotlib.ticker import MaxNLocator

    drawn = [(r, c) for r, c in zip(results, colors, strict=True) if r["backups"] is None]
    highest = max(max(result["staleness"]) for result, _ in drawn)
    width = max(1, -(-(highest + 1) // 60))  # values to a bin
    for result, color in drawn:
        bins = [0.0] * (highest // width + 1)
        for value, times in result["staleness"].items():
            bins[value // width] += times / result["gradients"]
        axes.stairs(
            bins, [n * width - 0.5 for n in range(len(bins) + 1)],
            color=color, linewidth=2, label=result["mode"],
        )  # fmt: skip
    if len(drawn) < len(results):
        axes.axvline(0, color="grey", linestyle="--", label="all synchronous ones: 0")
    axes.set_xlabel("updates by others since the pull")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_losses(axes: Axes, results: Sequence[Figures], colors: Sequence[Any]) -> None:
    from matplotlib.ticker import LogLocator

    for result, color in zip(results, colors, strict=True):
        times, losses = zip(*result["losses"], strict=True)
        axes.plot(times, losses, color=color, label=result["mode"])
    axes.axhline(results[0]["target_loss"], color="grey", linestyle="--", label="target")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def plot_backups(settings: Sequence[Sequence[Figures]], path: Path) -> None:
    """Draw what backup replicas are good for, one line for each setting.

    Args:
        settings: Of each setting, the figures of its runs; asynchronous ones are passed over.
        path: Where to.
    """
    figure = new_figure(15, 4.6)
    panels = (
        ("mean_step_s", "mean time of a step", "virtual s"),
        ("gradients_per_s", "gradients accepted", "per virtual s"),
        ("without_slow", "steps that no slow gradient delayed", "share"),
    )
    all_axes = figure.subplots(1, len(panels))
    for axes, (key, title, unit) in zip(all_axes, panels, strict=True):
        for results, style in zip(settings, ("o-", "s--"), strict=False):
            runs = [result for result in results if result["backups"] is not None]
            axes.plot(
                [run["backups"] for run in runs], [run[key] for run in runs], style,
                label=runs[0]["setting"],
            )  # fmt: skip
        axes.set(title=title, ylabel=unit)
        axes.set_xlabel(f"backup replicas, of {settings[0][0]['workers']} workers")
        axes.grid(alpha=0.3)
    runs = [result for result in settings[0] if result["backups"] is not None]
    all_axes[-1].plot(
        [run["backups"] for run in runs], [run["without_slow_expected"] for run in runs], "kx",
        markersize=9, label="expected of the draws",
    )  # fmt: skip
    for axes in all_axes:
        axes.set_ylim(0, None)
        axes.legend()
    figure.savefig(path, dpi=DPI)


SCALING_COLUMNS = 4
LEAST_RANGE = 20.0
"""Between the ends of a y-axis: a curve that is nearly flat looks so."""


def plot_scaling(panels: Sequence[Figures], path: Path) -> None:
    """Draw what one costs over how many there are: small panels, both axes logarithmic.

    Args:
        panels: Each with "title" ("what; unit"), "over", and "lines": of each figure the points,
            which have "at", "median", "min" and "max". Those without a line are passed over.
        path: Where to; its suffix says the format.
    """
    drawn = [panel for panel in panels if panel["lines"]]
    rows = max(1, -(-len(drawn) // SCALING_COLUMNS))
    figure = new_figure(4.4 * SCALING_COLUMNS, 3.4 * rows)
    all_axes = figure.subplots(rows, SCALING_COLUMNS, squeeze=False).flatten()
    for axes, panel in zip(all_axes, drawn, strict=False):
        _draw_scaling(axes, panel)
    for axes in all_axes[len(drawn) :]:
        axes.remove()
    figure.savefig(path, dpi=DPI)


def _draw_scaling(axes: Axes, panel: Figures) -> None:
    """Draw medians as lines, and from the least to the most of the runs as bars."""
    from matplotlib.ticker import EngFormatter, LogLocator

    for label, points in panel["lines"].items():
        medians = [point["median"] for point in points]
        below = [point["median"] - point["min"] for point in points]
        above = [point["max"] - point["median"] for point in points]
        axes.errorbar(
            [point["at"] for point in points], medians, yerr=[below, above],
            marker="o", markersize=4, capsize=2, linewidth=1.4, label=label,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < low * LEAST_RANGE:
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / LEAST_RANGE**0.5, middle * LEAST_RANGE**0.5)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        axis.set_major_formatter(EngFormatter(sep=""))
    axes.minorticks_off()
    what, _, unit = panel["title"].partition("; ")
    axes.set_title(what, fontsize="medium")
    axes.set(xlabel=panel["over"], ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
