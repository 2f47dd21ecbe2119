"""YAML of manifests. tests/integrations/test_manifests.py reads it with PyYAML."""

from __future__ import annotations

import json
from typing import Any

import pytest

from psync.cli.launch.yaml import dump

READABLE = """\
---
# One line,
# and another.
kind: Job
spec:
  command:
    - sh
    - "-c"
    - install -m 0600 /a/*.pem /b/
  ports:
    - name: psync
      port: 8470
    - {}
  key: |
    first

    last
"""


def test_it_is_what_people_write() -> None:
    data: dict[str, Any] = {
        "kind": "Job",
        "spec": {
            "command": ["sh", "-c", "install -m 0600 /a/*.pem /b/"],
            "ports": [{"name": "psync", "port": 8470}, {}],
            "key": "first\n\nlast\n",
        },
    }
    written = dump([("One line,\nand another.", data)])
    assert written == READABLE


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("None", "None"),
        ("no", '"no"'),
        ("True", '"True"'),
        ("8470", '"8470"'),
        ("1e3", '"1e3"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("- a", '"- a"'),
        ("ä", '"ä"'),
        ('say "x"', '"say \\"x\\""'),
        (True, "true"),
        (7, "7"),
        ([], "[]"),
    ],
)
def test_what_may_be_read_as_something_else_is_quoted(value: Any, written: str) -> None:
    assert dump([("", {"key": value})]) == f"---\nkey: {written}\n"


@pytest.mark.parametrize(
    "text",
    [
        "  indented\nnot\n", "\n  indented\nnot", "\tindented\nnot", " \nnot", "end\n\n", "end\n  ",
        "\n", "\n\n", "a\r\nb\r\n", "a\nb\0c",
    ],
)  # fmt: skip
def test_text_that_lines_of_its_own_would_change_is_quoted(text: str) -> None:
    assert dump([("", {"key": text})]) == f"---\nkey: {json.dumps(text)}\n"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\n", "|\n  a\n"),
        ("a\n  b", "|-\n  a\n    b\n"),
        ("\na\n\n \nb\n", "|\n\n  a\n\n   \n  b\n"),
        ("a\n\tb", "|-\n  a\n  \tb\n"),
    ],
)
def test_other_text_has_lines_of_its_own(text: str, written: str) -> None:
    assert dump([("", {"key": text})]) == f"---\nkey: {written}"
