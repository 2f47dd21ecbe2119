"""Each code block of README and site runs, is compared, or says why not: see ``helpers.pages``.

Here those of README and Start run; ``make pages`` sets ``PSYNC_PAGES=all`` and runs all others too.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from pages import ROOT, PageRun, all_pages, blocks

ALWAYS = [ROOT / "README.md", ROOT / "docs" / "start.md"]
CHOSEN = all_pages() if os.environ.get("PSYNC_PAGES") == "all" else ALWAYS
ELSEWHERE_AT_MOST = 9


def test_every_block_has_a_mark_and_few_are_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    found = [block for page in all_pages() for block in blocks(page)]
    unmarked = [block.where for block in found if not block.mark]
    assert not unmarked
    elsewhere = [f"{block.where}: {block.mark}" for block in found if block.kind == "elsewhere"]
    kinds = Counter(block.kind for block in found)
    with capsys.disabled():
        print(f"\ncode blocks: {dict(kinds)}", *elsewhere, sep="\n  ")
    assert set(kinds) <= {"run", "output", "elsewhere", "drawing"}
    assert all(", because " in line for line in elsewhere)
    assert len(elsewhere) <= ELSEWHERE_AT_MOST


def test_no_block_that_runs_leaves_something_out() -> None:
    for page in all_pages():
        for block in blocks(page):
            if block.kind == "run":
                assert "…" not in block.text, block.where


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [page for page in CHOSEN if any(block.kind == "run" for block in blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run = PageRun(tmp_path)
    try:
        for block in blocks(page):
            run.run(block)
        run.end()
    finally:
        run.close()
