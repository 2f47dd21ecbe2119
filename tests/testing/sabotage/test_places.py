"""The table of failpoints names methods that are there, and their subclasses reach them."""

from __future__ import annotations

from typing import Any

import pytest

from psync.checkpoints.files import Writer
from psync.testing.sabotage import Failpoints
from psync.testing.sabotage.places import PLACES, Place, with_places


class Reached(Failpoints):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def hit(self, name: str) -> None:
        self.names.append(name)


def test_a_place_is_a_method_of_its_class() -> None:
    for place in PLACES:
        assert callable(getattr(place.cls, place.method)), place
        method: Any = getattr(with_places(place.cls, place.cls), place.method)
        assert method.__wrapped__ is getattr(place.cls, place.method), place


def test_places_of_one_method_are_reached_before_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from psync.testing.sabotage import places

    class Thing:
        def does(self, number: int) -> int:
            reached.names.append(f"does {number}")
            return number + 1

        async def does_later(self) -> str:
            reached.names.append("later")
            return "done"

    table = (
        Place("before", Thing, "does", False),
        Place("odd", Thing, "does", True, lambda _, number: number % 2),
        Place("later", Thing, "does_later", True),
    )
    monkeypatch.setattr(places, "PLACES", table)
    reached = Reached()
    made = with_places(Thing, Thing)
    made.failpoints = reached  # type: ignore[attr-defined]
    thing = made()
    assert [thing.does(1), thing.does(2)] == [2, 3]
    assert reached.names == ["before", "does 1", "odd", "before", "does 2"]
    reached.names.clear()
    coroutine = thing.does_later()
    with pytest.raises(StopIteration, match="done"):
        coroutine.send(None)
    assert reached.names == ["later", "later"]


def test_what_takes_the_place_of_a_method_of_the_class_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mutants do."""
    made = with_places(Writer, Writer)
    monkeypatch.setattr(Writer, "_rename_to", lambda self, final: [final])
    made.failpoints = reached = Reached()  # type: ignore[attr-defined]
    writer = object.__new__(made)
    assert writer._rename_to("final") == ["final"]  # type: ignore[func-returns-value, arg-type]
    assert reached.names == ["checkpoint.before_rename"]
