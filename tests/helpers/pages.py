"""The code blocks of README and site: read from the pages, run as a reader would run them.

A comment before a block, which no reader sees, says what becomes of it::

    <!-- run -->                     Python: as a cell of the page's session; else: bash
    <!-- run: train.py -->           saved under this name; some later block has to use it
    <!-- output -->                  what the block before printed, on stdout and stderr
    <!-- output, numbers vary -->    the same, but for words with digits in them
    <!-- elsewhere, because ... -->  cannot run here, for this reason
    <!-- drawing -->                 a diagram in characters, no code

After ``run`` may stand ``, needs torch`` (a module without which the block is passed over) and
``, draws loss.png`` (a picture that has to be there afterwards, and that the page shows). A comment
that begins with ``<!-- run`` and goes on with lines of code is run, too, and not shown: the
context of a fragment. ``<!-- cluster: 2 ps, 3 workers -->`` opens ``cluster``, ``strategy`` and
``coordinator`` in the page's session; lines of code may follow here, too. In outputs a line ``…``
stands for any lines, and lines of psync's log, which depend on what else the machine does, are left
out.

markdown-it-py, which also reads the pages for the site, finds the blocks. What runs them is ours:
libraries for this (Sybil, pytest-markdown-docs, mktestdocs, pytest-codeblocks) run Python in the
process of the tests, and our blocks are programs that start clusters, and commands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MARK = re.compile(r"<!--\s*(.*?)\s*-->\s*\Z", re.DOTALL)
RUN = re.compile(r"run(?:: (?P<file>\S+?))?(?:, needs (?P<needs>\w+))?(?:, draws (?P<draws>\S+))?")
CLUSTER = re.compile(r"cluster: (?P<ps>\d+) ps, (?P<workers>\d+) workers?(?P<needs>, needs \w+)?")
OPENED = """\
import asyncio, glob
import numpy as np
import psync
cluster = psync.LocalCluster({ps}, {workers}, processes=False)
await cluster.start()
strategy = psync.ParameterServerStrategy(cluster.resolver)
coordinator = psync.ClusterCoordinator(strategy)
await coordinator.start()
"""
LOGGED = re.compile(r"^(\[[\w-]+\] )?\d\d:\d\d:\d\d [A-Z]+ psync.*\n?", re.MULTILINE)
LIMIT_S = 300.0


@dataclass(frozen=True)
class Block:
    """A code block of a page, or the hidden code of a comment."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def kind(self) -> str:
        return re.split(r"[\s:,]", self.mark, maxsplit=1)[0]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def all_pages() -> list[Path]:
    """README and the pages of the site."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page in their order; directives of the site are none."""
    mark = ""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            found = MARK.match(token.content.strip())
            mark = found[1] if found else ""
            first, _, code = mark.partition("\n")
            if opened := CLUSTER.fullmatch(first.strip()):
                first = f"run{opened['needs'] or ''}"
                code = OPENED.format(**opened.groupdict()) + code
            if first.startswith("run") and code:
                yield Block(page, line, "python", first.strip(), code)
                mark = ""
        elif token.type in ("fence", "code_block"):
            if not token.info.startswith("{"):
                yield Block(page, line, token.info.strip(), mark, token.content)
            mark = ""
        elif token.nesting >= 0:
            mark = ""


class PageRun:
    """The blocks of one page, run one after the other in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output: str | None = None  # of the block before; None if it was passed over
        self.waiting: set[str] = set()  # files that no block has used yet
        self._session: subprocess.Popen[str] | None = None
        for name in ("examples", "benchmarks", "docs"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "constraints.txt").symlink_to(ROOT / "constraints.txt")

    def run(self, block: Block) -> None:
        """Run a block, or compare an output.

        Raises:
            AssertionError: It failed, printed something else, or has no mark.
        """
        if block.kind == "run":
            found = RUN.fullmatch(block.mark)
            assert found, f"{block.where}: not understood: {block.mark}"
            if found["needs"] and importlib.util.find_spec(found["needs"]) is None:
                self.output = None
                return
            self._run(block, found["file"])
            if found["draws"]:
                self._picture(block, found["draws"])
        elif block.kind == "output":
            if self.output is not None:
                _compare(block, self.output)
        else:
            assert block.kind in ("elsewhere", "drawing"), f"{block.where}: block without a mark"

    def end(self) -> None:
        """End the session; every file that was saved has been used."""
        assert not self.waiting, f"saved, and used by no block: {', '.join(self.waiting)}"
        if self._session is not None and self._session.stdin is not None:
            self._session.stdin.close()
            self._session.wait(30)

    def close(self) -> None:
        """Stop whatever still runs."""
        if self._session is not None:
            _kill_group(self._session)
            for pipe in (self._session.stdin, self._session.stdout):
                if pipe is not None:
                    pipe.close()

    def _run(self, block: Block, file: str | None) -> None:
        self.waiting = {name for name in self.waiting if name not in block.text}
        stems = {name for name in self.waiting if re.search(rf"\b{Path(name).stem}\b", block.text)}
        self.waiting -= stems
        if file:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            self.waiting.add(file)
            self.output = None
        elif block.language == "python":
            self._run_in_session(block)
        else:
            self._run_command(block)

    def _run_command(self, block: Block) -> None:
        printed = self.folder / ".printed"
        text = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
        with open(printed, "w") as out:
            bash = subprocess.Popen(
                ["bash", "-ec", text], cwd=self.folder, env=_environment(),
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = bash.wait(LIMIT_S)
            finally:
                _kill_group(bash)
        self.output = printed.read_text()
        assert code == 0, f"{block.where}: exit code {code}\n{self.output}"

    def _run_in_session(self, block: Block) -> None:
        if self._session is None:
            self._session = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("page_session.py"))],
                cwd=self.folder, env=_environment(), text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._session.stdin
        assert self._session.stdout
        request = {"code": block.text, "file": str(block.page), "line": block.line}
        self._session.stdin.write(json.dumps(request) + "\n")
        self._session.stdin.flush()
        answer = self._session.stdout.readline()
        assert answer, f"{block.where}: the session has died"
        said = json.loads(answer)
        self.output = said["printed"]
        assert not said["error"], f"{block.where}: {said['error']}"

    def _picture(self, block: Block, name: str) -> None:
        drawn = self.folder / name
        assert drawn.is_file(), f"{block.where}: draws no {name}"
        name = drawn.name
        assert f"images/{name}" in block.page.read_text(), f"{block.page} shows no {name}"
        if os.environ.get("PSYNC_PICTURES"):
            shutil.copyfile(drawn, IMAGES / name)
        assert (IMAGES / name).is_file(), f"{name} is missing: make pictures"


def _environment() -> dict[str, str]:
    bin_ = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PSYNC_")}
    return {**kept, "PATH": f"{bin_}:{kept['PATH']}", "MPLBACKEND": "agg", "COLUMNS": "100"}


def _kill_group(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(15)
    except ProcessLookupError:
        return
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _compare(block: Block, printed: str) -> None:
    numbers_vary = block.mark == "output, numbers vary"
    assert numbers_vary or block.mark == "output", f"{block.where}: not understood: {block.mark}"
    parts = [_plain(part, numbers_vary) for part in re.split(r"^…$", block.text, flags=re.M)]
    pattern = r"(?:.*\n)?".join(re.escape(part) for part in parts)
    found = re.fullmatch(pattern, _plain(printed, numbers_vary), flags=re.DOTALL)
    assert found, f"{block.where}: the block before printed\n{printed}"


def _plain(text: str, numbers_vary: bool) -> str:
    """Blanks and lines of logs do not count; with ``numbers_vary`` words with digits neither."""
    text = LOGGED.sub("", text)
    if numbers_vary:
        text = re.sub(r"[\w.+-]*\d[\w.+-]*", "#", text)
        text = re.sub(r"#(\s+#)+", "#", text)  # so wraps an array
    text = re.sub(r"\[ +", "[", text)
    text = re.sub(r" +\]", "]", text)
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]
    return "".join(f"{line}\n" for line in lines if line)
