"""Plugins of a process: loaded by name or entry point, or one error that says where it looked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import own_rules
from psync.errors import ConfigurationError
from psync.launch.plugins import check_found, load_plugins, plugins_environ
from psync.numerics.rules import registered

TASK = "/job:ps/task:1"

RULE = """
import psync

@psync.rules.register
class Mine(psync.rules.UpdateRule):
    name = "{name}"

    def update(self, value, slots, gradient, step):
        return value - step.learning_rate * gradient
"""


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules of a test are found, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("psync_mine", "psync_other", "psync_package"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def write(place: Path, name: str, text: str) -> None:
    (place / f"{name}.py").write_text(text)


def test_modules_are_loaded_by_name_and_once(place: Path) -> None:
    write(place, "psync_mine", RULE.format(name="one"))
    write(place, "psync_other", RULE.format(name="two"))
    for _ in range(2):
        load_plugins(TASK, {"PSYNC_PLUGINS": "psync_mine  psync_other"})
    assert registered() == [("rule", "one", 1), ("rule", "two", 1)]


def test_entry_points_of_installed_packages_are_loaded(place: Path) -> None:
    write(place, "psync_mine", RULE.format(name="by entry point"))
    info = place / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[psync.plugins]\nrules = psync_mine\n")
    load_plugins(TASK, {})
    assert registered() == [("rule", "by entry point", 1)]
    (info / "entry_points.txt").write_text("[psync.plugins]\nrules = psync_nothing\n")
    with pytest.raises(ConfigurationError) as caught:
        load_plugins(TASK, {})
    assert caught.value.message == (
        "plugin 'rules' of mine (psync_nothing) cannot be imported on /job:ps/task:1: "
        "ModuleNotFoundError: No module named 'psync_nothing'"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import psync_nothing",
            "ModuleNotFoundError: No module named 'psync_nothing' (at PLACE:1)",
        ),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero (at PLACE:2)"),
        ("raise SystemExit(3)", "SystemExit: 3 (at PLACE:1)"),
        (RULE.format(name="sgd"), "update rule 'sgd' of psync_mine: the name is"),
        ("def broken(:", "SyntaxError: "),
    ],
)
def test_one_that_cannot_be_imported_is_named_with_the_task_and_where_it_looked(
    place: Path, text: str, reason: str
) -> None:
    write(place, "psync_mine", text)
    with pytest.raises(ConfigurationError) as caught:
        load_plugins(TASK, {"PSYNC_PLUGINS": "psync_mine"})
    expected = f"plugin 'psync_mine' cannot be imported on {TASK}: {reason}"
    assert caught.value.message.startswith(expected.replace("PLACE", f"{place}/psync_mine.py"))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"{sys.executable} looks for modules in '{place}', ")


def test_one_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'psync_nothing\.rules' cannot be imported on /job"
    ):
        load_plugins(TASK, {"PSYNC_PLUGINS": "psync_nothing.rules"})


def test_a_launcher_looks_for_them_and_loads_nothing(place: Path) -> None:
    write(place, "psync_mine", "1 / 0")
    check_found(["psync_mine", "psync_mine.deeper"], [str(place)])
    with pytest.raises(ConfigurationError, match="no module or package 'psync_nothing'") as caught:
        check_found(["psync_nothing.rules"], ["/a", str(place)])
    assert caught.value.hint == f"searched in '/a', '{place}'"


def test_names_are_handed_on_beside_those_that_are_there() -> None:
    assert plugins_environ([], {"PSYNC_PLUGINS": "a"}) == {}
    handed = plugins_environ(["b.c", "a", "b.c"], {"PSYNC_PLUGINS": "a"})
    assert handed == {"PSYNC_PLUGINS": "a b.c"}


def test_what_is_no_module_is_refused() -> None:
    for plugins in [["rules.py/x"], ["a b"], [""], [3]]:
        with pytest.raises(
            ConfigurationError, match="expected names of modules, such as mypackage"
        ):
            plugins_environ(plugins, {})


def test_a_text_alone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a list of modules, got 'a'") as caught:
        plugins_environ("a", {})
    assert caught.value.hint == "plugins=['a']"
