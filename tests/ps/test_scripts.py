"""The scripts beside this file: what one ps does, alone, with a backup, and in its backup's place.

PSYNC_REWRITE=1 writes their traces anew: read the diff. See docs/explanation/testing.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import play_file

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_happens_as_the_script_says(path: Path) -> None:
    play_file(path)
