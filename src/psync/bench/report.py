"""The report of a benchmark: tables, and conclusions in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psync.bench.figures import Figures

HEADER = (
    "", "gradients/s", "examples/s", "updates/s", "staleness", "dropped", "s to loss",
)  # fmt: skip


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return lines: the first column is text, the others are figures and end in one line."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def number(value: float) -> str:
    """Return a figure with as many digits as can be trusted."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def training_table(results: Sequence[Figures]) -> str:
    """Return one line for each mode: rates, mean and highest staleness, drops, time to the loss."""
    return table(HEADER, map(_training_row, results))


def _training_row(result: Figures) -> list[str]:
    time = result["time_to_loss_s"]
    return [
        result["mode"],
        number(result["gradients_per_s"]),
        number(result["examples_per_s"]),
        number(result["updates_per_s"]),
        f"{result['mean_staleness']:.1f} / {max(result['staleness'])}",
        f"{result['dropped_share']:.1%}",
        "not reached" if time is None else f"{time:.2f}",
    ]


def backups_table(results: Sequence[Figures]) -> str:
    """Return one line for each number of backup replicas."""
    header = ("backups", "mean step s", "p99 step s", "gradients/s", "no slow one", "expected")
    return table(header, [
        [
            str(result["backups"]),
            f"{result['mean_step_s']:.3f}",
            f"{result['step_s_percentiles'][99]:.3f}",
            number(result["gradients_per_s"]),
            f"{result['without_slow']:.0%}",
            f"{result['without_slow_expected']:.0%}",
        ]
        for result in results
    ])  # fmt: skip


def peers_table(results: Sequence[Figures], systems: Sequence[str]) -> str:
    """Return a table in Markdown: medians, their spread, and the median of neighbours' ratios."""
    header = ["", *systems]
    lines = [header, ["---", *["---:"] * len(systems)]]
    for result in results:
        cells = [f"{result['name']}, {result['unit']}"]
        for name in systems:
            figures = result["systems"].get(name)
            cells.append("–" if figures is None else _peers_cell(figures))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _peers_cell(figures: Figures) -> str:
    shown = f"{number(figures['median'])} ({number(figures['min'])}–{number(figures['max'])})"
    ratio = figures.get("ratio")
    return shown if ratio is None else f"{shown}, {number(ratio)} ×"


def findings(results: Sequence[Figures]) -> list[str]:
    """Say, of runs in one setting, which mode learns first and how many backups serve best."""
    target = results[0]["target_loss"]
    learned = [result for result in results if result["time_to_loss_s"] is not None]
    learned.sort(key=lambda result: float(result["time_to_loss_s"]))
    if not learned:
        said = [f"No mode reached a loss of {target}."]
    else:
        first, *others = learned
        said = [
            f'"{first["mode"]}" reached a loss of {target} first, after '
            f"{first['time_to_loss_s']:.2f} s"
            + "".join(f"; {other['mode']} {other['time_to_loss_s']:.2f}" for other in others)
            + "."
        ]
    synchronous = [result for result in results if result["backups"] is not None]
    if len(synchronous) > 1:
        said += backup_findings(synchronous)
    return said


def backup_findings(synchronous: Sequence[Figures]) -> list[str]:
    """Say where the best number of backup replicas lies, of runs that differ in nothing else.

    A backup makes steps shorter, and each step smaller by one gradient: so the highest rate of
    updates does not learn fastest.
    """
    most = max(result["backups"] for result in synchronous)
    said = []
    for key, what, choose in (
        ("time_to_loss_s", "seconds to the loss", min),
        ("gradients_per_s", "gradients a second", max),
        ("updates_per_s", "updates a second", max),
    ):
        figures = {r["backups"]: float(r[key]) for r in synchronous if r[key] is not None}
        if figures:
            best = choose(figures, key=figures.__getitem__)
            curve = ", ".join(f"{backups}: {number(value)}" for backups, value in figures.items())
            end = ", the most that were tried" if best == most else ""
            said.append(f"Best number of backups by {what}: {best}{end} ({curve}).")
    return said
