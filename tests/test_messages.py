"""Error messages, hints and log lines are plain English: all that stand in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from english import PHRASES
from pages import ROOT

SOURCES = ROOT / "src" / "psync"
LEVELS = {"info", "warning", "error", "exception", "critical", "log"}
NOT_SHOWN = ("testing/simulation/",)
"""A test bench of this project, with reports for its engineers."""

WORDS = re.compile(
    r"\b(nobody|begun anew|begins anew|goes back to a checkpoint|is given up|does not follow)\b"
)
NAMES = re.compile(r"[A-Z]\w*[A-Z_]\w*|[A-Z](?!\w)|Dask\b|Ray\b|Python\b")
"""How a message may begin with a capital: as a class, a variable or a product is called."""


def text_of(node: ast.expr) -> str:
    """Return the text of a literal, with "{}" for what is filled in; "": it is not a literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) or "{}" for each in node.values)
    if isinstance(node, ast.BinOp):
        return f"{text_of(node.left)}{text_of(node.right)}"
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}; {text_of(node.orelse)}"
    return ""


def texts(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of each message, hint and log line, and whether it is a message."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        is_logged = name in LEVELS and isinstance(call.func, ast.Attribute)
        is_error = name.endswith(("Error", "Mismatch", "Corrupt", "Lost", "Failed", "Exceeded"))
        shown = [*call.args] if is_logged or is_error else []
        yield from ((each.lineno, text_of(each), is_error) for each in shown)
        for keyword in call.keywords:
            if keyword.arg == "hint":
                yield keyword.value.lineno, text_of(keyword.value), False


def faults(path: Path) -> list[str]:
    """Return what is wrong with the texts of a file, by line."""
    found = []
    for line, text, is_message in texts(ast.parse(path.read_text())):
        if match := PHRASES.search(text) or WORDS.search(text):
            found.append(f'{path.name}:{line}: "{match[0]}" in {text!r}')
        if is_message and text[:1].isupper() and " " in text and not NAMES.match(text):
            found.append(f"{path.name}:{line}: a message begins with a capital: {text!r}")
    return found


def test_messages_hints_and_log_lines_are_plain() -> None:
    found = [
        fault
        for path in sorted(SOURCES.rglob("*.py"))
        if not str(path.relative_to(SOURCES)).startswith(NOT_SHOWN)
        for fault in faults(path)
    ]
    assert not found, "\n".join(found)


def test_texts_are_found() -> None:
    tree = ast.parse(
        'raise UsageError(f"a {b} anew", hint="c")\nlogger.info("d")\nlogger.debug("e")\n'
    )
    assert [each[1] for each in texts(tree)] == ["a {} anew", "c", "d"]
