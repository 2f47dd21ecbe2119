"""Application of gradients to the shards of one ps: at once, as a mean, measured, accumulated.

Everything is validated before anything changes. Work is done block by block: see ``shard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from psync.errors import UsageError
from psync.numerics.common_blocks import Adjacent
from psync.numerics.memory import BlockPool, Scratch
from psync.numerics.rules import Lamb, Part, Sums, UpdateRule
from psync.numerics.sums import MeanGradient, Pieces, Reduction, sum_of_squares
from psync.store.bundles import Bundle, BundleTable
from psync.store.push_counts import HOME
from psync.store.shard import BlockWork, Shard, Work, Workspace
from psync.store.shard_updates import GradientAccumulator, ShardUpdate
from psync.store.shards import Key


class GradientTable(BundleTable):
    """A table of shards to which gradients are applied. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._space = Workspace(self._scratch)
        self._applies = 0
        self._copies = 0

    def begin_push(
        self,
        optimizer_id: int,
        carried: int = 0,
        place: int = HOME,
        others: tuple[int, ...] = (),
    ) -> int:
        """Return the step with which all shards of a push are applied; see ``PushCount.push``.

        Args:
            optimizer_id: Number of the optimizer.
            carried: Pushes without a part here that its client knows of, marked.
            place: Which of its messages this is.
            others: The other ps tasks that have a part of it.

        Raises:
            UsageError: If the optimizer is not defined.
            RuleError: As ``check_rate``; the push is not counted.
        """
        optimizer = self._optimizer(optimizer_id)
        if optimizer.own_schedules:
            self.check_rate(optimizer_id, optimizer.count.next_step(carried, place))
        return optimizer.count.push(carried, place, others)

    def begin_step(self, optimizer_id: int, step: int) -> int:
        """Return the step with which a synchronous step is applied, which its group counts.

        Raises:
            UsageError: If the optimizer is not defined.
        """
        return self._optimizer(optimizer_id).count.reach(step)

    def check_apply(self, optimizer_id: int, key: Key, grad: object) -> np.ndarray:
        """Raise what ``apply`` would raise, except BusyError, and return ``grad`` as it is used.

        For callers that take several updates whole or not at all.
        """
        return self._typed(self.check_optimizable(optimizer_id, key), grad)

    def check_optimizable(self, optimizer_id: int, key: Key) -> Shard:
        """Raise what ``apply`` would raise whatever the gradient, except BusyError."""
        self._optimizer(optimizer_id)
        shard = self._shard(key)
        self._check_optimizable(shard)
        return shard

    def apply(self, optimizer_id: int, key: Key, grad: object, step: int) -> Work:
        """Start to apply a gradient to the shard and its slots.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            grad: A buffer of as many bytes as the shard has, or an array of its shape and
                dtype. Must not change until the work is done.
            step: What ``begin_push`` returned for the push that the gradient is part of.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UsageError: If the optimizer is not defined.
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If the gradient does not fit the shard.
            BusyError: If another update of the shard is under way.
        """
        return self.apply_checked(
            optimizer_id, key, self.check_apply(optimizer_id, key, grad), step
        )

    def apply_checked(
        self,
        optimizer_id: int,
        key: Key,
        gradient: np.ndarray | MeanGradient,
        step: int,
        ratio: float | None = None,
    ) -> Work:
        """As ``apply``, of what ``check_apply`` returned; ``ratio`` as for ``UpdateRule.apply``."""
        shard = self._idle(key)
        update, accumulator = self._update_of(shard, optimizer_id, gradient, step, ratio)

        def finished() -> None:
            if update.raised is not None:
                self._note_failure(optimizer_id, step, shard, update.raised)
                return
            shard.version += 1
            self._applies += 1
            self._copies += update.copies
            if accumulator is not None:
                self._copies += accumulator.copies
                shard.pushes[optimizer_id] = shard.pushes.get(optimizer_id, 0) + 1

        # No code of users in other threads: neither rules, see ``prepared``, nor schedules.
        handed_out = None if self._optimizers[optimizer_id].own_schedules else update.prepared
        return BlockWork(
            shard, update.piece, finished, update.pieces, changes=False, prepared=handed_out
        )

    def _update_of(
        self,
        shard: Shard,
        optimizer_id: int,
        gradient: np.ndarray | MeanGradient,
        step: int,
        ratio: float | None,
    ) -> tuple[ShardUpdate, GradientAccumulator | None]:
        rule = self._optimizers[optimizer_id].rule.for_variable(shard.spec.variable)
        slots = self._slots(shard, optimizer_id)
        steps = rule.options.gradient_accumulation_steps
        accumulator = None
        if steps is not None:
            *slots, sums = slots
            due = (shard.pushes.get(optimizer_id, 0) + 1) % steps == 0
            accumulator = GradientAccumulator(sums, steps, due, self._pool)
        update = ShardUpdate(
            rule, shard.values, slots, gradient, step, self._pool, self._space, accumulator,
            ratio,
        )  # fmt: skip
        return update, accumulator

    def rule(self, optimizer_id: int) -> UpdateRule:
        """Return the rule of an optimizer; not to be changed.

        Raises:
            UsageError: If it is not defined.
        """
        return self._optimizer(optimizer_id).rule

    def is_layerwise(self, optimizer_id: int) -> bool:
        """Return whether an optimizer takes norms of whole variables.

        Raises:
            UsageError: If it is not defined.
        """
        return isinstance(self._optimizer(optimizer_id).rule, Lamb)

    def has_bundles(self, optimizer_id: int) -> bool:
        """Return whether an optimizer does the same to each element, whatever shard it is in."""
        return self._optimizer(optimizer_id).has_bundles

    def measure(
        self,
        optimizer_id: int,
        key: Key,
        gradient: np.ndarray | MeanGradient,
        step: int,
        into: list[Sums],
    ) -> Work:
        """Start to measure what a layerwise optimizer would do to the shard; changes nothing.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            gradient: What ``check_apply`` returned. Must not change until the work is done.
            step: With which it would be applied.
            into: Gets the sums of squares at the end.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UsageError: If the optimizer is no layerwise one.
            BusyError: If an update of the shard is under way.
        """
        shard, rule = self._idle(key), self._optimizer(optimizer_id).rule
        if not isinstance(rule, Lamb):
            raise UsageError(
                f"optimizer {optimizer_id} ({rule.name}) on {self.task} has nothing to measure"
            )
        update, _ = self._update_of(shard, optimizer_id, gradient, step, None)
        measurement = rule.for_variable(shard.spec.variable).measurement(step, self._scratch)
        return BlockWork(
            shard,
            lambda i: update.measure(i, measurement),
            lambda: into.append(measurement.sums()),
            shard.values.num_blocks,
            changes=False,
        )

    def mean_of(
        self,
        gradients: Sequence[np.ndarray],
        weights: Sequence[float],
        reduction: Reduction = "mean",
        scale: float = 1.0,
    ) -> MeanGradient:
        """Return the weighted mean, or sum, of several pushes' gradients of a shard.

        Args:
            gradients: Of each push, in the order in which they are summed: what ``check_apply``
                returned. They must not change until the work that uses the mean is done.
            weights: Of each push, above 0. ``MeanGradient`` says what is computed.
            reduction: "mean" or "sum".
            scale: What limits the norm of the mean of the whole variable.

        Raises:
            UsageError: If there are no gradients, or not as many weights.
        """
        return MeanGradient(gradients, weights, reduction, self._space.sums, scale)

    def square_mean(self, key: Key, mean: MeanGradient, into: list[Sums]) -> Pieces[None]:
        """Start to add up the squares of a mean for a shard; changes nothing.

        Nothing of the shard is read, so it may be busy. ``into`` gets the sum at the end, and 0.
        """
        values, total = self._shard(key).values, 0.0
        for i in range(values.num_blocks):
            start, stop = values.bounds(i)
            total = sum_of_squares(mean[start:stop], total)
            yield
        into.append((total, 0.0))

    def apply_mean_at_once(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients_by_push: Sequence[Sequence[np.ndarray]],
        weights: Sequence[float],
        step: int,
        reduction: Reduction = "mean",
    ) -> None:
        """Do ``apply_checked`` of means on idle shards that are small, to the end.

        Args:
            optimizer_id: Of the optimizer.
            keys: Of the shards.
            gradients_by_push: Of each push the gradients, one per key.
            weights: Of each push.
            step: As for ``apply``.
            reduction: "mean" or "sum".

        Raises:
            UsageError: If there are no pushes, or not as many weights, or gradients as keys.
            BusyError: If an update of one of them is under way; those before it are applied.
        """
        if not {len(keys)}.issuperset(map(len, gradients_by_push)):
            raise UsageError(f"expected {len(keys)} gradients of each push")
        means = _Means(gradients_by_push, weights, reduction, self._space.sums)
        self.apply_at_once(optimizer_id, keys, means, step)

    def apply_at_once(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients: Sequence[np.ndarray] | _Means,
        step: int,
    ) -> None:
        """Do ``apply_checked`` on idle shards that are small, to the end.

        A third of the time that the same takes shard by shard; and where the gradients lie side by
        side (``Adjacent``) those of a bundle take as long as that of one shard.

        Raises:
            BusyError: If an update of one of them is under way; those before it are applied.
        """
        if not self.has_bundles(optimizer_id):
            each: Iterable[np.ndarray | MeanGradient] = gradients
            for key, gradient in zip(keys, each, strict=True):
                for _ in self.apply_checked(optimizer_id, key, gradient, step):
                    pass
            return
        if type(gradients) is Adjacent or (type(gradients) is _Means and gradients.adjoin):
            parts = self._bundled_parts(optimizer_id, tuple(keys), gradients)
        else:
            parts = self._parts(optimizer_id, keys, gradients)
        self._optimizers[optimizer_id].rule.apply(parts, step, self._scratch)

    def _bundled_parts(
        self, optimizer_id: int, keys: tuple[Key, ...], gradients: Adjacent | _Means
    ) -> Iterator[Part]:
        """As ``_parts``, of several shards at once where they are bundled."""
        for first, end, bundle in self._bundled(keys):
            if bundle is None:
                each = [gradients[position] for position in range(first, end)]
                yield from self._parts(optimizer_id, keys[first:end], each)
            else:
                gradient = gradients.between(first, end)
                yield from self._parts_of_bundle(optimizer_id, bundle, gradient)

    def _parts_of_bundle(
        self, optimizer_id: int, bundle: Bundle, gradient: np.ndarray
    ) -> Iterator[Part]:
        pool, values = self._pool, bundle.values
        slots = bundle.slots(optimizer_id, self._slots, pool)
        for shard in bundle.shards:
            shard.busy = True  # for ever, if it fails
        target = values.writable(pool)
        targets = [slot.writable(pool) for slot in slots]
        yield (
            values.block.array, gradient, [slot.block.array for slot in slots],
            target.array, [slot_target.array for slot_target in targets],
        )  # fmt: skip
        for slot, slot_target in zip(slots, targets, strict=True):
            self._copies += slot.commit(slot_target, pool)
        self._copies += values.commit(target, pool)
        for shard in bundle.shards:
            shard.busy = False
            shard.version += 1
        self._applies += len(bundle.shards)

    def _parts(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients: Iterable[np.ndarray | MeanGradient],
    ) -> Iterator[Part]:
        """Yield block after block; each is committed when the next one is asked for."""
        pool = self._pool
        for key, gradient in zip(keys, gradients, strict=True):
            shard = self._idle(key)
            values, slots = shard.values, self._slots(shard, optimizer_id)
            shard.busy = True  # for ever, if it fails half-way
            for i in range(values.num_blocks):
                if values.num_blocks == 1 and isinstance(gradient, np.ndarray):
                    part = gradient
                else:
                    start, stop = values.bounds(i)
                    part = gradient[start:stop]
                target = values.writable(i, pool)
                if not slots:
                    yield values.block(i).array, part, (), target.array, ()
                else:
                    targets = [slot.writable(i, pool) for slot in slots]
                    yield (
                        values.block(i).array, part, [slot.block(i).array for slot in slots],
                        target.array, [slot_target.array for slot_target in targets],
                    )  # fmt: skip
                    for slot, slot_target in zip(slots, targets, strict=True):
                        self._copies += slot.commit(i, slot_target, pool)
                self._copies += values.commit(i, target, pool)
            shard.busy = False
            shard.version += 1
            self._applies += 1


@dataclass(frozen=True, slots=True)
class _Means:
    """The means of several pushes' gradients, one for each shard, or one for several at once."""

    pushes: Sequence[Sequence[np.ndarray]]
    weights: Sequence[float]
    reduction: Reduction
    scratch: Scratch

    @property
    def adjoin(self) -> bool:
        """Whether the gradients of each push lie side by side."""
        return {Adjacent}.issuperset(map(type, self.pushes))

    def __iter__(self) -> Iterator[MeanGradient]:
        return map(self._mean_of, zip(*self.pushes, strict=True))

    def __getitem__(self, position: int) -> MeanGradient:
        return self._mean_of([push[position] for push in self.pushes])

    def between(self, first: int, end: int) -> np.ndarray:
        """As ``Adjacent``: the mean of these shards as if they were one."""
        wholes = [cast(Adjacent, push).between(first, end) for push in self.pushes]
        return self._mean_of(wholes)[0 : wholes[0].size]

    def _mean_of(self, gradients: Sequence[np.ndarray]) -> MeanGradient:
        return MeanGradient(gradients, self.weights, self.reduction, self.scratch)
