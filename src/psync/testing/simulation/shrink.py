"""A plan that fails, made smaller: what is left is what it takes.

Faults, batches, closures, calls, processes and options are taken away, halves first and then one
by one, as long as the same oracle fails. A changed seed would be another run; a plan with
something taken out is nearly the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from psync.testing.simulation.plan import Batch, ClosurePlan, Fault, GroupPlan, Plan
from psync.testing.simulation.run import Report

_T = TypeVar("_T")

MAX_RUNS = 600

SIMPLER: dict[str, Sequence[Any]] = {
    "attach": (False,),
    "padding": (0,),
    "fillers": (0,),
    "bound": (-1,),
    "latency": ((0.0, 0.0), (0.0, 0.001)),
    "chunk": ((1 << 14, 1 << 20),),
    "num_shards": (1, 2),
    "packed": (False,),
}
"""Values of options that are tried, the simplest first."""

PLAINER: tuple[dict[str, Any], ...] = ({"pause_s": 0.0}, {"weight": 1.0}, {"pulls": False})
"""What is tried with the calls of a closure."""


def shrunk(
    plan: Plan, run: Callable[[Plan], Report], say: Callable[[str], object] = lambda _: None
) -> tuple[Plan, Report]:
    """Return a plan that is as small as can be and fails as ``plan`` does, and its report.

    Args:
        plan: If it does not fail it is returned as it is.
        run: Runs a plan.
        say: Told of progress.
    """
    return _Shrink(plan, run, say).shrink()


class _Shrink:
    def __init__(
        self, plan: Plan, run: Callable[[Plan], Report], say: Callable[[str], object]
    ) -> None:
        self._plan = plan
        self._run = run
        self._say = say
        self._report = run(plan)
        self._tried: set[str] = set()

    def shrink(self) -> tuple[Plan, Report]:
        before = None
        while self._report.oracle and self._plan != before and len(self._tried) < MAX_RUNS:
            before = self._plan
            for pass_ in (self._faults, self._batches, self._closures, self._calls,
                          self._processes, self._options):  # fmt: skip
                pass_()
            self._say(f"{len(self._tried)} runs: {size(self._plan)}")
        return self._plan, self._report

    def _try(self, **changes: Any) -> bool:
        """Take a change if the same oracle still fails."""
        smaller = dataclasses.replace(self._plan, **changes)
        text = smaller.to_json()
        if smaller == self._plan or text in self._tried or len(self._tried) >= MAX_RUNS:
            return False
        self._tried.add(text)
        try:
            report = self._run(smaller)
        except Exception:  # it makes no sense any more
            return False
        if report.oracle != self._report.oracle:
            return False
        self._plan, self._report = smaller, report
        return True

    def _without(self, parts: Sequence[_T], take: Callable[[list[_T]], bool]) -> None:
        """Leave out as many parts as can be: halves first, then one by one."""
        parts, size = list(parts), len(parts)
        while size:
            at = 0
            while at < len(parts):
                fewer = parts[:at] + parts[at + size :]
                if take(fewer):
                    parts = fewer
                else:
                    at += size
            size //= 2

    def _faults(self) -> None:
        self._without(self._plan.faults, lambda left: self._try(faults=tuple(left)))
        for number, fault in enumerate(self._plan.faults):
            for left in _each_left_out(fault.targets) if len(fault.targets) > 1 else ():
                self._try(faults=_changed(self._plan.faults, number, targets=left))

    def _batches(self) -> None:
        self._without(self._plan.batches, lambda left: self._try(batches=tuple(left)))

    def _closures(self) -> None:
        for number in range(len(self._plan.batches)):
            known = self._plan.batches[number].closures

            def take(left: list[int], number: int = number, known: Any = known) -> bool:
                return self._try_batch(number, closures=_kept(known, left))

            self._without(range(len(known)), take)

    def _calls(self) -> None:
        for number, at in self._places():
            closure = self._plan.batches[number].closures[at]
            for calls in _each_left_out(closure.calls) if len(closure.calls) > 1 else ():
                self._try_closure(number, at, calls=calls)

    def _processes(self) -> None:
        plan = self._plan
        for job, field in (("worker", "num_workers"), ("ps", "num_ps")):
            count = getattr(plan, field)
            name = f"{job}-{count - 1}"
            if count > 1 and not any(name in fault.targets for fault in plan.faults):
                self._try(**{field: count - 1})

    def _options(self) -> None:
        for name, values in SIMPLER.items():
            any(self._try(**{name: value}) for value in values)
        for name, default in _defaults(self._plan):
            self._try(**{name: default})
        for number in range(len(self._plan.batches)):
            for name, default in _defaults(self._plan.batches[number]):
                self._try_batch(number, **{name: default})
        for number, at in self._places():
            for name, default in _defaults(self._plan.batches[number].closures[at]):
                self._try_closure(number, at, **{name: default})
            for changes in PLAINER:
                calls = self._plan.batches[number].closures[at].calls
                changed = tuple(dataclasses.replace(call, **changes) for call in calls)
                self._try_closure(number, at, calls=changed)
        while self._plan.groups and self._try(groups=self._plan.groups[:-1]):
            pass
        for number, group in enumerate(self._plan.groups):
            for name, default in _defaults(group):
                self._try_group(number, **{name: default})
            for name in group.options:
                options = self._plan.groups[number].options
                fewer = {key: value for key, value in options.items() if key != name}
                self._try_group(number, options=fewer)

    def _try_group(self, number: int, **changes: Any) -> bool:
        return self._try(groups=_changed(self._plan.groups, number, **changes))

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield the places of all closures, as long as they are there."""
        for number in range(len(self._plan.batches)):
            for at in range(len(self._plan.batches[number].closures)):
                yield number, at

    def _try_batch(self, number: int, **changes: Any) -> bool:
        return self._try(batches=_changed(self._plan.batches, number, **changes))

    def _try_closure(self, number: int, at: int, **changes: Any) -> bool:
        closures = _changed(self._plan.batches[number].closures, at, **changes)
        return self._try_batch(number, closures=closures)


def _changed(parts: Sequence[Any], at: int, **changes: Any) -> tuple[Any, ...]:
    return (*parts[:at], dataclasses.replace(parts[at], **changes), *parts[at + 1 :])


def _each_left_out(parts: tuple[_T, ...]) -> Iterator[tuple[_T, ...]]:
    for at in range(len(parts)):
        yield parts[:at] + parts[at + 1 :]


def _kept(closures: Sequence[ClosurePlan], left: Sequence[int]) -> tuple[ClosurePlan, ...]:
    """Return those that are left; what needed the value of another one finds it, or does not."""
    return tuple(
        dataclasses.replace(
            closures[number],
            needs=left.index(closures[number].needs) if closures[number].needs in left else -1,
        )
        for number in left
    )


def _defaults(part: Plan | Batch | ClosurePlan | GroupPlan) -> Iterator[tuple[str, Any]]:
    """Yield fields that are not what they are by default."""
    for field in dataclasses.fields(part):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and getattr(part, field.name) != default:
            yield field.name, default


def size(plan: Plan) -> str:
    """Return how large a plan is."""
    closures = sum(len(batch.closures) for batch in plan.batches)
    return (
        f"{len(plan.faults)} faults, {len(plan.batches)} batches, {closures} closures, "
        f"{plan.num_ps} ps, {plan.num_workers} workers"
    )


# What is printed.

TOLD = frozenset(
    {"start", "kill", "stop", "go on", "fault", "failed", "life", "event", "save", "saved",
     "save failed", "run", "call", "told", "ended", "unattached", "log", "violation"}
)  # fmt: skip
"""Entries of the trace that a table shows."""


def table(plan: Plan, report: Report | None) -> str:
    """Return a plan as text; with a report, what happened as a table of times and parties."""
    fields = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if field.name not in ("batches", "faults", "groups")
    }
    lines = [f"seed {plan.seed}: {size(plan)}"]
    lines.append("  " + ", ".join(f"{name}={value!r}" for name, value in fields.items()))
    for number, group in enumerate(plan.groups):
        own = {name: value for name, value in vars(group).items() if name != "options" and value}
        lines.append(f"  group {number}: {group.options | own}")
    for number, batch in enumerate(plan.batches):
        rest = {name: value for name, value in vars(batch).items() if name != "closures" and value}
        lines.append(f"  batch {number}: {rest or ''}")
        lines += [f"    closure {at}: {_closure(each)}" for at, each in enumerate(batch.closures)]
    lines += [f"  {_fault(fault)}" for fault in plan.faults]
    if report is not None:
        lines += ["", "      time  party       what"]
        served = {fault.when.name for fault in plan.faults}
        for at_s, _, kind, process, what in report.trace:
            if kind in TOLD or (kind in ("message", "place") and what in served):
                lines.append(f"{at_s:10.4f}  {process:10}  {kind} {what}".rstrip()[:240])
        lines += ["", f"at {report.at_s:.4f} s, entry {report.entry}: {report.violation}"]
    return "\n".join(lines)


def _closure(closure: ClosurePlan) -> str:
    calls = ", ".join(
        f"{call.kind}[{call.column}]{' pulls' if call.pulls else ''}"
        f"{f' after {call.pause_s} s' if call.pause_s else ''}"
        for call in closure.calls
    )
    rest = {name: value for name, value in _values(closure).items() if name != "calls"}
    return f"{calls} {rest or ''}".rstrip()


def _values(closure: ClosurePlan) -> dict[str, Any]:
    return {name: getattr(closure, name) for name, _ in _defaults(closure)}


def _fault(fault: Fault) -> str:
    when = fault.when
    at = f"from {when.at_s} s" if when.kind else f"at {when.at_s} s"
    if when.kind:
        at += f", at the {when.count}. {when.kind} {when.name}"
    whom = ", ".join(fault.targets) or "whoever reaches it"
    return f"{fault.kind} {whom}, {at}, for {fault.seconds} s, amount {fault.amount:g}"
