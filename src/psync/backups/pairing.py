"""Pairing of a ps with its backup: both must compute by the same rules.

    the backup's process has    then
    another version of psync    it refuses: its rules, or its log, may be others
    other plugins               the same: they belong to the release, by names and versions
    another fingerprint         the primary decides. Where a synchronous group is deterministic it
                                refuses: bits are promised. Else they are paired, and it is counted
                                and logged: a value of the backup may differ in its last bits, its
                                decisions do not

A *fingerprint* is of a process's arithmetic: two that are equal compute the same bits.

A primary and its backup apply the same log, so they hold the same bits if their machines round
alike. No name says whether they do: it depends on the CPU, on numpy and on the C library. So a
fixed probe goes through all that a ps computes with, and its results are hashed: every rule, sums
and means of gradients, norms, moving averages, operations on rows, schedules. All of it but the
last has the same bits on every CPU that was tried; schedules, and the coefficients of rules, go
through the C library's ``pow`` and ``cos``, which differ between its versions and with the CPU.

What plugins have registered is in it, too: names, versions, results of the rules' own probes.

The probe is longer than the widest registers and than the library's pieces, and holds numbers of
all sizes, subnormal ones and infinities too. NaN is hashed as one: its bits mean nothing.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from psync import schedules
from psync.errors import ConfigurationError, VersionMismatch
from psync.numerics import rules, sums
from psync.numerics.memory import Scratch
from psync.numerics.rows import combine, merged
from psync.wire.handshake import RELEASE

DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "float16"))

SIZE = 525
"""Elements of most probes: two chunks of them, and a rest that no register divides."""

CALLS = 4000
"""Of each function of the C library; some results in 10,000 differ between its versions."""

OPERATIONS = ("add", "sub", "mul", "div", "min", "max")


def fingerprint() -> str:
    """Return 16 hexadecimal digits. The first call takes some milliseconds."""
    return _fingerprint_with(tuple(rules.registered()))


@functools.cache
def _fingerprint_with(plugins: tuple[rules.Registered, ...]) -> str:
    digest = hashlib.blake2b(repr(plugins).encode() if plugins else b"", digest_size=8)
    with np.errstate(all="ignore"):
        for array in probe():
            plain = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
            digest.update(plain.data)
    return digest.hexdigest()


def probe() -> Iterator[np.ndarray]:
    """Return what is hashed, array by array."""
    for dtype in DTYPES:
        arrays = [values(SIZE, dtype, seed) for seed in range(3)]
        for rule in _rules():
            yield from _updated(rule, arrays)
        yield from _summed(dtype)
        yield from _operated(dtype)
    yield np.array(list(_numbers()))
    for kind, name, _ in rules.registered():
        if kind == "rule":
            yield from rules.RULES[name]().probe()


def values(size: int, dtype: np.dtype, seed: int) -> np.ndarray:
    """Return numbers of all sizes, made without rounding until they get their dtype."""
    bits = np.arange(seed << 32, (seed << 32) + size, dtype=np.uint64)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    mantissas = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    exponents = (bits & np.uint64(15)).astype(np.int32) - 8
    exponents[5::16] += np.finfo(dtype).minexp  # products are subnormal, and some of these
    made = np.ldexp(mantissas, exponents).astype(dtype)
    made[7::97] = -0.0
    return made


def _rules() -> Iterator[rules.UpdateRule]:
    rate = schedules.ExponentialDecay(0.1, 7, 0.9)
    yield from (cls(rate) for cls in rules.RULES.values() if cls.__module__ == rules.__name__)
    options = rules.RuleOptions(weight_decay=0.3, clipvalue=2.0)
    for rule in (
        rules.SGD(rate, 0.9, nesterov=True),
        rules.Adam(rate, amsgrad=True),
        rules.RMSprop(rate, momentum=0.5, centered=True),
        rules.Ftrl(rate, -0.7, 0.1, 0.1, 0.1, 0.1, 0.1),
        rules.Lamb(rate),
    ):
        yield rule.with_options(options)


def _updated(rule: rules.UpdateRule, arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    param, *gradients = arrays
    param, work, scratch = param.copy(), rules.slot_dtype(param.dtype), Scratch(SIZE * 2 // 3)
    slots = [np.full(SIZE, rule.initial_slot(name), work) for name in rule.own_slots()]
    for step, gradient in enumerate(gradients):
        rule.apply([(param, gradient, slots, param, slots)], step, scratch)
    yield from (param, *slots)


def _summed(dtype: np.dtype) -> Iterator[np.ndarray]:
    gradients = [values(SIZE, dtype, seed) for seed in range(4, 7)]
    weights = (1.0, 0.3, 7.0)
    dense, sparse = sums.DenseSum(gradients[0].shape, dtype), sums.SparseSum((5,), dtype)
    for gradient, weight in zip(gradients, weights, strict=True):
        sums.at_once(dense.adding(gradient, weight))
        sums.at_once(sparse.adding(_row_numbers(), gradient.reshape(-1, 5), weight))
    yield from (sums.at_once(dense.making("mean")), sums.at_once(dense.making("sum")))
    yield from (sums.at_once(sparse.making("mean", per_index=each)) for each in (True, False))
    squares = sums.sum_of_squares(values(sums.SQUARES_PIECE + SIZE, dtype, 7))
    scales = rules.clip_scales([(0, squares)], rules.RuleOptions(clipnorm=3.0))
    yield np.array([squares, scales[0]])
    mean = sums.MeanGradient(gradients, weights, "mean", Scratch(SIZE), 0.7)[:SIZE]
    yield mean.copy()
    yield sums.scaled(mean, 1.3)
    average = gradients[0].copy()
    sums.move_average(average, mean, average, sums.growing_decay(0.99, 5), Scratch(SIZE))
    yield average
    sums.finish(average, 3.0, "mean")  # of an accumulator without weights
    yield average


def _row_numbers() -> np.ndarray:
    """Return numbers of rows, one of them many times."""
    rows = np.arange(SIZE // 5, dtype=np.int64) * 7 % 311
    rows[::9] = 3
    return rows


def _operated(dtype: np.dtype) -> Iterator[np.ndarray]:
    rows = values(SIZE, dtype, 8).reshape(-1, 5)
    for op in OPERATIONS:
        _, operand = merged(_row_numbers(), rows, op)
        current = values(operand.size, dtype, 9).reshape(-1, 5)
        combine(op, current, operand)
        yield current


def _numbers() -> Iterator[float]:
    """Return what the C library computes: for schedules, and for coefficients of rules."""
    for schedule in (
        schedules.ExponentialDecay(0.1, 7, 0.97),
        schedules.InverseTimeDecay(0.1, 7, 0.97),
        schedules.PolynomialDecay(0.1, 97, 0.01, 0.9, cycle=True),
        schedules.CosineDecay(0.1, 97, 0.01, 0.3, 11),
        schedules.CosineDecayRestarts(0.1, 7, 1.3, 0.9, 0.01),
    ):
        yield from map(schedule, range(100))
    for i in range(CALLS):
        yield math.cos(math.pi * (i / CALLS))
        yield math.pow(0.97, i / 7)
        yield 0.999**i


class Computation:
    """By what this process computes; see ``Platform.parts``."""

    @property
    def release(self) -> str:
        """The version of psync, and what plugins have registered."""
        plugins = [f"{kind} {name} {version}" for kind, name, version in rules.registered()]
        return ", ".join((RELEASE, *plugins))

    @property
    def numerics(self) -> str:
        """The fingerprint of its arithmetic."""
        return fingerprint()


def check_release(host: str, own: str, primary: str, release: str) -> None:
    """Refuse to back up a ps that runs another version of psync.

    Args:
        host: In whose process the backup is to be.
        own: The version that it runs, and its plugins.
        primary: Who is to be backed up.
        release: The version that that one runs.

    Raises:
        VersionMismatch: It is another one.
    """
    if release != own:
        raise VersionMismatch(
            f"{host} runs psync {own:.1000} and cannot back up {primary}, which runs "
            f"{release:.1000}",
            hint="run one version of psync, and the same plugins, on all ps tasks: save a "
            "checkpoint, stop the cluster, start it with the new version, restore",
        )


def check_deterministic(primary: str, host: str, groups: Sequence[str]) -> None:
    """Refuse deterministic groups on a ps whose backup has another fingerprint.

    Args:
        primary: Who is backed up.
        host: In whose process.
        groups: Names of all deterministic groups there.

    Raises:
        ConfigurationError: There are such.
    """
    if groups:
        raise ConfigurationError(
            f"{', '.join(groups)}: deterministic=True, but {primary} and its backup in the process "
            f"of {host} do not compute bit-identical results: their CPU, numpy or C library differ",
            hint="run all ps tasks on identical machines and from one image, or leave out "
            'deterministic=True or ps_recovery="backup"',
        )
