"""What can be asked of every rule: what is refused, and who does not decay."""

from __future__ import annotations

import pytest

from psync.errors import ConfigurationError
from psync.numerics.rules import MAX_WORDS, RuleOptions, flag, number


def test_nothing_is_asked_for_by_default() -> None:
    options = RuleOptions()
    assert set(vars(options).values()) == {None, ()}
    assert not options.excludes("w")


def test_numbers_become_floats_and_lists_tuples() -> None:
    options = RuleOptions(weight_decay=1, clipnorm=2, excluded_words=["a"])  # type: ignore[arg-type]
    assert (options.weight_decay, options.clipnorm) == (1.0, 2.0)
    assert isinstance(options.weight_decay, float)
    assert options.excluded_words == ("a",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_decay": -0.1}, "optimizer: expected weight_decay between 0 and inf, got -0.1"),
        ({"weight_decay": "x"}, "optimizer: weight_decay: expected a number, got 'x'"),
        ({"clipnorm": 0}, "optimizer: expected clipnorm between 5e-324 and inf, got 0"),
        ({"clipvalue": -1}, "optimizer: expected clipvalue between 5e-324 and inf, got -1"),
        (
            {"clipnorm": 1.0, "clipvalue": 2.0},
            "optimizer: expected at most one of clipnorm, global_clipnorm, clipvalue, "
            "got clipnorm=1.0, clipvalue=2.0",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "optimizer: expected gradient_accumulation_steps between 2 and 2147483647, got 1",
        ),
        (
            {"gradient_accumulation_steps": 2.5},
            "optimizer: expected a whole number as gradient_accumulation_steps, got 2.5",
        ),
        (
            {"gradient_accumulation_steps": True},
            "optimizer: expected a whole number as gradient_accumulation_steps, got True",
        ),
        (
            {"excluded_words": [""]},
            "exclude_from_weight_decay: expected at most 10000 words, got ['']",
        ),
        (
            {"excluded_names": "bias"},
            "exclude_from_weight_decay: expected at most 10000 words, got bias",
        ),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RuleOptions(**arguments)  # type: ignore[arg-type]
    assert caught.value.message == message


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at most 10000 words"):
        RuleOptions(excluded_words=("x",) * (MAX_WORDS + 1))


def test_variables_are_excluded_by_name_or_by_a_word_in_it() -> None:
    options = RuleOptions(excluded_names=("w",), excluded_words=("bias", "norm"))
    assert [name for name in ("w", "w2", "dense/bias", "batchnorm") if options.excludes(name)] == [
        "w",
        "dense/bias",
        "batchnorm",
    ]
    assert not options.excludes_any  # there is no decay
    assert RuleOptions(weight_decay=0.1, excluded_names=("w",)).excludes_any
    assert not RuleOptions(weight_decay=0.1).excludes_any


def test_number_and_flag_return_what_is_right() -> None:
    assert number("rule", "x", 1, 0, 1) == 1.0
    assert flag("rule", "x", True) is True
    with pytest.raises(ConfigurationError, match="rule: expected x between 0 and 1, got 2"):
        number("rule", "x", 2, 0, 1)
    with pytest.raises(ConfigurationError, match="rule: expected x to be True or False, got 1"):
        flag("rule", "x", 1)
