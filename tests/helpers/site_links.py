"""Checks a built site: each link within it leads to a file, and to a part that is there.

    python tests/helpers/site_links.py out/site

Sphinx checks references between pages when it builds; this looks at what came out, also at links
that pages write as HTML or as plain paths, and at pictures.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The identifiers and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.ids.add(value)
            elif value and (name == "href" or (name == "src" and tag in ("img", "script"))):
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Describe each link of the site that leads nowhere."""
    pages = {
        path.resolve(): Page(path)
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            other = pages.get(target)
            if not target.is_file():
                found.append(f"{path.relative_to(site.resolve())}: {link}: no such file")
            elif other and parts.fragment and unquote(parts.fragment) not in other.ids:
                found.append(f"{path.relative_to(site.resolve())}: {link}: no such part")
    return found


if __name__ == "__main__":
    failures = broken(Path(sys.argv[1]))
    print(*failures, sep="\n", end="\n" if failures else "")
    sys.exit(bool(failures))
