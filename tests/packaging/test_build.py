"""What is built: the same bytes each time, all that belongs there, and a page of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import psync
from packages import ROOT, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_WHEEL_BYTES = 1_400_000
PROOFS = ("psync/testing/chaos/", "psync/testing/sabotage/", "psync/testing/simulation/")


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_bytes(archive.read(name))


def copied(root: Path, folder: Path) -> Path:
    """Copy the files that git knows, with other times and rights than they have."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
        os.chmod(target, 0o600 | (root / name).stat().st_mode & 0o100)
        os.utime(target, (1_500_000_000, 1_500_000_000))
    return folder


def test_two_builds_of_one_commit_have_the_same_bytes(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    again = build(copied(ROOT, tmp_path / "elsewhere"), tmp_path / "out")
    for first, second in zip(sorted(built, key=lambda path: path.name), again, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes(), first.name


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    (wheel,) = build(ROOT, tmp_path / "direct", "--wheel")
    assert wheel.read_bytes() == built[1].read_bytes()


def test_the_wheel_has_what_users_import_and_not_what_proves_it(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        packed = {name for name in archive.namelist() if name.startswith("psync/")}
    source = Path(psync.__file__).parent
    files = {
        f"psync/{path.relative_to(source).as_posix()}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == {name for name in files if not name.startswith(PROOFS)}
    assert {"psync/py.typed", "psync/__init__.pyi", "psync/testing/network.py"} <= packed
    assert built[1].stat().st_size < MAX_WHEEL_BYTES


def test_the_sdist_can_run_its_own_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "tests/conftest.py", "examples/digits.py"} <= names
    assert "src/psync/testing/chaos/__main__.py" in names


def test_the_version_is_that_of_the_code(built: tuple[Path, Path]) -> None:
    metadata = metadata_of(built[1])
    assert metadata["Version"] == psync.__version__
    assert built[1].name == f"psync-{psync.__version__}-py3-none-any.whl"
    assert built[0].name == f"psync-{psync.__version__}.tar.gz"


def test_the_page_of_the_package_renders_and_leads_nowhere_that_is_not_there(
    built: tuple[Path, Path],
) -> None:
    readme_renderer = pytest.importorskip("readme_renderer.markdown")
    html = readme_renderer.render(metadata_of(built[1]).get_payload())
    assert html is not None
    assert "<table>" in html, "cmarkgfm is missing: tables would be text"
    targets = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert [link for link in targets if not link.startswith(("https://", "#", "mailto:"))] == []
    assert "](" not in re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)


def test_twine_finds_nothing(built: tuple[Path, Path]) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
