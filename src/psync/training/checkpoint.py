"""Checkpoints of a program: its variables and other objects by name, numbered, and pruned.

    checkpoint = psync.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    manager = psync.CheckpointManager(checkpoint, "run/checkpoints", max_to_keep=3)
    await manager.restore_or_initialize()
    for progress.epoch in range(progress.epoch, 10):
        ...
        await coordinator.join()
        await manager.save()

A checkpoint shows one instant of all ps tasks. It is taken while training continues, so it may be
saved at any time. All ps tasks write their whole snapshots of that cut in parallel; the program
writes computed arrays, whose inputs it reads from the same cut. A ps that does not see the
program's directory sends its arrays, and the program writes the same file. Each ps finds that out
when it is told to write, by a file with a random text that the program has put there. So it costs
no message, and is right also after a directory was mounted or a ps has moved.

A ps that is brought back reads files by their paths, while the program may go on saving. It reads
the newest, which is never removed; and no ``save`` removes one that a rollback is using.

Names are paths: ``Checkpoint(model=dense)`` saves the attribute ``w`` of ``dense`` as "model/w".
So a variable may be called otherwise in the program that restores it, and lie on other ps tasks.

Paths through a list have a position in it, which says nothing of a variable once the list has
another order. So a ``Trainer`` calls what it finds below a list or tuple by the variable's name,
and ``Checkpoint(model=[w, b])`` finds it there.

Slots and moving averages are called by the names of their variables. Those that the program did not
choose say only in which order variables were declared. So what belongs to a variable is looked for
under the name of the one that had its path.

Source: ``tf.train.Checkpoint`` and ``tf.train.CheckpointManager``. There, a sharded variable must
be restored into the saved number of shards; here, any number works, including for its slots. There,
variables are read one after the other while others may change.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from psync.api.cluster_coordinator import coordinator_of
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers import Optimizer, Slot, pushes_of
from psync.api.pulls import leaves
from psync.api.scopes import running_scopes, runtime_here, runtime_of, scope_of
from psync.api.variables import Handle, Module, OnReadVariable, Variable
from psync.checkpoints import files
from psync.checkpoints.manifest import (
    Layout,
    Manifest,
    Wanted,
    changed_rate,
    check_state,
    step_of,
)
from psync.checkpoints.ownership import Owner, own
from psync.chief.consistent_cut import Cut
from psync.client.context import forbid_in_step
from psync.coordinator import Coordinator
from psync.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigurationError,
    CutLost,
    FencedError,
    PsyncError,
    RemoteError,
    TransportError,
    UsageError,
    other_loop,
)
from psync.metrics import Metric
from psync.net.platform import flag, random_hex
from psync.net.shielding import carried_out, first_of
from psync.schedules import Schedule, from_config
from psync.specs import checked_integer, checked_kind, dtype_of, shortened
from psync.status.html_tables import table
from psync.status.progress import kind_of, showing, size_of
from psync.store.snapshot import constant_views, element
from psync.store.snapshot_state import SnapshotItem, SnapshotState

logger = logging.getLogger(__name__)

T = TypeVar("T")

OWNER = "OWNER"
"""The file in a directory of checkpoints that names the process which saves there."""

LOOK_EVERY_S = 0.1
"""How often progress is looked at."""

TRIES = 5
"""A save is begun anew when the cut is lost, since a ps was cut off, or lost and recovered."""


# --- what is saved, under which names ------------------------------------------------------------


@runtime_checkable
class Stateful(Protocol):
    """An object without arrays that a checkpoint can hold."""

    def checkpoint_state(self) -> Any:
        """Return what it has to be restored from: numbers, texts, lists and dicts of them."""

    def restore_checkpoint_state(self, state: Any) -> None:
        """Become what the state says."""


CHECK = "check_checkpoint_state"
"""A method of objects that say whether they can take a state, before anything is restored."""


class SavedState:
    """The program's own values that a checkpoint should hold, as attributes.

    Args:
        values: Initial values by name: numbers, texts, None, lists and dicts of them.

    Example:
        progress = psync.SavedState(epoch=0)
        checkpoint = psync.Checkpoint(model=model, progress=progress)
        progress.epoch += 1
    """

    def __init__(self, **values: Any) -> None:
        _check_values(values)
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_values({name: value})
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"SavedState({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    def __getattr__(self, name: str) -> Any:  # only of what is not there; types need to be told
        raise AttributeError(f"no value {name!r} was saved or set")

    def checkpoint_state(self) -> Any:
        """Return the values."""
        return dict(vars(self))

    def restore_checkpoint_state(self, state: Any) -> None:
        """Take the values of a checkpoint; values that are missing in it stay."""
        self.__dict__.update(state)

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise ConfigurationError unless the state is values by name."""
        _check_values(state)


def _check_values(values: Any) -> None:
    """Refuse what would hide a method of ``SavedState``.

    Raises:
        ConfigurationError: A name is one of a method, or these are no values by name.
    """
    if not isinstance(values, dict):
        raise ConfigurationError(f"saved state: expected values by name, got {shortened(values)}")
    taken = sorted(name for name in values if hasattr(SavedState, name))
    if taken:
        raise ConfigurationError(
            f"saved state: expected names of values, got {taken[0]!r}, which is an attribute of "
            "SavedState",
            hint="give the value another name",
        )


ValueOf = Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], Any]
"""Makes the value of an object of the arrays and states of a checkpoint, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Wanted):
    """One shard of an array, and how it is read and written."""

    read: Callable[[], Awaitable[Any]]  # an array, or an iterator of pieces of one
    write: Callable[[np.ndarray], Awaitable[Any]]
    fill: float = 0.0  # what a slot begins with
    compute: Callable[[np.ndarray], Awaitable[np.ndarray]] | None = None
    """Makes it of the shard's value; None: it is the value, or the slot."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a checkpoint holds."""

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[Part]


@dataclass(slots=True)
class Contents:
    """Everything that a checkpoint holds.

    Attributes:
        slots: Whether those of optimizers are among the arrays: which there are is known only
            while a coordinator runs.
        arrays: By name.
        states: By name.
        optimizers: By path; below it their steps and learning rates are kept as states.
        handles: The variables, by the first path of each.
        by_variable: Paths below which arrays are called by the names of their variables.
    """

    slots: bool = True
    arrays: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Stateful] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    handles: dict[str, Handle] = field(default_factory=dict)
    by_variable: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)  # of all arrays and states
    _values: dict[Any, ValueOf | None] = field(default_factory=dict)
    """By variables, and ids of other objects; None while what an object holds is taken up."""

    def add(self, path: str, thing: Any) -> ValueOf:
        """Take up an object, and what it holds; return how its value is read.

        Raises:
            UsageError: It is nothing that a checkpoint can hold.
        """
        key = thing if isinstance(thing, Handle) else id(thing)
        if key not in self._values:  # the first path is its name
            self._values[key] = None
            self._values[key] = self._added(path, thing)
        return lambda *saved: cast(ValueOf, self._values[key])(*saved)

    def _added(self, path: str, thing: Any) -> ValueOf:
        match thing:
            case Handle():
                self.handles[path] = thing
                self._add_array(path, thing)
                return lambda arrays, states: arrays[path]
            case Optimizer():
                return self._add_optimizer(path, thing)
            case ExponentialMovingAverage():
                self.by_variable.append(path)
                named = ((variable.name, average) for variable, average in thing.items())
                return self._add_all(path, named)
            case Metric():
                sums = self.add(f"{path}/sums", thing.variables[0])
                return lambda *saved: thing.value_of(sums(*saved))
            case Module():
                items = thing._checkpoint_items().items()
                return self._add_all(path, [each for each in items if _holds_something(each[1])])
            case Stateful():
                self._check_new(path)
                self.states[path] = thing
                return lambda arrays, states: states[path]
            case dict():
                return self._add_all(path, thing.items())
            case list() | tuple():
                values = self._add_all(path, enumerate(thing))
                made_by = list if isinstance(thing, list) else tuple
                make = getattr(thing, "_make", made_by)  # of named tuples
                return lambda *saved: make(values(*saved).values())
        raise UsageError(
            f"checkpoint: {path!r} is {type(thing).__name__}, which cannot be saved",
            hint="a checkpoint can hold variables, optimizers, metrics, moving averages, modules, "
            "SavedState(epoch=0), dicts and lists of these, and objects with checkpoint_state()",
        )

    def _check_new(self, name: str) -> None:
        """Refuse a second thing of one name: the first would be neither saved nor restored.

        Raises:
            UsageError: There is one.
        """
        if name in self._names:
            raise UsageError(
                f"checkpoint: two objects are called {name!r}",
                hint="names are paths: use dict keys without '/' whose texts differ",
            )
        self._names.add(name)

    @property
    def parts(self) -> list[Part]:
        """The shards of all arrays."""
        return [part for array in self.arrays.values() for part in array.parts]

    def present_states(self) -> dict[str, Any]:
        """Return the states of objects without arrays, as they are now; later changes do not show.

        Raises:
            CheckpointError: One would not come back from a checkpoint as it is.
        """
        states = {}
        for name, thing in self.states.items():
            state = thing.checkpoint_state()
            check_state(name, state)
            states[name] = copy.deepcopy(state)
        return states

    def restore_states(self, states: Mapping[str, Any], where: Path) -> None:
        """Give objects without arrays their states; if one refuses, all are as they were.

        Raises:
            CheckpointMismatch: A state is not one of its object's.
            PsyncError: What an object of psync's raises.
        """
        wanted = [(name, thing) for name, thing in self.states.items() if name in states]
        before: list[tuple[Stateful, Any]] = []
        try:
            for name, thing in wanted:
                check_state(name, states[name])
                if (check := getattr(thing, CHECK, None)) is not None:
                    check(states[name])
            # Those that can refuse come first.
            for name, thing in sorted(wanted, key=lambda each: hasattr(each[1], CHECK)):
                with contextlib.suppress(Exception):  # a user's object may not be ready for it
                    before.append((thing, thing.checkpoint_state()))
                thing.restore_checkpoint_state(states[name])
        except Exception as exc:
            for each, state in reversed(before):
                if each is not thing or not isinstance(exc, PsyncError):  # ours look before they do
                    with contextlib.suppress(Exception):
                        each.restore_checkpoint_state(state)
            if isinstance(exc, UsageError) and not isinstance(exc, ConfigurationError):
                raise
            said = exc.message if isinstance(exc, PsyncError) else repr(exc)
            raise CheckpointMismatch(
                f"{where}: {name!r} is no state of {type(thing).__name__}: {said}",
                hint="nothing was restored; restore another checkpoint, or one without this object",
            ) from exc

    def compared(
        self, manifest: Manifest, where: object, hint: str, *, partial: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names that a checkpoint does not have, and those that nobody asks for.

        Args:
            manifest: Of the checkpoint.
            where: It is, for messages.
            hint: What to do if it does not fit.
            partial: Whether the checkpoint may lack something.

        Raises:
            CheckpointMismatch: It does not fit; all names are in the message.
        """
        has = {*manifest.tensors, *manifest.states}
        asked = {*self.arrays, *self.states, *(f"{path}/step" for path in self.optimizers)}
        missing = tuple(sorted(asked - has))
        # A rate is there if it was set.
        extra = tuple(sorted(has - asked - {f"{path}/learning_rate" for path in self.optimizers}))
        misshaped = [
            f"{name}: saved as {saved.shape} {saved.dtype}, declared as {mine.shape} {mine.dtype}"
            for name, mine in self.arrays.items()
            if (saved := manifest.tensors.get(name)) is not None
            and (saved.shape, saved.dtype) != (mine.shape, mine.dtype)
        ]
        if misshaped or (missing and not partial):
            raise CheckpointMismatch(
                f"{where} does not fit what is declared here"
                + _listed("missing in it", missing)
                + _listed("of another shape or dtype", misshaped)
                + _listed("not asked for", extra),
                hint=hint,
            )
        return missing, extra

    def _add_all(self, path: str, items: Iterable[tuple[Any, Any]]) -> ValueOf:
        values = {key: self.add(f"{path}/{key}", item) for key, item in items}
        return lambda *saved: {key: value(*saved) for key, value in values.items()}

    def _add_optimizer(self, path: str, optimizer: Optimizer) -> ValueOf:
        self._check_new(f"{path}/step")
        self._check_new(f"{path}/learning_rate")
        self.optimizers[path] = optimizer._holder
        self.by_variable += [f"{path}/{slot}" for slot in optimizer.get_slot_names()]
        for slot in optimizer.variables() if self.slots else ():
            self._add_array(f"{path}/{slot.name}/{slot.variable.name}", slot)

        def values(arrays: Mapping[str, np.ndarray], states: Mapping[str, Any]) -> dict[str, Any]:
            """Return the step of the optimizer, and those of its slots that were read."""
            found: dict[str, Any] = {"step": states[f"{path}/step"]}
            for name, array in arrays.items():
                if name.startswith(f"{path}/"):
                    slot, _, variable = name.removeprefix(f"{path}/").partition("/")
                    found.setdefault(slot, {})[variable] = array
            return found

        return values

    def _add_array(self, name: str, source: Handle | Slot) -> None:
        self._check_new(name)
        slot = source if isinstance(source, Slot) else None
        variable: Any = source if slot is None else slot.variable
        dtype = variable.spec.dtype if slot is None else slot.dtype
        shards = [variable] if isinstance(variable, Variable) else variable.variables
        parts = []
        for shard, spec in zip(shards, variable.spec.shards, strict=True):
            made = functools.partial(Part, name, shard.shape, dtype, spec.offset, key=spec.key)
            if slot is not None:
                own = Slot(shard, slot.optimizer, slot.name)
                made = functools.partial(made, optimizer=own.optimizer.number, slot=own.name)
                parts.append(made(read=own.read, write=own.assign, fill=slot.first_element))
            elif isinstance(shard, OnReadVariable):  # of which only the aggregate is kept
                made = functools.partial(made, compute=shard.checkpoint_value_of)
                parts.append(made(read=shard.checkpoint_value, write=shard.restore_value))
            else:
                parts.append(made(read=shard.read, write=shard.assign))
        self.arrays[name] = Array(variable.shape, dtype, parts)


def _holds_something(value: Any) -> bool:
    """Return whether an attribute of a module is saved: settings and functions are not."""
    if isinstance(value, dict):
        return any(map(_holds_something, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_something, value))
    return isinstance(value, Handle | Optimizer | ExponentialMovingAverage | Metric | Module) or (
        isinstance(value, Stateful) and not isinstance(value, type)
    )


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"; {what}: {shown}" if names else ""


def numbers_of(
    optimizers: Mapping[str, Optimizer], states: Mapping[str, Any], path: Path
) -> tuple[dict[Optimizer, int], dict[Optimizer, Schedule]]:
    """Return with which steps, and with which learning rates, optimizers go on that were saved.

    Args:
        optimizers: By the names under which they were saved.
        states: Of the checkpoint; None as a rate: the one that the optimizer was made with.
        path: Of the checkpoint.

    Raises:
        CheckpointMismatch: One is none.
    """
    steps: dict[Optimizer, int] = {}
    rates: dict[Optimizer, Schedule] = {}
    for each, optimizer in optimizers.items():
        step, rate = f"{each}/step", f"{each}/learning_rate"
        try:
            if step in states:
                pushes_of(optimizer, states[step])
                steps[optimizer] = states[step]
            if rate in states:
                made_with = optimizer._config["learning_rate"]
                rates[optimizer] = from_config(made_with if states[rate] is None else states[rate])
        except ConfigurationError as exc:
            text = f"{path}: {each!r} cannot go on from its step and learning rate: {exc.message}"
            raise CheckpointMismatch(text, hint=exc.hint) from None
    return steps, rates


# --- names of other programs, on restore ----------------------------------------------------------


def by_name(tree: Any) -> Any:
    """Return the variables in a nesting, as a checkpoint is to hold them: none by its position.

    Args:
        tree: As ``pull`` takes it.
    """
    if isinstance(tree, dict):
        return {key: by_name(item) for key, item in tree.items() if leaves(item)}
    if isinstance(tree, list | tuple):
        return {variable.name: variable for variable in leaves(tree)}
    return tree


def opened(
    path: str | os.PathLike[str], contents: Contents, hint: str, partial: bool = False
) -> tuple[files.Reader, tuple[str, ...], tuple[str, ...]]:
    """Return a checkpoint, with tensors called as ``contents`` calls them, and how they compare.

    Args:
        path: Of the checkpoint.
        contents: What is declared here.
        hint: As for ``Contents.compared``, as ``partial`` is.

    Returns:
        The checkpoint, the names that it does not have, and those that nobody asks for.

    Raises:
        CheckpointMismatch: It does not fit.
        CheckpointNotFound, CheckpointCorrupt, CheckpointError: As ``Reader``.
    """
    reader = files.Reader(Path(path))
    reader.manifest = _with_names_of(contents, reader)
    return reader, *contents.compared(reader.manifest, reader.path, hint, partial=partial)


def _with_names_of(contents: Contents, reader: files.Reader) -> Manifest:
    tensors = reader.manifest.tensors
    found: dict[str, str] = {}  # names in the checkpoint → here
    for path, handle in contents.handles.items():
        name = _below_list(path, handle.name)
        if path not in tensors and name in tensors and name not in contents.arrays:
            found[name] = path
    found |= _renamed(contents, {path: name for name, path in found.items()}, reader)
    kept = {name: tensor for name, tensor in tensors.items() if name not in found}
    named = {name: replace(tensors[was], name=name) for was, name in found.items()}
    return replace(reader.manifest, tensors=kept | named)


def _renamed(contents: Contents, found: Mapping[str, str], reader: files.Reader) -> dict[str, str]:
    """Return the names here of what is called by a variable that has another name by now.

    Args:
        contents: What is declared here.
        found: Names in the checkpoint of what it calls otherwise than it is called here.
        reader: Of the checkpoint.
    """
    if not contents.by_variable:
        return {}
    names, now = _variable_names(reader), {}
    for path, handle in contents.handles.items():
        was = names.get(found.get(path, path), handle.name)
        if was != handle.name:
            now[was] = handle.name
    pairs = [(each, was, name) for each in contents.by_variable for was, name in now.items()]
    renamed = {f"{each}/{was}": f"{each}/{name}" for each, was, name in pairs}
    return {was: name for was, name in renamed.items() if was in reader.manifest.tensors}


def _below_list(path: str, variable: str) -> str:
    """Return how a trainer calls a variable that is at a path through a list; else ""."""
    parts = path.split("/")
    at = next((at for at, part in enumerate(parts) if at and part.isdecimal()), None)
    return "" if at is None else "/".join((*parts[:at], variable))


def _variable_names(reader: files.Reader) -> dict[str, str]:
    """Return of which variable each tensor is the value, as far as what each ps held says it."""
    values: dict[tuple[str, int], str] = {}  # (file, first byte) → variable
    for snapshot in reader.snapshots():
        state = snapshot.state
        for place in snapshot.places:
            item = state.items[place.item]
            if place.nbytes and not item.slot:
                values[snapshot.file.name, place.start] = state.specs[item.key].variable
    return {
        tensor.name: values[piece.file, piece.start]
        for tensor in reader.manifest.tensors.values()
        for piece in tensor.slices
        if piece.nbytes and (piece.file, piece.start) in values
    }


# --- checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        path: Path of the checkpoint.
        number: Number of its save.
        missing: Names that the checkpoint did not have; their objects are unchanged.
        extra: Names in the checkpoint without an object here.
    """

    path: Path
    number: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]


Saved = tuple[Path, Coordinator | None, Sequence[SnapshotState]]
"""A saved checkpoint; the coordinator whose ps tasks wrote it, if they did; and what they held."""


class Checkpoint:
    """Objects that are saved and restored together, each under the name given here.

    Args:
        objects: Variables, modules, optimizers (their slots and steps, and a learning rate that was
            set later), metrics, moving averages, visits of data shards, ``SavedState`` and all
            objects with ``checkpoint_state``; dicts and lists of them.

    Raises:
        UsageError: No object is given, an object cannot be saved, a name begins with "~", or the
            call is inside a step.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"

    def __init__(self, **objects: Any) -> None:
        forbid_in_step("making a checkpoint")
        if not objects:
            raise ConfigurationError(
                "checkpoint: expected objects to save", hint="Checkpoint(model=model)"
            )
        for name in objects:
            if name.startswith("~"):
                raise ConfigurationError(
                    f"checkpoint: {name!r} cannot be a name: '~' is reserved for state that is not "
                    "saved by name"
                )
        self._objects = objects
        self._contents(slots=False)  # what cannot be saved is refused here

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    def _repr_html_(self) -> str:
        contents = self._contents(slots=False)
        rows: list[tuple[object, ...]] = [
            (name, "variable", each.shape, each.dtype, sum(part.nbytes for part in each.parts))
            for name, each in contents.arrays.items()
        ]
        others: dict[str, object] = {**contents.optimizers, **contents.states}
        rows += [(name, type(thing).__name__, "", "", "") for name, thing in others.items()]
        slots = ", with the slots of its optimizers" if contents.optimizers else ""
        title = f"Checkpoint of {', '.join(self._objects)}{slots}"
        return table(title, ("name", "what", "shape", "dtype", "bytes"), rows)

    async def save(
        self,
        directory: str | os.PathLike[str],
        *,
        number: int | None = None,
        verbose: bool | str = False,
    ) -> Path:
        """Write a checkpoint and return its path; it is either complete or absent.

        A checkpoint shows one instant: each acknowledged update is included completely, and every
        other update completely or not at all. Updates wait for this instant, not for the disk.
        Objects without arrays are asked for their states at this instant.

        A training session without a ``ClusterCoordinator`` instead reads one shard after the other,
        so concurrent pushes may be in some shards and not in others.

        Args:
            directory: Directory of all checkpoints, created if missing. ps tasks that see it under
                the same path write there themselves.
            number: Number of this checkpoint, from 0. Default: the highest there plus one.
            verbose: Whether to show progress: False, "lines", "bar"; "auto" or True: a bar on a
                terminal, otherwise lines.

        Raises:
            CheckpointError: The disk is full or fails, or ``directory`` is not a directory: the
                message names path, number and step. Or there is already a checkpoint of that
                number; or a ps was cut off or died, or serves another coordinator. Earlier
                checkpoints are intact.
            ConfigurationError: The number is invalid, or another program saves there.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Nothing remains of the checkpoint, unless it was already complete.
        """
        path, *_ = await self._saved(Path(directory), number, verbose)
        return path

    async def _saved(
        self, directory: Path, number: int | None, verbose: bool | str = False
    ) -> Saved:
        """As ``save``; also say whose ps tasks wrote the checkpoint."""
        forbid_in_step("saving a checkpoint")
        if number is not None:
            hint = "save(int(await global_step.read()))"
            expected = "checkpoint: expected a whole number from 0"
            number = checked_integer(expected, number, 0, 10**18 - 1, hint=hint)
        kind_of(verbose)  # is it one?
        contents = self._contents()
        coordinator = await coordinator_for(contents)
        if coordinator is None:
            states = contents.present_states()
            for name, optimizer in contents.optimizers.items():
                states[f"{name}/step"] = int(await optimizer.iterations.read())
            return await _written(directory, number, contents, states, verbose), None, ()
        for tries_left in reversed(range(TRIES)):
            try:
                return await self._save_cut(coordinator, contents, directory, number, verbose)
            except (CutLost, FencedError, RemoteError, TransportError) as exc:
                recovering = coordinator.recovery.is_rolling_back
                if tries_left and (isinstance(exc, CutLost) or recovering):
                    logger.warning("saving a checkpoint starts again: %s", exc.message)
                    continue  # a ps was cut off, or was lost and has been recovered
                raise CheckpointError(
                    f"checkpoint in {directory}: it was not saved: {exc}",
                    hint="earlier checkpoints are intact",
                ) from exc
        raise AssertionError("unreachable")

    async def _save_cut(
        self, coordinator: Coordinator, contents: Contents, directory: Path, number: int | None,
        verbose: bool | str,
    ) -> Saved:  # fmt: skip
        """Take a cut and write it."""
        states: dict[str, Any] = {}
        async with coordinator.cuts.take(lambda: states.update(contents.present_states())) as cut:
            for name, optimizer in contents.optimizers.items():
                step = step_of(cut.snapshots, optimizer.number)
                states[f"{name}/step"] = optimizer._rule.iteration(step)
                states[f"{name}/learning_rate"] = changed_rate(cut.snapshots, optimizer.number)
            make = coordinator.parts.of(files.Writer)
            path = await _written(directory, number, contents, states, verbose, make, cut)
            try:
                cut.check_present()  # what was undone, and told so, must not be gone back to
            except CutLost:
                await in_thread(files.remove, path)
                raise
        return path, coordinator, cut.snapshots

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        partial: bool = False,
        verbose: bool | str = False,
    ) -> Restored:
        """Restore all objects from a checkpoint, saved with any number of ps tasks and shards.

        A ``SyncReplicasOptimizer`` that has made steps in this program continues to count from
        these, with its bias corrections and schedules. Restore it before its first push.

        Args:
            path: Path of the checkpoint, as returned by ``save``.
            partial: Whether objects that the checkpoint does not have stay unchanged. Additional
                entries of the checkpoint are always ignored and named in the result.
            verbose: See ``save``.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CheckpointCorrupt: The checkpoint is damaged. Nothing was restored.
            CheckpointMismatch: Entries are missing or have another shape or dtype (the message
                names all of them), or a state does not belong to its object. Nothing was restored.
            CheckpointError: The checkpoint cannot be read; the message names the path.
            UsageError: No coordinator is running.
            ParameterServerLost: A ps is lost.

        Cancellation: Some variables are restored, others are not. As after an error meanwhile, a
            chief that attaches starts again then, unless another restore has ended.
        """
        forbid_in_step("restoring a checkpoint")
        contents = self._contents()
        hint = "restore(path, partial=True) leaves what is missing as it is"
        reader, missing, extra = await asyncio.to_thread(opened, path, contents, hint, partial)
        manifest = reader.manifest
        named = [(part, manifest.tensors.get(part.tensor)) for part in contents.parts]
        found = [(part, tensor) for part, tensor in named if tensor is not None]
        steps, rates = numbers_of(contents.optimizers, manifest.states, reader.path)
        total, done = sum(part.nbytes for part, _ in found), 0

        async def assign(done: int) -> None:
            for part, tensor in found:
                stop = part.offset + part.rows
                await part.write(await asyncio.to_thread(reader.read, tensor, part.offset, stop))
                show((done := done + part.nbytes) // 2)
            for optimizer, step in steps.items():
                await optimizer.iterations.assign(step)
            for optimizer, rate in rates.items():
                await optimizer.set_learning_rate(rate)

        with showing(verbose, f"restoring {reader.path}", total) as show:
            for part, tensor in found:
                await asyncio.to_thread(reader.check, tensor)  # all, before any is replaced
                show((done := done + part.nbytes) // 2)
            contents.restore_states(manifest.states, reader.path)  # may refuse: before the others
            restore: Callable[[], Awaitable[None]] = functools.partial(assign, done)
            if not (found or steps or rates):
                await restore()  # nothing of it is on ps tasks
            else:
                coordinator = self._coordinator()
                if coordinator is not None:
                    restore = functools.partial(coordinator.recovery.assigning, restore)
                await self._as_first_state(restore)
        logger.info("restored %s", reader.path)
        return Restored(reader.path, manifest.number, missing, extra)

    async def _as_first_state(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Restore; again if a ps is lost meanwhile, and nothing has been computed before."""
        coordinator = self._coordinator()
        if coordinator is None:
            await restore()
        else:
            await coordinator.recovery.restored(restore)

    def _coordinator(self) -> Coordinator | None:
        handle = next(iter(self._contents(slots=False).handles.values()), None)
        running = running_scopes() if handle is None else []  # slots may be restored alone
        origin = handle.origin if handle is not None else ""
        found = coordinator_of(running[0]._origin if len(running) == 1 else origin)
        if found is not None and asyncio.get_running_loop() is not found.links.ps.loop:
            raise other_loop("restoring a checkpoint")
        return found

    async def read(self, path: str | os.PathLike[str], *, slots: bool = False) -> dict[str, Any]:
        """Return the values of a checkpoint, without restoring them and without a cluster.

        Args:
            path: Path of the checkpoint, as returned by ``save``.
            slots: Whether to read the slots of optimizers as well.

        Returns:
            The saved values, nested as the objects of this ``Checkpoint``. A variable is one whole
            numpy array. Dicts, lists and tuples are unchanged. A module is a dict of its
            attributes, and a ``SavedState`` a dict of its values. A metric is its value. Moving
            averages have the names of their variables. An optimizer is {"step": …}, with ``slots``
            also {slot: {name of the variable: array}}.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CheckpointCorrupt: The checkpoint is damaged.
            CheckpointMismatch: Entries are missing or have another shape or dtype: the message
                names all of them.

        Cancellation: Safe.

        Example:
            values = await checkpoint.read(psync.latest_checkpoint("run/checkpoints"))
            logits = x @ values["model"]["w"]
        """
        contents = self._contents(slots=False)
        hint = "declare what the program declares that has saved it, and give it the same names"
        reader, *_ = await asyncio.to_thread(opened, path, contents, hint)
        manifest = reader.manifest
        prefixes = tuple(f"{path}/" for path in contents.optimizers) if slots else ()
        arrays = {
            name: await asyncio.to_thread(reader.read, tensor, 0, tensor.rows)
            for name, tensor in manifest.tensors.items()
            if name in contents.arrays or name.startswith(prefixes)
        }
        objects, saved = self._objects.items(), (arrays, manifest.states)
        return {name: contents.add(name, thing)(*saved) for name, thing in objects}

    def _contents(self, *, slots: bool = True) -> Contents:
        contents = Contents(slots)
        for name, thing in self._objects.items():
            contents.add(name, thing)
        return contents


class CheckpointManager:
    """The numbered checkpoints of one program in one directory, with old ones removed.

    When a ps is lost, the program rolls back to the newest of its last five checkpoints without a
    damaged file; see ``ClusterCoordinator``. The newest is the last one it saved. Before the first
    save, it is the one that ``restore_or_initialize`` found, if the program and the number of ps
    tasks and shards are the same. With several managers, the checkpoints of all count.

    While a coordinator is running, this process owns the directory, from the time the manager is
    created, or first used, under the coordinator. A manager of another program then raises an error
    that names this process. Reading is always possible: ``psync.latest_checkpoint(directory)``,
    ``Checkpoint.restore``.

    Args:
        checkpoint: Objects to save.
        directory: Directory of the checkpoints, created if missing. One program at a time may use
            it.
        max_to_keep: Number of newest checkpoints to keep; None: no limit.
        keep_every_n_steps: Checkpoints whose number is a multiple of this are never removed.

    Raises:
        ConfigurationError: An argument is out of range, or another program uses the directory.

    Source: ``tf.train.CheckpointManager``.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every_n_steps: int | None = None,
    ) -> None:
        hint = "CheckpointManager(psync.Checkpoint(model=model), directory)"
        checked_kind("checkpoint manager: expected a Checkpoint", checkpoint, Checkpoint, hint=hint)
        self._checkpoint = checkpoint
        self.directory = Path(directory)
        self._max_to_keep = _positive("max_to_keep", max_to_keep)
        self._keep_every = _positive("keep_every_n_steps", keep_every_n_steps)
        self._under_way = 0  # saves
        for coordinator in _coordinators():
            coordinator.owned.add(own_directory(self.directory))

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._checkpoint!r} in {str(self.directory)!r}>"

    async def _own(self) -> None:
        """Let no other program save there while the coordinator runs."""
        for coordinator in _coordinators():
            coordinator.owned.add(await in_thread(own_directory, self.directory))

    def _repr_html_(self) -> str:
        found = files.checkpoints_in(self.directory)
        rows = [(number, str(path)) for number, path in found]
        return table(f"Checkpoints in {self.directory}", ("number", "path"), rows)

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        return [path for _, path in files.checkpoints_in(self.directory)]

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None; raises the errors of ``checkpoints``."""
        return latest_checkpoint(self.directory)

    async def save(
        self,
        checkpoint_number: int | None = None,
        *,
        last: bool = False,
        verbose: bool | str = False,
    ) -> Path:
        """Save, then remove checkpoints that need not be kept; see ``Checkpoint.save``.

        Args:
            checkpoint_number: Number from 0, such as the global step. Default: the highest plus
                one.
            last: Whether this is the last checkpoint; see ``finish``.
            verbose: See ``Checkpoint.save``.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: See ``Checkpoint.save``. Also raised if an old checkpoint cannot be
                removed or the last one cannot be marked; the new one is complete in these cases.
            ConfigurationError, UsageError, ParameterServerLost: See ``Checkpoint.save``.

        Cancellation: See ``Checkpoint.save``; old checkpoints may remain.
        """
        await self._own()
        self._under_way += 1
        try:
            path, coordinator, snapshots = await self._checkpoint._saved(
                self.directory, checkpoint_number, verbose
            )
        finally:
            self._under_way -= 1
        checkpoints = files.NewestCheckpoints()
        if coordinator is not None:
            coordinator.recovery.saved(path, snapshots)
            checkpoints = coordinator.recovery.checkpoints
        # Not after an await: a rollback that begins from now on uses those of ``paths``.
        needed = [path, *[*filter(None, checkpoints.paths)][-(self._max_to_keep or 1) :]]
        if self._max_to_keep is not None:
            found = await asyncio.to_thread(files.checkpoints_in, self.directory)
            for each, old in found[: -self._max_to_keep]:
                stays = self._keep_every is not None and each % self._keep_every == 0
                if not (stays or old in needed or old == checkpoints.in_use):
                    checkpoints.remove(old)
                    await asyncio.to_thread(files.remove, old)
        if not self._under_way:
            number = int(path.name.rpartition("-")[2])
            await asyncio.to_thread(files.remove_leftovers, self.directory, number)
        if last:
            await self.finish()
        return path

    async def finish(self) -> Path | None:
        """Mark the newest checkpoint as the last, after which a ``SidecarEvaluator`` stops.

        ``restore_or_initialize`` removes the mark, because the program continues.

        Returns:
            The path of the newest checkpoint, or None if there is none and nothing was marked.

        Raises:
            CheckpointError: The disk fails or is full.

        Cancellation: The mark may have been written.
        """
        newest = await asyncio.to_thread(latest_checkpoint, self.directory)
        if newest is not None:
            await asyncio.to_thread(files.mark_last, newest)
        return newest

    async def restore_or_initialize(self, *, verbose: bool | str = False) -> Path | None:
        """Restore the newest checkpoint; if there is none, all objects keep their declared values.

        Args:
            verbose: See ``Checkpoint.save``.

        Returns:
            Its path, or None.

        Raises:
            CheckpointError, UsageError, ParameterServerLost: See ``Checkpoint.restore``. A damaged
                checkpoint is not passed over, unless it has lost its file COMMIT, which is logged:
                move its directory away to restore the one before.
            ConfigurationError: Another program uses the directory.

        Cancellation: See ``Checkpoint.restore``.
        """
        await self._own()
        latest = await asyncio.to_thread(_latest_restorable, self.directory)
        if latest is not None:

            async def restore() -> None:
                await self._checkpoint.restore(latest, verbose=verbose)
                await asyncio.to_thread(files.unmark_last, latest)
                await self._offer_restored(latest)

            await self._checkpoint._as_first_state(restore)
        return latest

    async def _offer_restored(self, path: Path) -> None:
        """Let the coordinator roll back to a checkpoint of an earlier program, if that fits."""
        contents = self._checkpoint._contents()
        coordinator = await coordinator_for(contents)
        if coordinator is None or not contents.handles:
            return
        scope = scope_of(next(iter(contents.handles.values())))
        variables = scope._variables if scope is not None else []
        shards = [shard for variable in variables for shard in variable.spec.shards]
        optimizers = {each.number: each._config for each in contents.optimizers.values()}
        num_ps = len(coordinator.links.ps.links)
        reason = await asyncio.to_thread(files.why_not, path, num_ps, shards, optimizers)
        if reason is None:
            coordinator.recovery.checkpoints.add(path)
        else:
            logger.info("before the first save a lost ps cannot be recovered: %s", reason)


def _positive(name: str, value: object) -> int | None:
    expected = f"checkpoint manager: expected {name} above 0, or None"
    return None if value is None else checked_integer(expected, value, 1)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a directory, or None.

    A missing directory counts as empty.

    Raises:
        CheckpointError: The directory cannot be read.

    Source: ``tf.train.latest_checkpoint``.
    """
    found = files.checkpoints_in(Path(directory))
    return found[-1][1] if found else None


def _latest_restorable(directory: Path) -> Path | None:
    """As ``latest_checkpoint``; log what is newer, and no checkpoint."""
    for _, path in reversed(files.checkpoints_in(directory, damaged=True)):
        if files.is_complete(path):
            return path
        logger.warning(
            "%s is passed over: it has no COMMIT, since its save never ended, or the file was "
            "lost; to restore it, put COMMIT back from a copy; otherwise move the directory away",
            path,
        )
    return None


def _coordinators() -> list[Coordinator]:
    """Return the coordinators that run in this process."""
    found = [coordinator_of(scope._origin) for scope in running_scopes()]
    return [coordinator for coordinator in found if coordinator is not None]


# --- saving ---------------------------------------------------------------------------------------


async def _shown(
    work: Coroutine[Any, Any, None], verbose: bool | str, writer: files.Writer, total: int
) -> None:
    """Await the writing of a checkpoint, and show how far it is: as its files grow."""

    async def look() -> None:
        while True:
            show(min(total, await asyncio.to_thread(size_of, writer.temporary)))
            await asyncio.sleep(LOOK_EVERY_S)

    with showing(verbose, f"saving {writer.directory}", total) as show:
        await first_of(work, look())


async def coordinator_for(contents: Contents) -> Coordinator | None:
    """Return whose ps tasks hold what is saved; None: there is a training session instead.

    Raises:
        UsageError: There is neither, or variables are of several strategies.
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    if contents.handles:
        runtime = await runtime_of("saving a checkpoint", *contents.handles.values())
        return coordinator_of(runtime.origin)
    running = running_scopes()
    if len(running) != 1:
        return None
    runtime_here("saving a checkpoint", running[0])
    return coordinator_of(running[0]._origin)


async def _written(
    directory: Path,
    number: int | None,
    contents: Contents,
    states: dict[str, Any],
    verbose: bool | str,
    make: Callable[..., files.Writer] = files.Writer,
    cut: Cut | None = None,
) -> Path:
    """Write a checkpoint, or leave nothing of it.

    Args:
        directory: Of all.
        number: As of ``save``, as ``verbose`` is.
        contents: What is saved.
        states: Of what has no arrays.
        verbose: Whether to show how far it is.
        make: Makes the writer.
        cut: Is written; None: what is read now, one shard after the other.

    Raises:
        CheckpointError: The disk is full, or fails: says of which checkpoint and step.
    """
    begun: list[files.Writer] = []  # so that who is cancelled while it is made abandons it, too
    shapes = {name: (array.shape, array.dtype) for name, array in contents.arrays.items()}
    parts = contents.parts
    total, nonce = sum(part.nbytes for part in parts), ""
    if cut is not None:
        total = sum(item.nbytes for state in cut.snapshots for item in state.items)
        nonce = "" if flag(os.environ, files.STREAM_VARIABLE) else random_hex(16)
    owner = await in_thread(own_directory, directory)
    try:
        with files.disk_errors(str(directory)):
            if number is None:
                found = await in_thread(lambda: files.checkpoints_in(directory, damaged=True))
                number = found[-1][0] + 1 if found else 1
            name = f"ckpt-{number:08d}"
            await in_thread(
                lambda: begun.append(make(directory, name, number, shapes, states, nonce))
            )
            writer = begun[0]
            work = _write_parts(writer, parts) if cut is None else _write_cut(cut, parts, writer)
            if verbose:
                work = _shown(work, verbose, writer, total)
            await work
            return await in_thread(writer.commit)
    except BaseException as exc:
        for writer in begun:
            await in_thread(writer.abandon)
        if type(exc) is not CheckpointError:
            raise
        steps = [states[f"{path}/step"] for path in contents.optimizers]
        what = "a checkpoint" if number is None else f"checkpoint {number}"
        what += f" of step {max(steps)}" if steps else ""
        raise CheckpointError(f"saving {what}: {exc.message}", hint=exc.hint) from (
            exc.__cause__ or exc
        )
    finally:
        del owner  # it must not last as long as a traceback


def own_directory(directory: Path) -> Owner | None:
    """Become the one process that saves into a directory, which is made if it is not there.

    Returns:
        None: It cannot be written; saving says why.

    Raises:
        ConfigurationError: Another process saves there.
    """
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        return own(
            directory / OWNER,
            f"saves its checkpoints into {directory}",
            "give each program a directory of its own; to read while another one saves: "
            "psync.latest_checkpoint(directory) and Checkpoint.restore(path)",
        )
    return None


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Work on files in a thread; a cancelled caller still waits until it has ended.

    So a checkpoint is not removed, nor its files closed, while it is being completed.
    """
    return await carried_out(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def _write_cut(cut: Cut, parts: Sequence[Part], writer: files.Writer) -> None:
    """Write what ps tasks held at a cut. When something fails, all else has ended as well.

    Args:
        cut: Held meanwhile.
        parts: What is wanted by name.
        writer: Of the checkpoint.

    Raises:
        CheckpointError: The disk is full, or fails; or no ps holds a variable.
        CutLost, ParameterServerLost, RemoteError, TransportError: A ps did not write, or answer.

    Cancellation: Files are half written.
    """
    layout = Layout(cut.snapshots, [part for part in parts if part.compute is None])
    # What no ps writes: what is computed, such as the sum of copies, and new slots. It is read
    # first, since a ps lets go of what it has written.
    own: dict[Part, Any] = {}
    for part in parts:
        found = layout.find(part)
        if found is None and not part.slot:
            raise CheckpointError(
                f"checkpoint: no ps holds {part.tensor!r}",
                hint="it was declared while the checkpoint was saved: save again",
            )
        if found is None:
            fill = element(part.fill, dtype_of(part.dtype))
            item = SnapshotItem(
                part.label, part.key, part.optimizer, part.slot, part.shape, part.dtype, fill
            )
            own[part] = iter(constant_views(item))  # as it is before the first push
        elif part.compute is not None:
            own[part] = await part.compute(await cut.read(*found))
    try:
        async with asyncio.TaskGroup() as group:
            for ps in range(len(cut.snapshots)):
                group.create_task(_write_snapshot(cut, ps, layout, writer))
            group.create_task(_write_parts(writer, list(own), own))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _write_snapshot(cut: Cut, ps: int, layout: Layout, writer: files.Writer) -> None:
    """Have all arrays of a ps written, and note what is where."""
    name = f"ps-{ps:05d}-of-{len(cut.snapshots):05d}"
    path = writer.temporary.absolute() / f"{name}.safetensors"
    arrays, items = layout.arrays[ps], cut.snapshots[ps].items
    written = None
    if writer.nonce:
        written = await cut.write(ps, str(path), writer.nonce, arrays)
    if written is None:  # the ps does not see the directory: it sends them
        planned = {name: (items[number].shape, items[number].dtype) for number, name in arrays}
        with files.DataFile(path, planned) as data_file:
            for number, _ in arrays:
                async for piece in cut.pieces(ps, number):
                    await in_thread(data_file.extend, piece)
                data_file.end_array()
            written = await in_thread(data_file.close)
    slices, places = layout.lying_in(ps, path.name, written)
    writer.add_file(path.name, written, slices)
    state = await in_thread(cut.snapshots[ps].to_bytes)
    await in_thread(writer.add_snapshot, ps, f"{name}.json", state, path.name, places)


async def _write_parts(
    writer: files.Writer, parts: Sequence[Part], values: Mapping[Part, Any] | None = None
) -> None:
    """Write a file of the program's own; without ``values`` they are read now."""
    if not parts:
        return
    name = "data-00000.safetensors"
    planned = {part.label: (part.shape, part.dtype) for part in parts}
    with files.DataFile(writer.temporary / name, planned) as data_file:
        for part in parts:
            value = await part.read() if values is None else values[part]
            await in_thread(data_file.write, value)
        written = await in_thread(data_file.close)
    slices = [part.slice_in(name, at) for part, at in zip(parts, written.places, strict=True)]
    writer.add_file(name, written, slices)
