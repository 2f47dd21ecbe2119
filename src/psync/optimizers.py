"""Optimizers: handles that steps push gradients through; the ps tasks compute the updates.

Each class is a handle with the arguments of one rule. Names, arguments, formulas and defaults
are those of Keras 3. A learning rate is a number or a schedule. Each ps evaluates a schedule at
its own step or at the step that the push carries, whichever is larger. "The step" in a formula is
the ps's count of the optimizer's pushes; with accumulation, its count of updates. An argument that
is out of range raises a ``ConfigurationError``, which is also a ValueError.
``numerics.rules`` says how to add an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Unpack

from psync.api.optimizers import Optimizer as Optimizer
from psync.api.optimizers import Options, OtherOptions
from psync.numerics import rules as _rules
from psync.schedules import Schedule


class SGD(Optimizer):
    """Gradient descent, optionally with momentum.

    ``w -= learning_rate * g``; with momentum ``velocity = momentum * velocity - learning_rate * g``
    and ``w += velocity``, or with Nesterov ``w += momentum * velocity - learning_rate * g``.

    Args:
        learning_rate: A number or a schedule.
        momentum: Number in [0, 1]; 0 for no momentum.
        nesterov: Whether to look ahead along the velocity.
        options: Weight decay, clipping, accumulation, name and so on; see ``Optimizer``.

    Slots: "momentum", if momentum is not 0.

    Source: ``keras.optimizers.SGD``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(_rules.SGD(learning_rate, momentum, nesterov), **options)


class Momentum(SGD):
    """Gradient descent with momentum: ``SGD`` with a default of ``momentum=0.9``.

    Args:
        learning_rate: A number or a schedule.
        momentum: Number in [0, 1].
        nesterov: Whether to look ahead along the velocity.
        options: See ``Optimizer``.

    Slots: "momentum".

    Source: ``keras.optimizers.SGD``; ``tf.compat.v1.train.MomentumOptimizer``, whose velocity does
        not contain the learning rate.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov, **options)


class Nesterov(Momentum):
    """Gradient descent with Nesterov's momentum: ``SGD`` with ``nesterov=True``.

    Args:
        learning_rate: A number or a schedule.
        momentum: Number in [0, 1].
        options: See ``Optimizer``.

    Slots: "momentum".

    Source: ``keras.optimizers.SGD``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, momentum, True, **options)


class Adagrad(Optimizer):
    """Gradient descent scaled by the root of the sum of squared gradients, for rare features.

    ``accumulator += g * g`` and ``w -= learning_rate * g / sqrt(accumulator + epsilon)``.

    Args:
        learning_rate: A number or a schedule.
        initial_accumulator_value: First value of the accumulator, at least 0.
        epsilon: Number of at least 0.
        options: See ``Optimizer``.

    Slots: "accumulator".

    Source: Duchi et al. 2011; ``keras.optimizers.Adagrad``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        rule = _rules.Adagrad(learning_rate, initial_accumulator_value, epsilon)
        super().__init__(rule, **options)


class Adadelta(Optimizer):
    """Gradient descent scaled by moving averages of squared gradients and squared updates.

    Updates have the unit of the parameter.

    Args:
        learning_rate: A number or a schedule; the paper uses 1.
        rho: Decay of both averages, in [0, 1].
        epsilon: Number of at least 0.
        options: See ``Optimizer``.

    Slots: "accumulated_grad", "accumulated_delta_var".

    Source: Zeiler 2012; ``keras.optimizers.Adadelta``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(_rules.Adadelta(learning_rate, rho, epsilon), **options)


class RMSprop(Optimizer):
    """Gradient descent scaled by the root of a moving average of squared gradients.

    Args:
        learning_rate: A number or a schedule.
        rho: Decay of the averages, in [0, 1].
        momentum: Number in [0, 1]; 0 for no momentum.
        epsilon: Number of at least 0.
        centered: Whether to divide by the standard deviation of gradients instead of their size.
        options: See ``Optimizer``.

    Slots: "velocity"; "momentum" if momentum is not 0; "average_gradient" if centered.

    Source: Hinton 2012; ``keras.optimizers.RMSprop``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        rule = _rules.RMSprop(learning_rate, rho, momentum, epsilon, centered)
        super().__init__(rule, **options)


class Adam(Optimizer):
    """Adaptive moment estimation.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the square root of the second moment.
        amsgrad: Whether to divide by the largest second moment so far.
        options: See ``Optimizer``.

    Slots: "m", "v", and "vhat" with amsgrad.

    Source: Kingma and Ba 2015; ``keras.optimizers.Adam`` for formula and epsilon.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        rule = _rules.Adam(learning_rate, beta_1, beta_2, epsilon, amsgrad)
        super().__init__(rule, **options)


class AMSGrad(Adam):
    """Adam that divides by the largest second moment so far: ``Adam`` with ``amsgrad=True``.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the square root of the second moment.
        options: See ``Optimizer``.

    Slots: "m", "v", "vhat".

    Source: Reddi et al. 2018; ``keras.optimizers.Adam``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, True, **options)


class AdamW(Adam):
    """Adam with decoupled weight decay: ``Adam`` with a default of ``weight_decay=0.004``.

    Args:
        learning_rate: A number or a schedule.
        weight_decay: Number of at least 0; see ``Optimizer``.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the square root of the second moment.
        amsgrad: Whether to divide by the largest second moment so far.
        options: See ``Optimizer``.

    Slots: "m", "v", and "vhat" with amsgrad.

    Source: Loshchilov and Hutter 2019; ``keras.optimizers.AdamW``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[OtherOptions],
    ) -> None:
        rest = Options(**options, weight_decay=weight_decay)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, **rest)


class _MomentOptimizer(Optimizer):
    """Base of those whose rule has two moments and an epsilon, and no other arguments."""

    _moment_rule: ClassVar[Callable[..., _rules.UpdateRule]]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(self._moment_rule(learning_rate, beta_1, beta_2, epsilon), **options)


class Adamax(_MomentOptimizer):
    """Adam with the infinity norm in place of the second moment.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the norm, in [0, 1).
        epsilon: Number added to the norm.
        options: See ``Optimizer``.

    Slots: "m", "u".

    Source: Kingma and Ba 2015, section 7; ``keras.optimizers.Adamax``.
    """

    _moment_rule = _rules.Adamax


class Nadam(_MomentOptimizer):
    """Adam with Nesterov's momentum.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the square root of the second moment.
        options: See ``Optimizer``.

    Slots: "m", "v".

    Source: Dozat 2016; ``keras.optimizers.Nadam``.
    """

    _moment_rule = _rules.Nadam


class Ftrl(Optimizer):
    """Follow the regularized leader, for sparse models: elements with small gradients stay 0.

    Args:
        learning_rate: A number or a schedule. At 0 nothing changes.
        learning_rate_power: Number of at most 0; at 0 the learning rate does not decay.
        initial_accumulator_value: Number of at least 0.
        l1_regularization_strength: Number of at least 0.
        l2_regularization_strength: Number of at least 0.
        l2_shrinkage_regularization_strength: Number of at least 0.
        beta: Number of at least 0.
        options: See ``Optimizer``.

    Slots: "accumulator", "linear".

    Source: McMahan et al. 2013; ``keras.optimizers.Ftrl``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        rule = _rules.Ftrl(
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
        )
        super().__init__(rule, **options)


class Lion(Optimizer):
    """Updates by the sign of a momentum, so that all elements move by the learning rate.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Weight of the momentum in the direction, above 0 and at most 1.
        beta_2: Decay of the momentum, in [0, 1].
        options: See ``Optimizer``.

    Slots: "momentum".

    Source: Chen et al. 2023; ``keras.optimizers.Lion``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(_rules.Lion(learning_rate, beta_1, beta_2), **options)


class Lamb(_MomentOptimizer):
    """Adam with updates scaled to the norm of each variable, times the learning rate.

    The scale is the norm of the whole variable divided by the norm of its update. For a variable of
    several shards, a push takes two rounds, and the first only measures. The scale may therefore
    miss one update of other workers. Gradients of some rows are refused, because their norm is not
    that of the variable.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the square root of the second moment.
        options: See ``Optimizer``.

    Slots: "m", "v".

    Source: You et al. 2019 (LAMB); ``keras.optimizers.Lamb``.
    """

    _moment_rule = _rules.Lamb
