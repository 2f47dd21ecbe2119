"""The summary of a chaos run, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from psync.testing.chaos.one_run import Result
from psync.testing.sabotage.message_loss import FORMS

SHOWN = 12  # faults


def summary(result: Result, again: str) -> str:
    """Return the text.

    Args:
        result: Of the run.
        again: The command that runs it again.
    """
    plan, expected = result.plan, result.expected
    kinds = Counter((kill.job, kill.signal) for kill in result.kills)
    pushing = Counter((kill.job, kill.signal) for kill in result.kills if kill.in_flight)
    lines = [
        f"chaos: seed {plan.seed}, {plan.settings.mode}, recovery {plan.settings.recovery}, "
        f"{plan.settings.num_ps} ps, {plan.settings.num_workers} workers, {result.seconds:.0f} s",
        "",
        "killed or stopped            times   with a push in flight",
        *(
            f"  {job:<8} {signal:<16} {count:>5} {pushing[job, signal]:>10}"
            for (job, signal), count in sorted(kinds.items())
        ),
    ]
    if result.passed_over:
        lines.append(f"  nobody could be killed in time: {result.passed_over} times")
    if result.proxies:
        lines += [
            "",
            f"proxies: {sum(p.cuts for p in result.proxies)} cuts, "
            f"{sum(p.stalls for p in result.proxies)} stalls, "
            f"{sum(p.holes for p in result.proxies)} black holes",
        ]
    lines += ["", *losses_of(result.notes), "", *failpoints_of(result.notes)]
    lines += [
        f"closures done: {len(expected.done)}, lives of the program: {expected.lives}, "
        f"checkpoints: {expected.checkpoints}, rollbacks: {expected.rollbacks} (closures undone: "
        f"{len(expected.undone)})"
        + (f", backups that took over: {expected.failovers}" if expected.failovers else ""),
        *(f"checked: {what}" for what in result.checked),
        "",
    ]
    if not result.faults:
        return "\n".join([*lines, "nothing was found"])
    lines += [f"FAULT: {fault}" for fault in result.faults[:SHOWN]]
    if len(result.faults) > SHOWN:
        lines.append(f"… and {len(result.faults) - SHOWN} more")
    return "\n".join([*lines, f"left in {plan.settings.directory}", f"again: {again}"])


def deaths_of(result: Result) -> Counter[str]:
    """Return how many tasks of each job have died, by a signal or at a failpoint."""
    deaths = Counter(kill.job for kill in result.kills if kill.signal != "SIGSTOP")
    for task, counts in result.notes.items():
        job = task.partition("-")[0]
        deaths[job] += sum(n for line, n in counts.items() if line.startswith("failpoint "))
    return +deaths


def losses_of(notes: Mapping[str, Counter[str]]) -> list[str]:
    """Return a line for each kind of message that occurred."""
    lost: Counter[tuple[str, str]] = Counter()
    kinds: set[str] = set()
    for counts in notes.values():
        for line, count in counts.items():
            match line.split():
                case ["lost", kind, form]:
                    lost[kind, form] += count
                    kinds.add(kind)
                case ["met", kind]:
                    kinds.add(kind)
    if not kinds:
        return ["messages lost: none"]
    return [
        f"messages lost           {'  '.join(f'{form:>9}' for form in FORMS)}",
        *(
            f"  {kind:<20}  {'  '.join(f'{lost[kind, form]:>9}' for form in FORMS)}"
            for kind in sorted(kinds)
        ),
    ]


def failpoints_of(notes: Mapping[str, Counter[str]]) -> list[str]:
    """Return a line for each failpoint that has acted."""
    hits: Counter[str] = Counter()
    for counts in notes.values():
        for line, count in counts.items():
            if line.startswith("failpoint "):
                hits[line.removeprefix("failpoint ")] += count
    return [f"failpoint {name}: {count} deaths" for name, count in sorted(hits.items())]
