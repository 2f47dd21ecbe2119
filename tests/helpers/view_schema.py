"""The schema of what the dashboard's page is sent."""

from __future__ import annotations

from typing import Any

TEXT, NUMBER, INTEGER = str, (int, float), int

SCHEMA: dict[str, Any] = {
    "schema": INTEGER, "mode": TEXT, "time": NUMBER, "program": TEXT, "pid": INTEGER,
    "state": TEXT, "uptime": TEXT, "waits_for": TEXT,
    "why": [{"level": TEXT, "text": TEXT}],
    "tiles": [{"name": TEXT, "value": TEXT, "more": TEXT}],
    "series": {str: [(int, float, type(None))]},
    "staleness": [{"label": TEXT, "count": INTEGER, "height": INTEGER, "share": TEXT}],
    "groups": [{"name": TEXT, "text": TEXT, "more": TEXT}],
    "workers": [{name: TEXT for name in (
        "task", "state", "rate", "mean", "stale", "dropped", "losses", "closure", "since", "error",
    )}],
    "num_workers": INTEGER, "states": list, "lanes": {"times": [NUMBER], "rows": list},
    "ps": [{str: TEXT}], "num_ps": INTEGER,
    "placement": [{"task": TEXT, "total": TEXT, "parts": [
        {"name": TEXT, "text": TEXT, "width": NUMBER, "colour": INTEGER},
    ]}],
    "events": [{"kind": TEXT, "text": TEXT, "ago": TEXT}],
    "notes": [TEXT], "missing": {str: TEXT},
}  # fmt: skip


def check_view(view: dict[str, Any]) -> None:
    """Assert that a view has the schema, and that what belongs together is of one length."""
    more = {"moments", "ended"} if view["mode"] == "log" else set()
    _check({name: value for name, value in view.items() if name not in more}, SCHEMA, "view")
    assert set(view) == set(SCHEMA) | more
    assert len({len(values) for values in view["series"].values()}) <= 1
    assert {level["level"] for level in view["why"]} <= {"bad", "warn", "good"}
    assert len(view["lanes"]["rows"]) == len(view["workers"])
    for row in view["lanes"]["rows"]:
        assert len(row) == len(view["lanes"]["times"])
        assert all(cell is None or (isinstance(cell[0], str) and len(cell) == 5) for cell in row)
    assert len(view["states"]) == view["num_workers"]
    for name, state, slowness in view["states"]:
        assert isinstance(name, str)
        assert isinstance(state, str)
        assert 0 <= slowness <= 1


def _check(value: Any, expected: Any, where: str) -> None:
    if isinstance(expected, list):
        assert isinstance(value, list), where
        for at, item in enumerate(value):
            _check(item, expected[0], f"{where}[{at}]")
    elif isinstance(expected, dict):
        assert isinstance(value, dict), where
        if list(expected) == [str]:
            for name, item in value.items():
                _check(item, expected[str], f"{where}.{name}")
            return
        assert set(value) == set(expected), where
        for name, item in value.items():
            _check(item, expected[name], f"{where}.{name}")
    else:
        assert isinstance(value, expected), f"{where}: {value!r}"
