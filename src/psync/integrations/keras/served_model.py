"""A served Keras model: ``fit``, ``evaluate`` and ``predict`` with its variables on the ps tasks.

    from psync.integrations.keras import PSModel

    def build_model():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with strategy.scope():
        model = PSModel(build_model, name="net")
    history = await model.fit(batches, 5, 200, validation_data=(x, y))

What Keras 3 has dropped: parameter-server training. On the backends jax and torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import numpy as np

from psync.api.optimizers import Optimizer
from psync.api.scopes import scope_for
from psync.callbacks import Callback
from psync.client.context import current_closure, wait
from psync.errors import ConfigurationError, UsageError
from psync.integrations.served import ServedVariables, check_same
from psync.specs import checked_kind

try:
    import keras

    from psync.integrations.keras.fit import KerasCallbacks, KerasTrainer, check_arguments
    from psync.integrations.keras.models import BuiltModel, KerasSettings, weights_of
    from psync.integrations.keras.rules import optimizer_of, undecayed
    from psync.integrations.keras.steps import Steps, steps_of
except ImportError as exc:
    raise ConfigurationError(
        f"psync.integrations.keras needs the package keras, which cannot be imported here: {exc}",
        hint="pip install 'psync[keras]' and jax or torch, on the chief and on every worker, and "
        "set the environment variable KERAS_BACKEND to one of these: the default is tensorflow",
    ) from exc


class _Live:
    """The model of one task that computes, and what was pulled into it.

    Attributes:
        steps: Compute with it.
        version: Of the frozen values in it; None: they were not pulled yet.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.version: int | None = None


class PSModel(ServedVariables):
    """A compiled Keras model whose variables are on the ps tasks, and which the workers train.

    Make it in ``strategy.scope()``; use it while a ``ClusterCoordinator`` runs. The model is built
    here and once on each worker. Variables have their Keras paths without the model's own name,
    after ``name``: "net/dense/kernel". Their initial values are those of the model built here.

    - The model's optimizer becomes the update rule on the ps tasks, including its schedule,
      clipping, weight decay and accumulation, but without its present state.
    - Metrics of all workers are added up exactly; each batch counts once.
    - State that the model changes itself, moving statistics and seeds of dropout, is merged over
      workers. Each worker draws its own masks.
    - Layers with ``trainable=False`` are frozen: their values are pulled once.
    - Callbacks of Keras run in the program, on a model with the present values.

    Args:
        build_model: Function that returns a compiled and built ``keras.Model``, with the same
            architecture wherever it runs. It travels to the workers.
        name: Prefix of the variables' names, an identifier; None: no prefix.
        synchronous: Function that makes the optimizer synchronous: it gets the psync optimizer that
            stands for the model's and returns the one to use, such as ``lambda rule:
            psync.SyncReplicasOptimizer(rule, 2, deterministic=True)``. None: asynchronous.
        state: How state that the model changes itself is merged: "mean", "first" or "local"; see
            ``psync.integrations.merging``.
        cast_gradients: Whether gradients of another floating dtype than their variable's are cast.
        checkpoint_directory: Directory where everything is saved after each epoch, and from where
            ``fit`` resumes; see ``Trainer``.

    Attributes:
        optimizer: The psync optimizer.

    Raises:
        ConfigurationError: Keras is not installed or has another backend; an argument is invalid;
            the model is not compiled, not built, or has a custom train step; or its optimizer, its
            learning rate or a constraint has no rule here.
        UsageError: Outside a strategy's scope, or inside a step.

    Example:
        with strategy.scope():
            model = PSModel(build_model)
        await model.fit(batches, epochs=5, steps_per_epoch=200)
        print(await model.evaluate((x, y)))
        (await model.pull()).save("model.keras")

    Source: ``keras.Model`` of Keras 3 for fit, evaluate and predict; ``Model.fit`` of TensorFlow
        2.x under ``ParameterServerStrategy`` for ``steps_per_epoch``.
    """

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        *,
        name: str | None = None,
        synchronous: Callable[[Optimizer], Optimizer] | None = None,
        state: str = "mean",
        cast_gradients: bool = True,
        checkpoint_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        strategy: Any = scope_for("making a PSModel", "make it")
        if not callable(build_model) or isinstance(build_model, keras.Model):
            raise ConfigurationError(
                f"PSModel: expected a function that builds the model, got "
                f"{type(build_model).__name__}",
                hint="PSModel(build_model): every worker builds its own",
            )
        self._build_model, self._settings = build_model, KerasSettings()
        built = BuiltModel(build_model, self._settings)
        optimizer = optimizer_of(built.model.optimizer)
        if synchronous is not None:
            optimizer = checked_kind(
                "PSModel: expected synchronous to return an optimizer of psync",
                synchronous(optimizer), Optimizer,
            )  # fmt: skip
        self._kinds = dict(built.kinds())
        self._weights = built.weights
        self._compiled_steps: int = built.model.steps_per_execution
        super().__init__(
            "PSModel", built.values(), built.trained, built.state, optimizer,
            name=name, merge=state, cast_gradients=cast_gradients,
        )  # fmt: skip
        trained = {key: built.variables[key] for key in built.trained}
        if excluded := undecayed(built.model.optimizer, trained):
            optimizer.exclude_from_weight_decay([self.variable(key) for key in excluded])
        self._built: BuiltModel | None = built  # the program's own, as is the trainer
        self._trainer: KerasTrainer | None = KerasTrainer(strategy, self, checkpoint_directory)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": None, "_trainer": None}

    # As of a Keras model.

    async def fit(
        self,
        dataset: Any,
        epochs: int,
        steps_per_epoch: int,
        validation_data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback | Callback] | None = None,
        *,
        steps_per_execution: int | None = None,
        validation_batch_size: int = 32,
        validation_freq: int = 1,
        initial_epoch: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        verbose: bool | str = "auto",
        **unknown: Never,
    ) -> keras.callbacks.History:
        """Train with the strategy's coordinator, or with a temporary one; see ``Trainer.fit``.

        Without async: ``psync.wait(model.fit(…))``, under ``psync.blocking``.

        Args:
            dataset: A function that each worker calls, with an ``InputContext`` if it takes one,
                and that returns batches: x, (x, y) or (x, y, sample_weight). Or any other argument
                of ``ClusterCoordinator.create_per_worker_dataset``.
            epochs: Number of the last epoch, plus 1.
            steps_per_epoch: Number of steps of all workers together; a step is a batch of one
                worker.
            validation_data: Data for ``evaluate``.
            callbacks: Callbacks of Keras, called in a thread of the program with Keras's logs; or
                of psync. Their changes to the model (weights, the learning rate of the optimizer,
                ``stop_training``) apply to all tasks. Batch hooks are called when a closure has
                ended, with the values of the epoch so far.
            steps_per_execution: Number of steps in one closure: more are cheaper, and are lost
                together. Default: that of the model's ``compile(steps_per_execution=…)``.
            validation_batch_size: Batch size of validation data that are arrays.
            validation_freq: Number of epochs between validations.
            initial_epoch: Number of the first epoch, from 0. Default: that of the last checkpoint,
                otherwise 0.
            class_weight: Mapping class → weight of its examples in the loss and in weighted
                metrics; 1 for missing classes. For batches (x, y) with one array y: class numbers,
                or one-hot. For weights of single examples, use batches (x, y, sample_weight).
            verbose: False, "lines", "bar"; "auto" or True: a bar on a terminal, otherwise lines.
            unknown: Other arguments of Keras; they are refused, with the alternative.

        Returns:
            Keras's ``history`` and ``epoch``, of the epochs that ran now. If the data of all
            workers began and ended in one epoch, training ended with it.

        Raises:
            ConfigurationError: An argument is out of range; the dataset has no batch; a callback
                cannot work here; a metric's values cannot be added up; a worker builds another
                model than the declared one; or the program's model was compiled again, or has other
                trainable layers.
            ValueMismatchError: A gradient does not match its variable.
            ClosedError: The strategy's coordinator was closed before, and its variables are lost.
            Exception: An exception of a step or a callback.

        Cancellation: See ``Trainer.fit``.
        """
        _, trainer = self._of_program("fit")
        check_arguments(unknown)
        what = "fit: expected class_weight to be a dict, such as {0: 1.0, 1: 5.0}"
        trainer.class_weight = checked_kind(what, class_weight or {}, dict)
        self._check_unchanged()
        callbacks = callbacks or ()
        others = [each for each in callbacks if not isinstance(each, keras.callbacks.Callback)]
        of_keras = [each for each in callbacks if isinstance(each, keras.callbacks.Callback)]
        params = {"epochs": epochs, "steps": steps_per_epoch, "verbose": int(bool(verbose))}
        hooks = KerasCallbacks(self, of_keras, params)
        trainer.keras_callbacks = hooks
        try:
            await trainer.fit(
                dataset,
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                steps_per_execution=(
                    self._compiled_steps if steps_per_execution is None else steps_per_execution
                ),
                validation_data=validation_data,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
                callbacks=[hooks, *others],
                initial_epoch=initial_epoch,
                verbose=verbose,
            )
        finally:
            trainer.keras_callbacks = None
        return hooks.history

    async def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """Return loss and metrics on data by name; each example counts exactly once.

        Args:
            data: (x, y) or (x, y, sample_weight), arrays of one length; a function (shard, number
                of shards) → finite iterable of batches, called on workers; or a list of shards,
                each a finite iterable of batches.
            batch_size: Batch size of arrays.

        Raises:
            ConfigurationError: The data is none of these, or a number is out of range.
            ClosedError: No coordinator runs.
            Exception: An exception of a step.

        Cancellation: Scheduled closures continue.
        """
        _, trainer = self._of_program("evaluate")
        return await trainer.evaluate(data, batch_size=batch_size)

    async def predict(self, x: Any, *, batch_size: int = 32) -> Any:
        """Return the outputs for x, computed by all workers, in the order of x.

        Args:
            x: An array, or a nesting of arrays of one length, as the model takes it.
            batch_size: Number of examples that a worker computes at a time.

        Returns:
            Arrays, nested like the model's outputs.

        Raises:
            ConfigurationError: There is no example, or a number is out of range.
            ClosedError: No coordinator runs.
            Exception: An exception of a step.

        Cancellation: Scheduled closures continue.
        """
        _, trainer = self._of_program("predict")
        return await trainer.predict(x, batch_size=batch_size)

    async def get_weights(self) -> list[np.ndarray]:
        """Return the present values in the order of Keras's ``get_weights()``.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        values = await self._read_values()
        return [values[name] for name in self._weights]

    async def set_weights(self, weights: Sequence[Any]) -> None:
        """Set values, in the order of Keras's ``get_weights()``; slots of the optimizer stay.

        Raises:
            UsageError: The number of weights or a shape differs; inside a step; or outside of a
                running coordinator. Nothing was changed.
            ValueMismatchError: A dtype cannot hold the numbers. Nothing was changed.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background.
        """
        kinds = {name: self._kinds[name] for name in self._weights}
        await self._load_values(weights_of(kinds, weights))

    async def pull(self) -> keras.Model:
        """Return the program's own Keras model with the present values: to save, to export.

        It is the same object every time. Changes to it stay local: ``set_weights`` sends them.

        Raises:
            UsageError: Outside of a running coordinator, or inside a step.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        built, _ = self._of_program("pull")
        values = await self._read_values()
        await asyncio.to_thread(built.assign, values)
        return built.model

    # For ``fit``.

    def _chief_model(self) -> keras.Model:
        """Return the program's own model as it is."""
        return self._of_program("its own model")[0].model

    def _chief_values(self) -> dict[str, np.ndarray]:
        """Return the values of the program's own model; copies."""
        values = self._of_program("its own model")[0].values()
        return {name: np.array(value) for name, value in values.items()}

    def _check_unchanged(self) -> None:
        """Check that the program's own model is trained as it was when it was declared."""
        self._of_program("its own model")[0].check_unchanged()

    def _steps(self) -> Steps:
        """Return an object that computes with this task's model and the present values; in a step.

        Raises:
            ConfigurationError: The model that ``build_model`` returns here differs from the
                declared one.
            PsyncError: See ``psync.pull``.
        """
        return self._loaded()[0]

    def _train_batch(self, batch: Any) -> np.ndarray:
        """Pull, compute and push, in a plain step; return the batch's contribution to metrics."""
        steps, values = self._loaded()
        gradients, sums = steps.train(batch)
        merged = self._state.names
        before = {name: values[name] for name in merged}
        wait(self._push_values(gradients, before, steps.state(merged)))
        return sums

    def _loaded(self) -> tuple[Steps, dict[str, np.ndarray]]:
        """Return what computes with this task's model, and what was pulled into it."""
        live, values, version = wait(self._pulled())
        live.steps.load(values)
        live.version = version  # only now: a step that is cancelled before has loaded nothing
        return live.steps, values

    async def _pulled(self) -> tuple[_Live, dict[str, np.ndarray], int | None]:
        """Return this task's model, which is built if it has none yet, and values to load."""
        live = await self._kept_here(self._begin)
        return live, *(await self._pull_values(live.version))

    def _begin(self) -> _Live:
        closure = current_closure()
        built = BuiltModel(self._build_model, self._settings)
        check_same(f"PSModel {self.name!r}", self._kinds, built.kinds())
        return _Live(steps_of(built, 0 if closure is None else closure.worker_index))

    def _of_program(self, what: str) -> tuple[BuiltModel, KerasTrainer]:
        """Return what only the program has.

        Raises:
            UsageError: Inside a step.
        """
        if self._built is None or self._trainer is None:
            raise UsageError(
                f"PSModel {self.name!r}: {what} inside a step",
                hint="fit, evaluate and predict run their own steps on workers: call them in the "
                "program",
            )
        return self._built, self._trainer


ServedModel = PSModel  # its name until 0.2
