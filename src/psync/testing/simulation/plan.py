"""The plan of one seed: a cluster, a program and a list of faults, as plain data.

All of it is drawn before anything runs, so a plan can be printed, replayed and made smaller.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from psync.numerics.compression import Compression


@dataclass(frozen=True)
class Trigger:
    """When a fault happens: at a virtual time, or when something is reached.

    Attributes:
        at_s: Not before this time, in virtual seconds since the start.
        kind: "": at that time. "message": when a task is about to serve a request. "place": when
            a task reaches a failpoint. "moment": when the world or the program comes to a point
            (``drawing.MOMENTS``). "file": before something is done to a file (``drawing.FILES``).
            "turn": at a turn of the loop. "life": at a turn of a process that starts after
            ``at_s``.
        name: Of the message, failpoint, moment or operation; "": any.
        at: The process that reaches it, or whose turns are counted; "": any.
        count: For the how manieth time, counted from ``at_s``.
        delay_s: How long after that.
    """

    at_s: float
    kind: str = ""
    name: str = ""
    count: int = 1
    at: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: One of ``drawing.KINDS``, or "damage".
        when: Its trigger.
        targets: Names of processes; at a trigger that is no time, "" is the one that reached it.
        seconds: How long it lasts, or until what died is started again.
        amount: Bytes, or a share, or how many; by kind.
    """

    kind: str
    when: Trigger
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True)
class Call:
    """One call of a step that changes variables, and leaves a mark of its own.

    Attributes:
        kind: A table of the program (see ``program``).
        column: Of that table, which no other call has.
        pulls: Whether values are pulled before it.
        pause_s: Before it.
        weight: Of a synchronous push.
    """

    kind: str
    column: int
    pulls: bool = True
    pause_s: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class ClosurePlan:
    """One closure.

    Attributes:
        calls: In their order.
        fails: Whether the step raises an error after its calls.
        stops: Whether it asks for the end of training after them.
        cancel_s: When it is cancelled; None: it is not.
        needs: The number of an earlier closure of its batch whose value it takes; -1: none.
    """

    calls: tuple[Call, ...]
    fails: bool = False
    cancel_s: float | None = None
    needs: int = -1
    stops: bool = False

    @property
    def may_end(self) -> bool:
        """Whether other closures, or itself, may be ended by it."""
        return self.fails or self.stops or self.cancel_s is not None


@dataclass(frozen=True)
class Batch:
    """What the program does until it joins.

    Attributes:
        closures: Which it schedules.
        save: Whether it saves: "", "hot" (while they run) or "quiet" (after the join).
        pause_s: Before it.
    """

    closures: tuple[ClosurePlan, ...]
    save: str = ""
    pause_s: float = 0.0


@dataclass(frozen=True)
class GroupPlan:
    """A synchronous optimizer.

    Attributes:
        options: Of ``SyncReplicasOptimizer``.
        own_step: Whether it has a global step of its own, unless it is the first.
        rule: Class of the wrapped optimizer.
        limits: Norms that the wrapped optimizer limits.
        rows: Whether gradients are of some rows.
        averages: Arguments of the moving averages that follow its steps; none: there are none.
    """

    options: dict[str, Any]
    own_step: bool = False
    rule: str = "SGD"
    limits: dict[str, float] = field(default_factory=dict)
    rows: bool = False
    averages: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Of the network, the order of tasks and the times of threads.
        recovery: "replica", "checkpoint", or "none": nothing is saved.
        attach: Whether a chief that is started again attaches.
        latency: Seconds between which messages take; another range for each link.
        chunk: Bytes between which pieces are delivered.
        spread: How much slower some links are than others, as a power of ten.
        limits: Of all tasks, where they are others than usual: fields of ``Limits``.
        first_step: Of the global step, when training begins.
        all_workers: Whether training begins when all workers are there.
        rule: Class of the optimizer of table "moved".
        accumulator: Options of the accumulator of table "held".
        cancels_takes: Whether the program cancels takes.
        works: What the program does beside its batches: names of tables without calls.
        layouts: (ps tasks, shards of a variable) of lives that attach to nothing, in turn, after
            the first one. If there are any, another life restores what was saved at the end.
        shares: Whether all tasks are of one host, and share memory.
        sizes: That are others than usual, by their names in ``tight.SIZES``.
        compression: Of all optimizers. What they push needs no rounding.
        sets_steps: Whether the program sets how many updates optimizers have made.
        packed: Whether small variables lie on ps 0 together.
    """

    seed: int
    num_ps: int
    num_workers: int
    num_shards: int
    recovery: str
    attach: bool
    latency: tuple[float, float]
    chunk: tuple[int, int]
    padding: int
    fillers: int
    groups: tuple[GroupPlan, ...]
    bound: int
    batches: tuple[Batch, ...]
    faults: tuple[Fault, ...]
    train_s: float
    spread: float = 0.0
    limits: dict[str, int] = field(default_factory=dict)
    first_step: int = 0
    all_workers: bool = False
    rule: str = "Adam"
    accumulator: dict[str, Any] = field(default_factory=dict)
    cancels_takes: bool = False
    works: tuple[str, ...] = ()
    layouts: tuple[tuple[int, int], ...] = ()
    sizes: dict[str, float] = field(default_factory=dict)
    compression: Compression | None = None
    shares: bool = False
    sets_steps: bool = False
    packed: bool = False

    def step_of(self, group: int) -> int:
        """Return the number of the global step of a group: some have one of their own."""
        return group if self.groups[group].own_step else 0

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` has written."""
        plan: Plan = _made(cls, json.loads(text))
        return plan


def _made(kind: Any, value: Any) -> Any:
    """Return what JSON has made of a value of this kind: of its parts a list, or a mapping."""
    if dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _made(kinds[name], each) for name, each in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_made(get_args(kind)[0], each) for each in value)  # all are of one kind
    return value
