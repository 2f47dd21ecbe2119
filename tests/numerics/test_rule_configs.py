"""Update rules as configurations: what arrives is the same rule, and nonsense is refused."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest

import own_rules
from psync.errors import ConfigurationError
from psync.numerics import rules
from psync.numerics.rules import (
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Lion,
    RuleOptions,
    registered,
    registered_in,
    rule_from_config,
    unknown_in,
)
from rule_table import RULES


def test_every_rule_is_in_the_table_of_the_tests() -> None:
    assert {rule.name for rule in RULES.values()} == set(rules.RULES)


@pytest.mark.parametrize("rule", RULES)
def test_survives_the_wire(rule: str) -> None:
    made = RULES[rule]
    config = msgpack.unpackb(msgpack.packb(made.to_config()))
    rebuilt = rule_from_config(config)
    assert type(rebuilt) is type(made)
    assert rebuilt.to_config() == made.to_config()
    assert rebuilt.options == made.options
    assert rebuilt.slot_names() == made.slot_names()


def test_options_travel_with_the_rule() -> None:
    options = RuleOptions(0.5, None, None, 2.0, 4, ("a",), ("b", "c"))
    config = msgpack.unpackb(msgpack.packb(SGD().with_options(options).to_config()))
    assert config["weight_decay"] == 0.5
    assert config["gradient_accumulation_steps"] == 4
    assert rule_from_config(config).options == options


NAMES = "sgd, adam, adamax, nadam, lion, adagrad, adadelta, rmsprop, ftrl, lamb"
OPTIONS = [
    "clipnorm", "clipvalue", "excluded_names", "excluded_words", "global_clipnorm",
    "gradient_accumulation_steps", "learning_rate", "momentum", "nesterov", "weight_decay",
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "expected the config of an optimizer, got NoneType"),
        ({"rule": 1}, "expected the config of an optimizer, got dict"),
        ({"rule": "lbfgs"}, f"unknown optimizer 'lbfgs'\nhint: use one of {NAMES}"),
        ({"rule": "sgd", "lr": 1}, r"sgd: expected the arguments \[.*\], got \['lr'\]"),
        (SGD().to_config() | {"learning_rate": 0.1}, "expected the config of a schedule, got 0.1"),
        (SGD().to_config() | {"momentum": 2}, "sgd: expected momentum between 0 and 1, got 2"),
        (SGD().to_config() | {"momentum": None}, "sgd: momentum: expected a number, got None"),
        (SGD().to_config() | {"nesterov": 1}, "sgd: expected nesterov to be True or False, got 1"),
        (SGD().to_config() | {"weight_decay": -1}, "expected weight_decay between 0 and inf"),
        (SGD().to_config() | {"excluded_words": "w"}, "exclude_from_weight_decay: expected at"),
        (Adam().to_config() | {"beta_1": 1}, r"adam: expected beta_1 between 0 and 0\.99.*, got 1"),
        (Adam().to_config() | {"beta_2": -1}, "adam: expected beta_2 between 0 and"),
        (Adam().to_config() | {"epsilon": -1}, "adam: expected epsilon between 0 and inf"),
        (Adam().to_config() | {"amsgrad": ""}, "adam: expected amsgrad to be True or False"),
        (Lion().to_config() | {"beta_1": 0}, "lion: expected beta_1 between 5e-324 and 1, got 0"),
        (
            Adagrad().to_config() | {"initial_accumulator_value": -1},
            "adagrad: expected initial_accumulator_value between 0 and inf, got -1",
        ),
        (
            Ftrl().to_config() | {"learning_rate_power": 0.5},
            "ftrl: expected learning_rate_power between -inf and 0, got 0.5",
        ),
        (Ftrl().to_config() | {"beta": -1}, "ftrl: expected beta between 0 and inf, got -1"),
    ],
)
def test_refuses(config: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rule_from_config(config)


def test_the_message_names_what_is_expected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        rule_from_config({"rule": "sgd"})
    assert caught.value.message == f"sgd: expected the arguments {OPTIONS}, got []"


# Those of plugins.


@pytest.fixture
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


@pytest.mark.usefixtures("registry")
def test_one_of_a_plugin_survives_the_wire() -> None:
    rule = own_rules.Momentum(own_rules.Halving(0.5), momentum=0.25)
    config = msgpack.unpackb(msgpack.packb(rule.to_config()))
    rebuilt = rule_from_config(config)
    assert type(rebuilt) is own_rules.Momentum
    assert rebuilt.to_config() == config
    assert registered_in(rebuilt) == [
        ("rule", "tests.momentum", 1),
        ("schedule", "Halving", 1),
    ]


@pytest.mark.usefixtures("registry")
def test_what_is_registered_is_listed_in_order() -> None:
    assert registered() == [("rule", "tests.momentum", 1), ("schedule", "Halving", 1)]
    assert registered_in(SGD(0.1)) == []
    assert registered_in(SGD(own_rules.Halving(0.1))) == [("schedule", "Halving", 1)]


@pytest.mark.usefixtures("registry")
def test_one_name_is_of_one_class() -> None:
    rules.register_rule(own_rules.Momentum)
    with pytest.raises(ConfigurationError, match=r"'tests\.momentum' of .* by own_rules"):
        rules.register_rule(type("Other", (own_rules.Momentum,), {}))


@pytest.mark.usefixtures("registry")
def test_a_number_without_a_range_may_be_any() -> None:
    assert own_rules.Momentum(most=-3).most == -3.0


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        (None, ""),
        ({"rule": 3}, ""),
        (SGD().to_config(), ""),
        ({"rule": "mine"}, "update rule 'mine'"),
        (SGD().to_config() | {"learning_rate": {"kind": "Mine"}}, "schedule 'Mine'"),
    ],
)
def test_names_what_is_not_known(config: object, unknown: str) -> None:
    assert unknown_in(config) == unknown
