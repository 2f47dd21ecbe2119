"""Registry of update rules: from a configuration that came over the wire to the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from psync import schedules
from psync.errors import ConfigurationError
from psync.numerics.adaptive_rules import Adadelta, Adagrad, Ftrl, RMSprop
from psync.numerics.layerwise_rules import Lamb
from psync.numerics.moment_rules import Adam, Adamax, Lion, Nadam
from psync.numerics.rule_options import RuleOptions
from psync.numerics.update_rule import SGD, UpdateRule

RULES: dict[str, type[UpdateRule]] = {
    cls.name: cls
    for cls in (SGD, Adam, Adamax, Nadam, Lion, Adagrad, Adadelta, RMSprop, Ftrl, Lamb)
}
_OPTIONS = tuple(field.name for field in fields(RuleOptions))


def rule_from_config(config: object) -> UpdateRule:
    """Return the rule that ``to_config`` described.

    Args:
        config: Whatever came over the wire; nothing about it is trusted.

    Raises:
        ConfigurationError: If it is not the config of a rule.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("rule"), str):
        raise ConfigurationError(
            f"expected the config of an optimizer, got {type(config).__name__}"
        )
    name = config["rule"]
    cls = RULES.get(name)
    if cls is None:
        raise ConfigurationError(
            f"unknown optimizer {name[:100]!r}", hint=f"use one of {', '.join(RULES)}"
        )
    arguments = {key: value for key, value in config.items() if key != "rule"}
    expected = sorted((*(field.name for field in fields(cls)), *_OPTIONS))
    if arguments.keys() != set(expected):
        raise ConfigurationError(
            f"{name}: expected the arguments {expected}, got {sorted(map(str, arguments))}"
        )
    options = RuleOptions(**{key: arguments.pop(key) for key in _OPTIONS})
    arguments["learning_rate"] = schedules.from_config(arguments["learning_rate"])
    return cls(**arguments).with_options(options)
