"""Declarations of variables, and their creation: shape, dtype, shards, initial values.

Declaring is synchronous and takes no memory on a ps. The values are made later, on the
chief, one shard at a time, and sent to the ps tasks. So a table larger than the chief's memory can
be declared with a callable that takes a shard's shape and offset. What an earlier program has left
on the ps tasks is adopted instead of being created.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psync.client.link import all_of, ask
from psync.client.ps import PsClient
from psync.client.tensors import array_of, is_tensor
from psync.errors import PartitionError, UsageError, naming
from psync.numerics.casting import overflow
from psync.partitioners import check_partitions, div_split
from psync.specs import ShardSpec, VariableSpec, dtype_name, dtype_of, plain_array
from psync.store.reattach import Adoption, Holding, Orders, Progress, partial_updates
from psync.store.snapshot_state import NewOptimizer
from psync.store.untrusted_json import read_json, to_json
from psync.wire.limits import Limits
from psync.wire.messages import AdoptShards, CreateShards, Done
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)


MAX_SHARD_BYTES = Limits().segment_bytes
"""A shard travels as one segment."""

MAX_NAME_CHARS = 1024
"""The names of many variables travel in one message header."""

WHOLE_VALUE_WARNING_ELEMENTS = 10**9
"""A callable that cannot make one shard at a time makes this much at once: say so."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declared variable and where its first value comes from."""

    spec: VariableSpec
    initial_value: Any  # an array, or a callable as described in ``initial_shards``
    original: VariableSpec | None = None
    """Or the variable beside which it lies and whose value it begins with: see ``api.scopes``."""


def describe(
    initial_value: Any, name: str, dtype: object, shape: tuple[int, ...] | None, where: str
) -> tuple[Any, tuple[int, ...], str]:
    """Return (initial value, shape, dtype name) of a variable to be declared.

    A callable is called only if shape or dtype are not given; its value then is kept.
    Python floats become float32 and Python integers int64, like lists of them; arrays keep
    their dtype. A constant (``np.broadcast_to(np.float32(0.1), shape)``) stays one.

    Args:
        initial_value: Array, number, (nested) list, or callable.
        name: Of the variable, for messages.
        dtype: Or None: that of the initial value.
        shape: Or None: that of the initial value.
        where: "file:line" of the declaration, for messages.

    Raises:
        UsageError: The name is no text that can be sent.
        PartitionError: No initial value, an unsupported dtype, or another shape than given.
    """
    check_name(name, where)
    subject = _subject(name, where)
    if initial_value is None:
        raise PartitionError(
            f"{subject}: initial_value is None",
            hint="pass an array, a number, or a callable that returns one",
        )
    named = None if dtype is None else _dtype_name(dtype, subject)
    if shape is not None:
        given = shape
        try:
            shape = tuple(operator.index(extent) for extent in given)
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            raise PartitionError(f"{subject}: expected a shape of integers, got {given!r}")
    value = initial_value
    if callable(value):
        if named is not None and shape is not None:
            takes_shard(value, subject)  # or raises
            return value, shape, named
        value = _call(value, shape, (0,) * len(shape or ()), subject)
    array = _first_value(value, named, subject)
    if shape is not None and shape != array.shape:
        raise PartitionError(
            f"{subject}: expected shape {shape}, the initial value has {array.shape}"
        )
    return array, array.shape, dtype_name(array.dtype)


def as_array(value: Any, dtype: str | None, subject: str) -> np.ndarray:
    """Return ``value`` as a C-contiguous array that nobody else changes.

    Args:
        value: Array, number or (nested) list.
        dtype: Name of the dtype to convert to, or None.
        subject: What the value is for, for messages.

    Raises:
        PartitionError: If it is not numeric, of a dtype that variables do not have, changed by
            becoming an integer or bool of ``dtype``, or infinite by becoming another float.
    """
    try:
        array = array_of(value) if is_tensor(value) else plain_array(value)
    except (ValueError, TypeError) as exc:
        raise PartitionError(f"{subject}: the value is not an array: {exc}") from exc
    if dtype is None:
        dtype = _dtype_name(array.dtype, subject)
        if dtype == "float64" and not hasattr(value, "dtype"):
            dtype = "float32"
    kind = dtype_of(dtype)
    if array.dtype.kind == "c":
        raise PartitionError(f"{subject}: expected {dtype}, got {array.dtype}")
    try:
        # NaN to integer, and numbers that become infinite: found below.
        with np.errstate(invalid="ignore", over="ignore"):
            made = np.array(array, dtype=kind, order="C", copy=True)
    except (ValueError, TypeError, OverflowError) as exc:
        raise PartitionError(f"{subject}: cannot be converted to {dtype}: {exc}") from exc
    if (beyond := overflow(array, made)) is not None:
        raise PartitionError(
            f"{subject}: expected values in the range of {dtype}, got {beyond}",
            hint="clip them, or use another dtype",
        )
    if kind.kind in "iub" and array.dtype != kind and not np.array_equal(made, array):
        raise PartitionError(
            f"{subject}: {array.dtype} values would change when converted to {dtype}",
            hint="round them, or use another dtype",
        )
    return made


def is_constant(value: np.ndarray) -> bool:
    """Return whether all elements are one and the same in memory, as ``np.broadcast_to`` makes it.

    Such a first value costs nothing, whatever its shape: it is made where the shard lies.
    """
    return value.size > 1 and not any(value.strides)


def _first_value(value: Any, dtype: str | None, subject: str) -> np.ndarray:
    """Return what ``as_array`` does, a constant without making its elements."""
    if not isinstance(value, np.ndarray) or not is_constant(value):
        return as_array(value, dtype, subject)
    element = value[(0,) * value.ndim + (...,)]
    return np.broadcast_to(as_array(element, dtype, subject), value.shape)


def split(
    whole: VariableSpec,
    partitioner: Callable[[tuple[int, ...], Any], Any] | None,
    place: Callable[[int], int],
) -> VariableSpec:
    """Return a variable with its shards: by the partitioner, each one placed.

    Args:
        whole: The variable, without shards.
        partitioner: (shape, dtype) → number of shards per axis, or None.
        place: Bytes of a shard → index of its ps.

    Raises:
        PartitionError: The partitioner's answer is not usable, or a shard is larger than a
            message may carry.

    Source: TensorFlow's ``ParameterServerStrategyV2Extended._create_variable``: "div" split,
        each shard takes a place of its own.
    """
    name, shape, dtype, num_shards = whole.name, whole.shape, whole.dtype, 1
    if partitioner is not None and shape and shape[0] > 0:
        try:
            num_shards = check_partitions(partitioner(shape, dtype_of(dtype)), shape, name)
        except PartitionError as exc:
            text = f"{exc.message}; declared at {whole.declared_at}"
            raise PartitionError(text, hint=exc.hint) from None
    rows = div_split(shape[0], num_shards) if num_shards > 1 else [(0, shape[0] if shape else 0)]
    number, rest = whole.variable_id, shape[1:]
    shards = [
        ShardSpec(name, number, index, offset, (count, *rest) if shape else (), dtype, 0)
        for index, (offset, count) in enumerate(rows)
    ]
    check_sizes(shards, whole.declared_at)  # before the first one takes a place
    placed = tuple(dataclasses.replace(shard, ps=place(shard.nbytes)) for shard in shards)
    return dataclasses.replace(whole, shards=placed)


def check_sizes(shards: Sequence[ShardSpec], where: str) -> None:
    """Refuse shards that no message can carry; ``where`` is "file:line" of the declaration."""
    for shard in shards:
        if shard.nbytes > MAX_SHARD_BYTES:
            raise PartitionError(
                f"{_subject(shard.variable, where)}: a shard of shape {shard.shape} {shard.dtype} "
                f"has {shard.nbytes} bytes, expected at most {MAX_SHARD_BYTES}",
                hint="split it into more shards: ParameterServerStrategy(…, "
                "variable_partitioner=psync.MaxSizePartitioner(256 << 20))",
            )


def initial_shards(
    declaration: Declaration,
) -> Iterator[tuple[ShardSpec, np.ndarray | ShardSpec]]:
    """Yield each shard of a variable with its first value, made when it is asked for.

    Of a copy each shard comes with that which it copies.

    A callable that needs two arguments (shape, offset) is called for each shard alone; one
    that needs none is called once for the whole variable, and its value cut.

    Raises:
        PartitionError: The callable's value does not fit; names the declaring line.
        Exception: What the callable raises, with a note that names the line.
    """
    spec, value = declaration.spec, declaration.initial_value
    if declaration.original is not None:
        yield from zip(spec.shards, declaration.original.shards, strict=True)
        return
    subject = _subject(spec.name, spec.declared_at)
    by_shard = callable(value) and takes_shard(value, subject)
    if callable(value) and not by_shard:
        if math.prod(spec.shape) > WHOLE_VALUE_WARNING_ELEMENTS:
            logger.warning(
                "%s: its initial_value creates all elements at once, not shard by shard", subject
            )
        value = initial_array(value, spec.shape, (), spec.dtype, subject)
    for shard in spec.shards:
        part = value
        if by_shard:
            offset = (shard.offset, *(0 for _ in shard.shape[1:])) if shard.shape else ()
            part = initial_array(value, shard.shape, offset, spec.dtype, f"{subject}, {shard}")
        elif shard.shape:
            part = value[shard.offset : shard.offset + shard.shape[0]]
        yield shard, part


def takes_shard(initializer: Callable[..., Any], subject: str) -> bool:
    """Return whether a callable needs the shape and the offset of a shard.

    One that can be called without arguments does not, whatever else it would take.

    Raises:
        PartitionError: It needs other arguments.
    """
    try:
        signature = inspect.signature(initializer)
    except ValueError:  # a builtin that does not tell
        return False
    for arguments in ((), ((), ())):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return arguments != ()
    raise PartitionError(
        f"{subject}: expected an initial_value that takes no arguments, or the (shape, offset) of "
        "a shard",
        hint="lambda shape, offset: np.zeros(shape, np.float32)",
    )


def initial_array(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    dtype: str,
    subject: str,
) -> np.ndarray:
    """Return what a callable makes of one shard, or of the whole variable.

    Raises:
        PartitionError: Shape or dtype do not fit.
    """
    array = _first_value(_call(initializer, shape, offset, subject), dtype, subject)
    if array.shape != shape:
        raise PartitionError(
            f"{subject}: expected shape {shape}, its initial_value returned {array.shape}"
        )
    return array


def _call(
    initializer: Callable[..., Any],
    shape: tuple[int, ...] | None,
    offset: tuple[int, ...],
    subject: str,
) -> Any:
    by_shard = takes_shard(initializer, subject)
    if by_shard and shape is None:
        raise PartitionError(
            f"{subject}: its initial_value takes (shape, offset), but shape is not given",
            hint="Variable(initializer, shape=…, dtype=…)",
        )
    try:
        return initializer(shape, offset) if by_shard else initializer()
    except Exception as exc:
        exc.add_note(f"while making the initial value of {subject}")
        raise


def check_name(name: object, where: str) -> None:
    """Refuse here what else every ps would refuse, as a message that makes no sense."""
    problem = ""
    if not isinstance(name, str):
        problem = f"got {type(name).__name__}"
    elif len(name) > MAX_NAME_CHARS:
        problem = f"got {len(name)} characters"
    elif any("\ud800" <= char <= "\udfff" for char in name):
        problem = "got half a surrogate pair"
    if problem:
        raise UsageError(
            f"variable {str(name)[:50]!r} declared at {where}: expected a name of at most "
            f"{MAX_NAME_CHARS} characters of text, {problem}"
        )


def _dtype_name(dtype: object, subject: str) -> str:
    with naming(subject):
        return dtype_name(dtype)


def _subject(name: str, where: str) -> str:
    return f'variable "{name}" declared at {where}'


# --- creation, and adoption of what an earlier program has left ----------------------------------


@dataclass(frozen=True, slots=True)
class OwnOptimizers:
    """The optimizers of the present program."""

    listed: Callable[[], Sequence[NewOptimizer]]  # returns them
    note_rate: Callable[[int, Mapping[str, Any]], None]
    """Told by its number of each one that goes on, and with which learning rate."""


NO_OPTIMIZERS = OwnOptimizers(tuple, lambda number, rate: None)


MESSAGE_BYTES = 16 << 20

MESSAGE_SHARDS = 1024
"""Shards for one ps are gathered into a message until it has as much, or as many."""


class Creation:
    """Creates what is declared, or adopts it where an earlier program has left it.

    Declared variables are created together, before anything needs the first of them. The
    initial values are made on the chief, one shard at a time, and sent in messages of bounded
    size, so that the chief holds no more than a message and a shard for each ps. A variable that
    begins as a copy of another one has no value here: each ps copies its shards itself. Of a
    constant one element is sent, and its blocks come into being on the ps when they are first
    written. Creating is idempotent, so a lost connection repeats it.

    With ``attach=True`` all ps tasks have been attached, and have set aside what they held, before
    anything is created. They describe it; ``store.reattach`` decides; then each gets its orders.

    the chief dies                          the next one, with ``attach=True``
    before it was granted a number          as if it had not been
    some ps tasks attached                  finds the variables set aside there, in stores elsewhere
    before anything was updated             begins with empty ps tasks
    while it restores a checkpoint          begins with empty ps tasks
    some variables not wholly created       adopts whole variables, creates the others
    some variables adopted                  finds both kinds; slots wait for their optimizers
    ``attach=False``, some ps tasks empty   AttachError, which names those
    within an update over two ps tasks      the parts that have arrived whole are applied, also if
                                            they waited; one that arrives later is refused, and
                                            ``partial_updates`` counts the update
    within a synchronous step               waits until ps 0 has closed it; AttachError if a ps
                                            could not be reached
    while a cut is taken or written         nothing of it; gates open with its connections
    during a rollback                       AttachError
    in training, and a ps dies too          AttachError, unless its backup had been promoted

    Args:
        declared: New declarations appear at the end of this list; they are taken from it.
        ps: Links to all ps tasks.
        own: Optimizers of this program, which may go on.

    Attributes:
        left: What an earlier program has left, until it is adopted or dropped; None: nothing.
        partial_updates: Updates of that program that only some of their ps tasks have applied.
        repeatable: What was created and can be created again, as long as ps tasks have held
            nothing else and nothing has been computed; None: it cannot.
        on_adopted: Called when nothing is left to be adopted.
    """

    def __init__(
        self, declared: list[Declaration], ps: PsClient, own: OwnOptimizers = NO_OPTIMIZERS
    ) -> None:
        self.left: Adoption | None = None
        self.partial_updates = 0
        self.on_adopted: Callable[[], None] = lambda: None
        self.own = own
        self._taken: set[int] = set()  # numbers of optimizers that go on
        self._declared = declared
        self._ps = ps
        self._lock = asyncio.Lock()
        self._error: Exception | None = None  # a variable could not be created: for ever
        self.created: set[tuple[tuple[int, int], str]] = set()  # (key, name) of each shard
        self.repeatable: list[Declaration] | None = None
        self._batch: list[Declaration] = []  # is being created

    @property
    def pending(self) -> bool:
        """Whether something has to be created, or never will be."""
        return bool(self._declared) or self._error is not None or self.left is not None

    async def reattach(self, lineage: int) -> None:
        """Ask all ps tasks what they hold. If there is nothing of use, this is the first start.

        Args:
            lineage: Under which they begin then.

        Raises:
            AttachError: Some of them have lost what they held.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        holdings = await self._order(Orders(), lineage=0, last=False)
        progress = max(holding.progress for holding in holdings)
        # Of one that was started again nobody knows what it held.
        is_known = all(holding.lineage for holding in holdings)
        adoption = None if progress != Progress.UPDATED and is_known else Adoption(holdings)
        if adoption is None or progress != Progress.UPDATED:
            found = "hold a part of a checkpoint" if progress else "hold no updates"
            level = logging.WARNING if progress else logging.INFO
            logger.log(
                level, "the ps tasks %s: all variables start with their initial values", found
            )
            await self._order(Orders(), lineage=lineage, last=True)
            return
        self.left, self.partial_updates = adoption, partial_updates(holdings)
        if self.partial_updates:
            logger.warning(
                "%d updates of the earlier program are only partly applied: the parts for the "
                "other ps tasks were still in flight when it ended, or when a newer program "
                "attached", self.partial_updates,
            )  # fmt: skip

    async def _order(self, orders: Orders, *, lineage: int, last: bool) -> list[Holding]:
        """Let each ps do what was decided; return what nobody has adopted by then."""
        message, body, links = AdoptShards(lineage, last), [to_json(orders)], self._ps.links
        answers = await all_of([ask(link, message, Done, body) for link in links])
        return [
            read_json(b"".join(held), Holding, f"{link.task}: what it holds")
            for link, (_, held) in zip(links, answers, strict=True)
        ]

    async def ensure(self, *, last: bool = False) -> None:
        """Create everything that is declared, or adopt it.

        Args:
            last: Whether what nobody has declared by now is dropped, if there was another program.

        Raises:
            AttachError: What is declared is not what another program has left; again at every call.
            PartitionError: An initial value does not fit its variable; again at every call,
                since closures cannot tell which variables they will need.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; creating goes on with the next call.
        """
        while self._declared or self._error is not None or (last and self.left is not None):
            async with self._lock:
                if self._error is not None:
                    raise self._error.with_traceback(None)  # it is raised many times
                batch = list(self._declared)
                try:
                    self._batch = missing = await self._adopt(batch, last=last)
                    timeline = -1
                    while self._ps.timeline != timeline:  # a snapshot gone back to has it not
                        timeline = self._ps.timeline
                        await self._create(missing)
                except Exception as exc:
                    self._error = exc
                    raise
                finally:
                    self._batch = []
                if self.repeatable is not None:
                    self.repeatable += batch
                del self._declared[: len(batch)]
                self.created.update(
                    (shard.key, one.spec.name) for one in batch for shard in one.spec.shards
                )

    async def create_again(self, lost: Collection[int]) -> None:
        """Create on these ps tasks all that was, and what is being, created: they have lost it.

        Raises:
            ParameterServerLost: One was lost again.

        Cancellation: Safe.
        """
        assert self.repeatable is not None, "nothing is computed during a recovery"
        await self._create([*self.repeatable, *self._batch], lost)

    async def _adopt(self, batch: list[Declaration], *, last: bool) -> list[Declaration]:
        """Adopt what was left of these; return what was not there.

        Raises:
            AttachError: Something does not fit; nothing was changed.
            ParameterServerLost: A ps is gone.

        Cancellation: Some ps tasks may have done it; the next call repeats it.
        """
        left = self.left
        if left is None:
            return batch
        new = [each for each in self.own.listed() if each.number not in self._taken]
        decision = left.compare([each.spec for each in batch], new, last=last)
        orders = decision.orders
        await self._order(orders, lineage=0, last=last)
        for identity, number in orders.optimizers:
            self._taken.add(number)
            self.own.note_rate(number, left.rate_of(identity))
        left.done(orders)
        if orders.adopted:
            logger.info("%d variables keep their values", len(orders.adopted))
        for spec in decision.missing:
            why = "it was not created whole" if spec.name in orders.dropped else "no ps held it"
            logger.warning('variable "%s" starts with its initial value: %s', spec.name, why)
        for name in decision.extra:
            logger.warning('variable "%s" is removed: this program has not declared it', name)
        if last:
            self.left = None
            self.on_adopted()
        missing = {spec.name for spec in decision.missing}
        return [each for each in batch if each.spec.name in missing]

    async def _create(self, batch: list[Declaration], lost: Collection[int] | None = None) -> None:
        """Make and send the shards; at most one message for each ps is held at a time.

        Args:
            batch: Declarations.
            lost: Only on these ps tasks, and while others are held back; None: on all.
        """
        urgent = lost is not None
        messages: dict[int, _Batch] = {}
        for declaration in batch:
            for shard, value in initial_shards(declaration):
                if lost is not None and shard.ps not in lost:
                    continue
                message = messages.setdefault(shard.ps, _Batch())
                message.add(shard, value)
                if message.nbytes >= MESSAGE_BYTES or len(message.shards) >= MESSAGE_SHARDS:
                    await self._send(shard.ps, messages.pop(shard.ps), urgent)
        if messages:
            await all_of([self._send(ps, each, urgent) for ps, each in messages.items()])

    async def _send(self, ps: int, batch: _Batch, urgent: bool) -> None:
        message = CreateShards([as_sent(shard) for shard in batch.shards], batch.sources)
        await self._ps.links[ps].call(message, batch.values, bulk=True, urgent=urgent)


def as_sent(shard: ShardSpec) -> tuple[str, int, int, int, list[int], str]:
    """Return a shard as CreateShards describes it."""
    return (
        shard.variable, shard.variable_id, shard.index, shard.offset, list(shard.shape),
        shard.dtype,
    )  # fmt: skip


@dataclass(slots=True)
class _Batch:
    """Shards for one ps, in the order of their declaration: a copy stands after its original."""

    shards: list[ShardSpec] = field(default_factory=list)
    sources: list[tuple[int, int] | bytes | None] = field(default_factory=list)
    values: list[memoryview] = field(default_factory=list)  # of those whose source is None
    nbytes: int = 0

    def add(self, shard: ShardSpec, value: np.ndarray | ShardSpec) -> None:
        """Let the message create one more shard."""
        self.shards.append(shard)
        if isinstance(value, ShardSpec):
            self.sources.append(value.key)
        elif is_constant(value):
            self.sources.append(bytes(to_bytes_view(value[(0,) * value.ndim])))
        else:
            self.sources.append(None)
            self.values.append(to_bytes_view(value))
            self.nbytes += value.nbytes
