"""YAML of manifests. tests/integrations/test_manifests.py reads it with PyYAML."""

from __future__ import annotations

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
