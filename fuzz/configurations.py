"""Configurations of optimizers, schedules and synchronous groups, as a peer may send them.

What comes out: a rule that can be told in the same words again, or ConfigurationError.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    import math

    import numpy as np
    from samples import Draw, changed

    from psync import schedules
    from psync.errors import ConfigurationError
    from psync.numerics.memory import Scratch
    from psync.numerics.rules import (
        SGD,
        Adagrad,
        Adam,
        Ftrl,
        Lamb,
        Nadam,
        RMSprop,
        RuleOptions,
        rule_from_config,
    )
    from psync.store.sync_config import SyncConfig

    rates = [
        schedules.Constant(0.1),
        schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True),
        schedules.PiecewiseConstantDecay([10, 20], [0.3, 0.2, 0.1]),
        schedules.CosineDecayRestarts(0.1, 10),
        schedules.Warmup(schedules.PolynomialDecay(0.1, 10), 5),
    ]
    options = RuleOptions(weight_decay=0.1, clipnorm=1.0, gradient_accumulation_steps=2)
    rules = [
        rule(rate).to_config()
        for rule in (SGD, Adam, Nadam, Adagrad, RMSprop, Ftrl, Lamb)
        for rate in rates
    ]
    rules.append(SGD(0.1, 0.9, nesterov=True).with_options(options).to_config())
    groups = [
        SyncConfig(
            name="sync", optimizer=rules[0], replicas_to_aggregate=2, total_num_replicas=3,
            global_step=(0, 3, 0), averages=((1, 2),),
        ).to_config()
    ]  # fmt: skip
    known = [(rule_from_config, rules), (SyncConfig.from_config, groups)]

    def one_input(data: bytes) -> None:
        draw = Draw(data)
        from_config, configs = draw.of(known)
        try:
            made = from_config(changed(draw.of(configs), draw))
        except ConfigurationError as exc:
            assert len(str(exc)) < 5000  # it travels, and is logged
            return
        assert from_config(made.to_config()).to_config() == made.to_config() or _has_nan(made)
        if from_config is rule_from_config:
            for step in (0, 1, 7, 10**9):
                made.learning_rate(step)
            param, gradient = np.ones(3, np.float32), np.full(3, 0.5, np.float32)
            slots = [np.ones(3, np.float32) for _ in made.own_slots()]
            for step in (0, 1, 10**9):
                made.apply([(param, gradient, slots, param, slots)], step, Scratch())

    def _has_nan(made: object) -> bool:
        return "nan" in repr(made) or math.isnan(0.0)

    seeds = [
        bytes((kind, number, *range(number, number + 12)))
        for kind in (0, 0, 0, 1)
        for number in range(36)
    ]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
