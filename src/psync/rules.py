"""User-defined update rules, which a ps applies to each gradient, in numpy.

A rule is a class in a module that all tasks load as a *plugin*: ``psync run --plugin MODULE``,
``psync task --plugin MODULE``, ``LocalCluster(plugins=[MODULE])``, or an entry point of the group
``psync.plugins``. Only its name and its arguments travel; nothing is unpickled on a ps.

    @psync.rules.register
    class SignMomentum(psync.rules.UpdateRule):
        name = "mypackage.sign_momentum"
        slots = ("momentum",)
        beta: float = 0.9

        def update(self, value, slots, gradient, step):
            momentum = self.beta * slots["momentum"] + (1 - self.beta) * gradient
            return value - step.learning_rate * np.sign(momentum), {"momentum": momentum}

    optimizer = psync.optimizers.Optimizer(SignMomentum(0.01, beta=0.8), weight_decay=1e-4)

See ``docs/howto/rules.md``. Metrics run on workers and need no plugin: subclass
``psync.metrics.MetricRule``.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np

from psync.errors import ConfigurationError, check_fits
from psync.numerics import rules as known_rules
from psync.numerics.memory import Scratch
from psync.numerics.rules import ACCUMULATOR, Arrays, Coefficients, Part, RuleRaised
from psync.numerics.rules import UpdateRule as _AnyRule
from psync.numerics.rules import within as within
from psync.schedules import add_to
from psync.specs import plain_array, shortened

__all__ = ["Step", "UpdateRule", "register", "within"]

MAX_NAME_CHARS = 100

PROBED = tuple(np.dtype(name) for name in ("float32", "float64"))
PROBE_SIZE = 97
PROBE_STEPS = 3
TOLERANCE = 1e-4
"""Relative tolerance between one call and calls for two pieces: libraries may round the end of an
array differently. A rule that depends on other elements differs by far more.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of an update that are the same for all elements.

    Attributes:
        number: Number of the update, from 1: Adam's "t".
        learning_rate: Rate of this update; a schedule has been evaluated.
    """

    number: int
    learning_rate: float


class UpdateRule(_AnyRule):
    """Base of user-defined update rules; decorate the subclass with ``@register``.

    Annotated fields are arguments: numbers or bools with defaults. A number gets its range from
    ``within(default, minimum, maximum)``. The first argument is always ``learning_rate``, a number
    or a schedule. psync applies all options of ``psync.optimizers.Optimizer`` (weight decay,
    clipping, accumulation) around ``update``.

    Class attributes:
        name: Unique name of the rule on ps tasks, with its owner: "mypackage.sign".
        version: Number to raise when the results change. Tasks with different versions refuse each
            other.
        slots: Names of the arrays that are kept beside each value. They begin as 0, or as the
            argument ``initial_<slot>_value``.

    Example: See this module and ``docs/howto/rules.md``.
    """

    may_raise: ClassVar[bool] = True
    temporaries = 1

    @abstractmethod
    def update(
        self, value: np.ndarray, slots: Mapping[str, np.ndarray], gradient: np.ndarray, step: Step
    ) -> Any:
        """Return the new value and the new slots.

        The rule must be elementwise: element i of the results depends only on element i of the
        arrays. The arrays are arbitrary pieces of a shard, or some of its rows one after the other,
        so a norm or mean over them is meaningless.

        The rule must depend on its arguments alone, without randomness, clock, or state on ``self``
        or elsewhere. A ps, its backup ps, and a repetition after a failure all call it and must get
        the same bits.

        It runs on the event loop of the ps and blocks it, so it should take a few milliseconds. It
        never runs in another thread or twice at the same time.

        Args:
            value: 1-D array, float32 or float64 (half-precision variables come as float32).
                All arrays are read-only; do not keep them.
            slots: Arrays by name, each of the value's shape and dtype.
            gradient: Array of the value's shape and dtype; clipped by value if the optimizer does
                so.
            step: Inputs that are the same for all elements.

        Returns:
            ``(new value, {slot: new array})`` with all slots, or the new value alone if there are
            no slots. The arrays have the value's shape; float64 is rounded to float32 if the value
            is float32.

        Raises:
            BaseException: Any error except MemoryError leaves the shard and its slots unchanged,
                and the push fails with a ``psync.RuleError``. In a synchronous step, it ends the
                training of its ``SyncReplicasOptimizer`` with that error.
        """

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        return (rate, t)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        value, gradient, slots, out_value, out_slots = part
        rate, number = coefficients
        names = self.own_slots()
        by_name = dict(zip(names, map(_readonly, slots), strict=True))
        try:
            returned = self.update(
                _readonly(value), by_name, _readonly(gradient), Step(int(number), rate)
            )
            new_value, new_slots = self._checked(returned, value)
        except (MemoryError, KeyboardInterrupt):  # not the rule's: the task ends, as with any other
            raise
        except BaseException as exc:  # SystemExit too, which nobody would get an answer of
            raise RuleRaised from exc
        outs = (out_value, *out_slots)
        news = [  # what is written first must not change what is written then
            np.array(new) if any(np.may_share_memory(new, out) for out in outs) else new
            for new in (new_value, *new_slots)
        ]
        for out, new in zip(outs, news, strict=True):
            np.copyto(out, new, casting="same_kind")

    def _checked(self, returned: Any, value: np.ndarray) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Return the new value, and the new slots in their order."""
        names = self.own_slots()
        if not names and not isinstance(returned, tuple):
            returned = returned, {}
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        new, slots = returned if is_pair else (None, None)
        if not isinstance(slots, Mapping) or slots.keys() != set(names):
            wanted = f"(value, {{{', '.join(map(repr, names))}}})" if names else "the value"
            raise TypeError(f"update: expected it to return {wanted}, got {_shown(returned)}")
        arrays = [plain_array(each) for each in (new, *(slots[name] for name in names))]
        for what, given in zip(("the value", *names), arrays, strict=True):
            if given.shape != value.shape or not np.can_cast(given.dtype, value.dtype, "same_kind"):
                raise TypeError(
                    f"update: expected {what} to be of shape {value.shape} {value.dtype}, got "
                    f"{given.shape} {given.dtype}"
                )
        return arrays[0], arrays[1:]

    # The probe.

    def probe(self) -> Sequence[np.ndarray]:
        """Apply the rule to a few numbers, twice and in pieces, and return the results.

        Raises:
            ConfigurationError: The rule raises, does not return values and slots, returns different
                bits the second time, or is not elementwise.
        """
        results: list[np.ndarray] = []
        for dtype in PROBED:
            first, again = (self._probed(dtype, [slice(None)]) for _ in range(2))
            if any(_bits(a) != _bits(b) for a, b in zip(first, again, strict=True)):
                raise ConfigurationError(
                    f"{self.name}: update returned a different result when called again with the "
                    "same arguments",
                    hint="a ps and its backup both call it: use no randomness, no clock and no "
                    "state",
                )
            in_pieces = self._probed(dtype, [slice(0, 41), slice(41, PROBE_SIZE)])
            for whole, cut in zip(first, in_pieces, strict=True):
                if not np.allclose(whole, cut, rtol=TOLERANCE, atol=0, equal_nan=True):
                    raise ConfigurationError(
                        f"{self.name}: update gives an element a different value depending on the "
                        "other elements",
                        hint="variables are split into shards, and shards into blocks, so a rule "
                        "must be elementwise. To limit norms use clipnorm and global_clipnorm",
                    )
            results += first
        return results

    def _probed(self, dtype: np.dtype, pieces: Sequence[slice]) -> list[np.ndarray]:
        numbers = (np.arange(PROBE_SIZE) * 37 % PROBE_SIZE / PROBE_SIZE * 4 - 2).astype(dtype)
        arrays = [numbers] + [
            np.full(PROBE_SIZE, self.initial_slot(name), dtype) for name in self.own_slots()
        ]
        gradients = [np.roll(numbers, 11 * (i + 1)) * dtype.type(0.3) for i in range(PROBE_STEPS)]
        try:
            for piece in pieces:
                value, *slots = (array[piece] for array in arrays)
                for step, gradient in enumerate(gradients):
                    self.apply([(value, gradient[piece], slots, value, slots)], step, Scratch(128))
        except Exception as exc:
            cause = exc.__cause__ if isinstance(exc, RuleRaised) else exc  # else of a schedule
            raise ConfigurationError(
                f"{self.name}: update raised {type(cause).__name__} in a probe, with {dtype} "
                f"between -2 and 2: {cause}"
            ) from cause
        return arrays


R = TypeVar("R", bound=UpdateRule)


@dataclass_transform(eq_default=False, field_specifiers=(field, within))
def register(made: type[R]) -> type[R]:
    """Register an update rule in this process under its ``name``; a class decorator.

    The class becomes a dataclass, and ``UpdateRule.probe`` tests it with its default arguments.
    Registering the same class again, as when its module is reloaded, replaces it.

    Raises:
        ConfigurationError: The class is not a rule, its class attributes are wrong, another rule
            has its name, or the probe fails.
    """
    is_one = isinstance(made, type) and issubclass(made, UpdateRule)
    check_fits(is_one, "expected a subclass of psync.rules.UpdateRule", made)
    where = f"update rule {made.__module__}.{made.__qualname__}"
    _check_attributes(made, where)
    cls = made
    if "__dataclass_fields__" not in vars(made):  # else it is registered again
        cls = dataclass(eq=False)(made)
    if inspect.isabstract(cls):
        raise ConfigurationError(f"{where}: expected a method update(value, slots, gradient, step)")
    cls().probe()
    hint = "use a unique name, such as mypackage.sign"
    add_to(known_rules.RULES, cls.name, cls, f"update rule {cls.name!r}", hint)
    return cls


def _check_attributes(made: type[UpdateRule], where: str) -> None:
    name, slots = getattr(made, "name", None), made.slots
    fits = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
    expected = f"{where}: expected a text of 1 to {MAX_NAME_CHARS} characters as its name"
    check_fits(fits, expected, name, 'name = "mypackage.sign"')
    fits = isinstance(made.version, int) and not isinstance(made.version, bool)
    check_fits(fits, f"{where}: expected an integer as version", made.version)
    fits = isinstance(slots, tuple) and all(isinstance(slot, str) and slot for slot in slots)
    fits = fits and len({*slots, ACCUMULATOR}) == len(slots) + 1
    expected = f"expected a tuple of different names as slots, none of them {ACCUMULATOR!r}"
    check_fits(fits, f"{where}: {expected}", slots)


def _readonly(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _bits(array: np.ndarray) -> bytes:
    return bytes(array.view(np.uint8).data)


def _shown(value: object) -> str:
    return f"an array of {value.shape}" if isinstance(value, np.ndarray) else shortened(value)
