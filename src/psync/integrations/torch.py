"""torch modules on ps tasks: each worker has its own ``nn.Module``, whose values are served.

    from psync.integrations.torch import PSModule

    with strategy.scope():
        served = PSModule(lambda: Net(hidden=64), psync.optimizers.Adam(1e-3), name="net")

    def step(batches):  # a plain function runs in a thread, where it may compute
        images, labels = next(batches)
        net = psync.wait(served.pull())
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        psync.wait(served.push())
        return loss.item()

``served`` has what all integrations share: variables by name, pushes, and the merging of state over
workers; ``merging`` says how that is done and why.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import numpy as np

from psync.api.optimizers import Optimizer, PushResult
from psync.errors import ConfigurationError, UsageError, ValueMismatchError
from psync.integrations.served import (
    LoadedKeys,
    ServedVariables,
    check_same,
    checked_scope,
    current_run,
    in_thread,
)

try:
    import torch

    from psync.integrations.torch_tensors import ModuleTensors
except ImportError as exc:
    raise ConfigurationError(
        f"psync.integrations.torch needs the package torch, which cannot be imported here: {exc}",
        hint="pip install 'psync[torch]', on the chief and on every worker",
    ) from exc


M = TypeVar("M", bound=torch.nn.Module)


class _Live:
    """The module of one task, and what was pulled into it.

    Attributes:
        tensors: Those of the module.
        version: Of the frozen values in it; None: they were not pulled yet.
        state: What was pulled of the arrays that are merged, by name; copies.
        puller: Who has pulled last, see ``current_run``; None: nobody yet.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self.tensors = tensors
        self.version: int | None = None
        self.state: dict[str, np.ndarray] = {}
        self.puller: object = None


class PSModule(ServedVariables, Generic[M]):
    """A ``torch.nn.Module`` whose parameters and buffers are variables on the ps tasks.

    Make it in ``strategy.scope()``, and capture it in steps. Variables have the names of the
    module's ``state_dict()``, after ``name``: "net/conv.weight". Their initial values are those of
    the module built here. Each worker builds its own module when it first pulls, and keeps it while
    it serves this coordinator. Only values of the module travel.

    - Shared ("tied") parameters are one variable, under the first of their names.
    - Parameters that need no gradient are frozen. A worker pulls them the first time, and when
      ``load_state_dict`` or a restored checkpoint has changed them. The module built here decides
      which are frozen: freeze them in ``build_module``. Workers that have pulled a frozen variable
      do not notice a direct ``assign`` to it.
    - Non-persistent buffers, modes (``train()``, ``eval()``), hooks, and everything that is not a
      tensor belong to each worker.
    - For a module returned by ``torch.compile``, the original module is served. Values are written
      into the same tensors, so nothing is compiled again.

    Args:
        build_module: Function that returns the module. Called once here and once on each worker,
            there in a thread; always with the same names, shapes and dtypes. It travels with the
            step.
        optimizer: One of ``psync.optimizers``, or a ``SyncReplicasOptimizer``, which then counts in
            the strategy's global step. Slots live on the ps tasks.
        name: Prefix of the variables' names, an identifier; None: no prefix.
        buffers: How buffers, such as BatchNorm's running statistics, are merged over workers.
            "mean": the mean of the workers' pushes, and the maximum of integers
            (``num_batches_tracked``). "first": worker 0's. "local": each worker keeps its own, and
            ``state_dict`` and checkpoints have the initial ones.
        cast_gradients: Whether gradients of another floating dtype are cast to the variable's, such
            as f16, bf16 and f64 to f32. A finite number that would become infinite is an error that
            names the variable. False: another dtype is an error.

    Raises:
        ConfigurationError: torch is not installed, an argument is invalid, ``build_module`` does
            not return a module, or a tensor cannot be served; names the tensor.
        UsageError: Outside a strategy's scope, or inside a step.

    Example:
        with strategy.scope():
            served = PSModule(lambda: Net(), psync.optimizers.Adam(1e-3), name="net")

        def step(batches):
            net = psync.wait(served.pull())
            loss_of(net, next(batches)).backward()
            return psync.wait(served.push()).staleness
    """

    def __init__(
        self,
        build_module: Callable[[], M],
        optimizer: Optimizer,
        *,
        name: str | None = None,
        buffers: str = "mean",
        cast_gradients: bool = True,
    ) -> None:
        checked_scope("PSModule", optimizer)
        if not callable(build_module):
            raise ConfigurationError(
                f"PSModule: expected a function that builds the module, got "
                f"{type(build_module).__name__}",
                hint="PSModule(lambda: Net(…), optimizer): every worker builds its own",
            )
        self._build_module = build_module
        tensors = self._build()
        self._names = tensors.names  # all that state_dict() has → the variable's
        self._kinds = dict(tensors.kinds())
        self._frozen = frozenset(tensors.parameters) - frozenset(tensors.trained)
        values = {each: tensors.array(each) for each in self._kinds}
        super().__init__(
            "PSModule", values, tensors.trained, tensors.buffers, optimizer,
            name=name, merge=buffers, cast_gradients=cast_gradients,
        )  # fmt: skip
        self._built: ModuleTensors | None = tensors  # the program's own; does not travel

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": None}

    async def pull(self, *, device: torch.device | str | None = None) -> M:
        """Return this task's module with the present values written into its tensors.

        In a step this is the worker's module, in the program the chief's: to evaluate, to export.
        It is the same object every time, so a mode that a step sets stays for the next step on this
        worker. Gradients left in it by a failed step are dropped.

        Only variables that may have changed travel, in one round trip to each ps. They are read
        directly into tensors that are contiguous, on the CPU, and of their variable's dtype; into
        others they are copied.

        Args:
            device: Device that the module is moved to first, by ``module.to(device)``; None: it
                stays where it is. ``build_module`` may put it on a device as well.

        Raises:
            ConfigurationError: The module that ``build_module`` returns here differs from the
                declared one in names, shapes or dtypes, or a step has changed them; names them.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.
            Exception: An exception of ``build_module``.

        Cancellation: Safe; the contents of the tensors are then undefined until the next pull.
        """
        live = await self._live()
        tensors, puller = live.tensors, current_run()
        if device is not None:
            tensors.module.to(device)
        if live.puller is not puller:
            live.puller = puller
            tensors.drop_gradients()
        tensors.check_unchanged(f"PSModule {self.name!r}")
        written = tensors.begin_writing()
        _, version = await self._pull_values(live.version, written.target)
        if written.is_costly:
            await in_thread(written.finish)
        else:
            written.finish()
        live.version = version
        live.state = {key: np.array(tensors.array(key)) for key in self._state.names}
        return cast(M, tensors.module)

    async def push(self, *, keep_grad: bool = False) -> PushResult:
        """Push the gradients of this task's module, and merge its buffers.

        The ``.grad`` of each parameter is sent as it is: dense, or sparse with one sparse dimension
        as rows (from ``nn.Embedding(…, sparse=True)``), with any strides and any floating dtype. A
        ``.grad`` of None is skipped. Afterwards it is set to None.

        Args:
            keep_grad: Whether to leave gradients in the module. They are then copied, since sent
                arrays must not change.

        Returns:
            The result of the optimizer's ``apply_gradients``. With a synchronous optimizer it may
            be STALE: the gradients were too old, and were dropped.

        Raises:
            ValueMismatchError: There is no gradient, a gradient of a frozen parameter, or one that
                the variable's dtype cannot hold. Nothing was pushed; the gradients are lost.
            UsageError: This step has not pulled.
            ConfigurationError: The module has other tensors or shapes than it was built with; names
                them. Nothing was pushed.
            PsyncError: See ``apply_gradients``.

        Cancellation: A push that has begun ends in the background, as with ``apply_gradients``.
        """
        live = await self._live()
        if live.puller is not current_run():
            raise UsageError(
                f"PSModule {self.name!r}: push in a step that has not pulled",
                hint="module = await served.pull(), then loss.backward(), then await served.push()",
            )
        tensors = live.tensors
        tensors.check_unchanged(f"PSModule {self.name!r}")
        if tensors.on_cpu():
            gradients = tensors.gradients(copy=keep_grad)
        else:
            gradients = await asyncio.to_thread(tensors.gradients, copy=keep_grad)
        if not keep_grad:
            tensors.drop_gradients()
        for key in self._frozen:
            if gradients.pop(key) is not None:
                raise ValueMismatchError(
                    f'PSModule {self.name!r}: parameter "{key}" has a gradient, but was frozen '
                    "when the model was declared",
                    hint="build the module with requires_grad=True for every parameter that is "
                    "ever trained; requires_grad_(False) in a step freezes it temporarily",
                )
        state = {key: tensors.array(key) for key in self._state.names}
        return await self._push_values(gradients, live.state, state)

    async def state_dict(self) -> OrderedDict[str, torch.Tensor]:
        """Return the present values in the form of the module's ``state_dict``, on the CPU.

        Tied parameters are one tensor under each of their names. Each shard is one version of
        itself; for all shards at one instant, save a checkpoint.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        values = await self._read_values()
        made = {key: ModuleTensors.tensor_of(value) for key, value in values.items()}
        return OrderedDict((key, made[own]) for key, own in self._names.items())

    async def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> LoadedKeys:
        """Set values for all tasks, for example those of a trained model.

        Slots of the optimizer stay as they are.

        Args:
            state_dict: Tensors or arrays, by the names of ``state_dict()``. Cast as by torch's
                ``load_state_dict``, if no number becomes infinite.
            strict: Whether missing or unknown names are an error.

        Returns:
            The missing and the unknown names.

        Raises:
            UsageError: Names differ, and ``strict``; inside a step; or outside of a running
                coordinator. Nothing was changed.
            ValueMismatchError: A shape differs, or a dtype cannot hold the numbers. Nothing was
                changed.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background.
        """
        given = {key.removeprefix("_orig_mod."): each for key, each in state_dict.items()}
        found = self._compare_keys(self._names, given, strict=strict)
        arrays = {
            own: ModuleTensors.array_of(given[key])
            for key, own in self._names.items()
            if key in given
        }
        await self._load_values(arrays)
        return found

    async def _live(self) -> _Live:
        """Return this task's module, which is built if it has none yet."""

        def begin() -> _Live:
            if self._built is not None:
                return _Live(self._built)
            tensors = self._build()
            check_same(f"PSModule {self.name!r}", self._kinds, tensors.kinds())
            return _Live(tensors)

        return await self._kept_here(begin)

    def _build(self) -> ModuleTensors:
        module = self._build_module()
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(
                "PSModule: expected build_module to return a torch.nn.Module, got "
                f"{type(module).__name__}"
            )
        return ModuleTensors(module)


ServedModule = PSModule  # its name until 0.2
