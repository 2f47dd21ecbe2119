"""The public names: each is where it is said to be, and nothing is loaded before it is used."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import psync
from psync.cli import main as command_line
from psync.wire.handshake import RELEASE


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert psync.__all__ == sorted(set(psync.__all__))


def test_the_stub_reexports_each_name() -> None:
    stub = Path(psync.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r"(\w+) as \1\b", stub)) == set(psync.__all__)


def test_each_name_is_there_and_has_a_docstring() -> None:
    assert [name for name in psync.__all__ if not getattr(psync, name).__doc__] == []


def test_dir_lists_the_public_names() -> None:
    shown = [name for name in dir(psync) if not name.startswith("__")]
    assert shown == sorted(set(psync.__all__) - {"__version__"})


def test_the_version_is_that_which_tasks_compare() -> None:
    assert psync.__version__ == RELEASE


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'psync' has no attribute 'Varable'"):
        _ = psync.Varable  # type: ignore[attr-defined]


def loaded_after(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after running ``code``."""
    printing = f"import sys\n{code}\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", printing], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_importing_psync_loads_none_of_its_modules() -> None:
    loaded = loaded_after("import psync")
    assert {name for name in loaded if name.startswith("psync")} == {"psync"}
    assert not loaded & {"numpy", "asyncio", "uvloop", "click"}


def test_errors_can_be_had_without_numpy() -> None:
    assert "numpy" not in loaded_after("from psync import PsyncError")


def test_the_launcher_does_not_load_numpy() -> None:
    assert "numpy" not in loaded_after("import psync.cli.run")


def test_a_serving_task_does_not_load_what_only_others_need() -> None:
    loaded = loaded_after("import psync.cli.main, psync.launch.tasks")
    assert not loaded & {
        "cloudpickle", "multiprocessing", "rich", "ml_dtypes", "psync.testing",
        "psync.coordinator", "psync.cli.run", "psync.launch.cluster",
    }  # fmt: skip


def extras_of_users() -> list[tuple[str, str]]:
    """Each extra that is not for psync's own development or examples, and what it installs."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    own = {"test", "lint", "fuzz", "examples", "models", "package", "docs"}
    return [
        (extra, re.split(r"[<>=;\[ ]", requirement)[0])
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
        if extra not in own
    ]


def test_an_extra_installs_what_psync_uses() -> None:
    sources = "\n".join(path.read_text() for path in Path(psync.__file__).parent.rglob("*.py"))

    def is_used(package: str) -> bool:
        module = package.replace("-", "_")
        return bool(re.search(rf'^\s*(from|import) {module}\b|"{module}"', sources, re.MULTILINE))

    assert [each for each in extras_of_users() if not is_used(each[1])] == []


def test_earlier_names_work_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """They go with 0.2."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for earlier, name in psync._EARLIER.items():
            assert getattr(psync, earlier) is getattr(psync, name)
            assert earlier not in dir(psync)
        assert psync.RemoteValue.result is psync.RemoteValue.get_nowait
        spec = {"chief": ["a:1"], "ps": ["a:2", "a:3"], "worker": ["a:4"]}
        resolver = psync.SimpleClusterResolver(psync.ClusterSpec(spec), task_type="chief")
        strategy = psync.ParameterServerStrategy(resolver, ps_recovery="replica")
        assert strategy.ps_recovery == "backup"
        for arguments in (["serve", "--help"], ["--help"]):
            assert command_line.main(arguments) == 0
        help_of_serve, _, help_of_all = capsys.readouterr().out.partition("Usage: psync [OPTIONS]")
        assert help_of_serve.startswith("Usage: psync serve")
        assert not re.search(r"^ +serve ", help_of_all, re.MULTILINE)


@pytest.mark.parametrize(
    ("library", "earlier", "name"),
    [
        ("torch", "ServedModule", "PSModule"),
        ("jax", "ServedPytree", "PSPytree"),
        ("keras", "ServedModel", "PSModel"),
    ],
)
def test_so_do_earlier_names_of_integrations(library: str, earlier: str, name: str) -> None:
    pytest.importorskip(library)
    module = importlib.import_module(f"psync.integrations.{library}")
    assert getattr(module, earlier) is getattr(module, name)
