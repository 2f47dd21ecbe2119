"""Registry of update rules: from a configuration that came over the wire to the rule.

psync's own are always there. A plugin registers others when its process starts; see ``psync.rules``
and ``launch.plugins``.
"""

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
OWN = frozenset(RULES)
"""Names of psync's own."""

_OPTIONS = tuple(field.name for field in fields(RuleOptions))


def rule_from_config(config: object) -> UpdateRule:
    """Return the rule that ``to_config`` described.

    Args:
        config: Whatever came over the wire; nothing about it is trusted.

    Raises:
        ConfigurationError: If it is not the config of a rule, or a registered one fails its probe.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("rule"), str):
        raise ConfigurationError(
            f"expected the config of an optimizer, got {type(config).__name__}"
        )
    name = config["rule"]
    cls = RULES.get(name)
    if cls is None:
        raise ConfigurationError(
            f"unknown optimizer {name[:100]!r}",
            hint=f"use one of {', '.join(RULES)}, {schedules.OR_OWN}",
        )
    arguments = {key: value for key, value in config.items() if key != "rule"}
    expected = sorted((*(field.name for field in fields(cls)), *_OPTIONS))
    if arguments.keys() != set(expected):
        raise ConfigurationError(
            f"{name}: expected the arguments {expected}, got {sorted(map(str, arguments))}"
        )
    options = RuleOptions(**{key: arguments.pop(key) for key in _OPTIONS})
    arguments["learning_rate"] = schedules.from_config(arguments["learning_rate"])
    rule = cls(**arguments)
    rule.probe()
    return rule.with_options(options)


Registered = tuple[str, str, int]
"""("rule" or "schedule", name, version) of what a plugin has registered."""


def register_rule(cls: type[UpdateRule]) -> None:
    """Make a rule of the user's known to this process; the same one again replaces itself.

    Raises:
        ConfigurationError: There is another one of its name.
    """
    known = RULES.get(cls.name)
    same = (cls.__module__, cls.__qualname__)
    if known is not None and (known.__module__, known.__qualname__) != same:
        raise ConfigurationError(
            f"update rule {cls.name!r} of {cls.__module__}: the name is already used by "
            f"{known.__module__}",
            hint="use a unique name, such as mypackage.sign",
        )
    RULES[cls.name] = cls


def registered() -> list[Registered]:
    """Return what plugins have registered in this process, in order."""
    rules = sorted((name, cls.version) for name, cls in RULES.items() if name not in OWN)
    return [
        *(("rule", *each) for each in rules),
        *(("schedule", *each) for each in schedules.registered()),
    ]


def unknown_in(config: object) -> str:
    """Return the rule or schedule that a config names and that is not known here; "": none.

    Args:
        config: Whatever was read; what is no config at all names none.
    """
    if not isinstance(config, Mapping):
        return ""
    name = config.get("rule")
    if isinstance(name, str) and name not in RULES:
        return f"update rule {name[:100]!r}"
    name = schedules.unknown_in(config.get("learning_rate"))
    return f"schedule {name[:100]!r}" if name else ""


def registered_in(rule: UpdateRule) -> list[Registered]:
    """Return what an optimizer needs that plugins register: its rule, its schedules."""
    own = [] if rule.name in OWN else [("rule", rule.name, rule.version)]
    rates = schedules.registered_in(rule.learning_rate)
    return [*own, *(("schedule", cls.__name__, cls.version) for cls in rates)]
