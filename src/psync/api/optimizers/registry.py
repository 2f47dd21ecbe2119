"""The registry of optimizer handles in a process: one object for each, however often it arrives.

An optimizer is known by the process that made it and its number there. The registry holds weak
references.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psync.api.scopes import running_scopes
from psync.client.optimizer_client import check_plugins
from psync.client.ps_link import PsLink
from psync.net.platform import random_hex
from psync.net.process_state import PerProcess
from psync.numerics.rule_configs import rule_from_config
from psync.schedules import from_config as schedule_from_config
from psync.store.reattach import NewOptimizer

if TYPE_CHECKING:
    from psync.api.gradient_arguments import AnyVariable
    from psync.api.optimizers.handles import Optimizer


class OptimizerRegistry:
    """Optimizers by their origin and number.

    Attributes:
        known: This process's handles.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[tuple[str, int], Optimizer] = (
            weakref.WeakValueDictionary()
        )
        self.begin_process()

    def begin_process(self) -> None:
        """Number the optimizers that are made from now on as those of a process of their own."""
        self.process = random_hex(8)  # the origin of those that are made here
        self._numbers = itertools.count(1)

    def add_new(self, optimizer: Optimizer) -> None:
        """Number an optimizer that is made here."""
        optimizer.number, optimizer.origin = next(self._numbers), self.process
        self.known[optimizer.origin, optimizer.number] = optimizer

    def add_arrived(self, optimizer: Optimizer) -> None:
        """Note an optimizer that was made elsewhere."""
        self.known[optimizer.origin, optimizer.number] = optimizer

    def of_the_program(self) -> list[NewOptimizer]:
        """Return the optimizers of this program through which it may push, by their numbers."""
        own = [optimizer for optimizer in self.known.values() if optimizer.origin == self.process]
        return [
            NewOptimizer(
                optimizer.number,
                optimizer._name,
                optimizer._config,
                optimizer._rule.learning_rate.to_config(),
            )
            for optimizer in sorted(own, key=lambda optimizer: optimizer.number)
            if optimizer._holder is optimizer  # else it is wrapped
        ]

    def check_unused(self, links: Sequence[PsLink]) -> None:
        """Check that all ps tasks know the rules of the optimizers that were not used yet.

        Those that were may belong to another cluster. Raises ConfigurationError: one does not.
        """
        for optimizer in list(self.known.values()):
            if optimizer.origin == self.process and not optimizer._in_use:
                check_plugins(links, optimizer._name, optimizer._rule)

    def begin_cluster(self) -> None:
        """Note that ps tasks begin with the learning rates with which optimizers were made.

        Those that were set in a cluster before are gone, as its variables and steps are.
        """
        if running_scopes():
            return  # a cluster runs beside it, and may use them
        for optimizer in self.known.values():
            made_with = optimizer._config.get("learning_rate")
            if optimizer._rule.learning_rate.to_config() != made_with and made_with is not None:
                optimizer._rule.learning_rate = schedule_from_config(made_with)

    def note_learning_rate(self, number: int, config: Mapping[str, Any]) -> None:
        """The ps tasks go on with a learning rate that another program has set."""
        optimizer = self.known.get((self.process, number))
        if optimizer is not None:
            optimizer._rule.learning_rate = schedule_from_config(config)

    def any_synchronous(self) -> bool:
        """Return whether this process has an optimizer whose pushes are counted in steps."""
        return any(optimizer._synchronous for optimizer in self.known.values())


optimizers_here = PerProcess(OptimizerRegistry)


def restored(
    cls: type[Optimizer],
    origin: str,
    number: int,
    state: dict[str, Any],
    variables: tuple[AnyVariable, ...],
) -> Optimizer:
    """Return this process's handle of an optimizer: one object, however often it arrives."""
    optimizer = optimizers_here().known.get((origin, number))
    if optimizer is None:
        optimizer = cls.__new__(cls)
        vars(optimizer).update(state, origin=origin, number=number)
        optimizer._set_rule(rule_from_config(optimizer._config))
        optimizer._begin(in_use=True)
        optimizers_here().add_arrived(optimizer)
    if len(variables) > len(optimizer._arrived):  # more may have been declared since
        optimizer._arrived = variables
    return optimizer
