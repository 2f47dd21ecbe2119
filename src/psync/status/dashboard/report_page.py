"""The report of a run: the dashboard's page and what it shows, in one HTML file.

The file opens offline, without a server: styles, scripts and data stand in it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import tempfile
from pathlib import Path

from psync.errors import ConfigurationError
from psync.status.dashboard.run_log import FinishedRun
from psync.status.dashboard.server import STATIC
from psync.status.dashboard.view import to_json
from psync.status.run_files import replacing

MAX_MOMENTS = 200
"""Moments among which a reader can choose. Charts of the whole run have more."""

MAX_BYTES = 16 << 20
"""Size of the data. Larger moments, as those of a thousand workers, are fewer."""

MODULES = "dom.js", "charts.js", "lanes.js", "app.js"
"""Scripts, each after those that it imports."""


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a report, which can be written there.

    Raises:
        ConfigurationError: It cannot, or something else than an HTML file is there.
    """
    path = Path(path)
    if path.is_dir() or not path.name.endswith((".html", ".htm")):
        raise ConfigurationError(f'report {path}: expected the name of a file that ends in ".html"')
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as exc:
        raise ConfigurationError(
            f"report {path}: {exc.strerror}", hint="the folder must exist and be writable"
        ) from exc
    return path


def write_report(log: str | os.PathLike[str], path: Path) -> Path:
    """Write the report of a run log.

    Args:
        log: Path of the run log.
        path: Where to write. If that is not possible, a new file in the folder for temporary
            files is written instead.

    Returns:
        The path of the file that was written.

    Raises:
        ConfigurationError: It is no run log, or has no status; or no file can be written.
    """
    with contextlib.closing(FinishedRun(log)) as run:
        page = _page(run).encode()
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        try:
            elsewhere = Path(tempfile.mkdtemp(prefix="psync-")) / path.name
            with replacing(elsewhere) as file:
                file.write(page)
        except OSError:
            raise ConfigurationError(f"report {path}: {error.strerror}") from error
        return elsewhere
    return path


def _page(run: FinishedRun) -> str:
    count, last = min(len(run), MAX_MOMENTS), len(run) - 1
    while True:
        step = last / max(count - 1, 1)
        moments = [run.view_at("recent", last - round(step * at)) for at in reversed(range(count))]
        size = sum(map(len, moments))
        if size <= MAX_BYTES or count == 1:
            break
        count = max(1, count * MAX_BYTES // (2 * size))
    series = to_json(run.series())
    return _filled(f'{{"moments":[{",".join(moments)}],"series":{series}}}')


def _filled(data: str) -> str:
    """Return the page, with everything that it would ask a server for."""
    page = _text("index.html")
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    page = page.replace("static/icon.svg", f"data:image/svg+xml;base64,{icon}")
    for name in ("vendor/uPlot.css", "style.css"):
        link = f'<link rel="stylesheet" href="static/{name}">'
        page = page.replace(link, f"<style>\n{_text(name)}</style>")
    code = "\n".join(map(_text, MODULES))
    code = re.sub(r"^(import .*\n|export )", "", code, flags=re.MULTILINE)
    licence = _text("vendor/uPlot.LICENSE").replace("*/", "")
    page = page.replace(
        '<script src="static/vendor/uPlot.js" defer></script>',
        f"<script>\n/* {licence} */\n{_text('vendor/uPlot.js')}</script>",
    )
    # Where the page ends, so that its elements are there; "<" in data could end the element.
    data = data.replace("<", "\\u003c")
    scripts = f'<script id="report" type="application/json">{data}</script>\n'
    scripts += f'<script type="module">\n{code}</script>\n</body>'
    page = page.replace('<script type="module" src="static/app.js"></script>\n', "")
    page = page.replace(' · <a href="api/status">status as JSON</a>', "")
    return page.replace("</body>", scripts)


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
