"""The table of failpoints names methods that are there, and their subclasses reach them."""

from __future__ import annotations

from typing import Any

from psync.testing.sabotage.places import PLACES, with_places


def test_a_place_is_a_method_of_its_class() -> None:
    for place in PLACES:
        assert callable(getattr(place.cls, place.method)), place
        method: Any = getattr(with_places(place.cls, place.cls), place.method)
        assert method.__wrapped__ is getattr(place.cls, place.method), place
