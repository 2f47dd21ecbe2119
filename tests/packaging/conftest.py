"""The wheel and the sdist of this checkout, and an environment with nothing but the wheel.

They need the extra ``package``: ``make package`` installs it, elsewhere these tests are skipped.
Dependencies of the wheel come from the package index, as pinned in constraints.txt.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from packages import ROOT, build, make_environment
from pythons import pythons

MODULES = ("build", "hatchling", "hatch_fancy_pypi_readme")
CAN_BUILD = all(find_spec(module) for module in MODULES)
PYTHONS = pythons() if CAN_BUILD else {"none": Path()}  # which are there is not asked in vain


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    if not CAN_BUILD:
        pytest.skip("needs the extra package")
    sdist, wheel = build(ROOT, tmp_path_factory.mktemp("built"))[::-1]
    return sdist, wheel


@pytest.fixture(scope="session", params=list(PYTHONS))
def installed(
    request: pytest.FixtureRequest,
    built: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The interpreter of an environment that has the wheel, for each Python of this machine."""
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    return make_environment(folder / "venv", PYTHONS[request.param], built[1])
