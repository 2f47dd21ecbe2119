"""Validated access to JSON from disk or network, which may be anything.

A value that is missing, of another type or out of range is a CheckpointCorrupt that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from psync.errors import CheckpointCorrupt


class UntrustedJson:
    """Reads one JSON text.

    Args:
        where: For messages: the file, or what is in it.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def parse(self, data: bytes) -> Mapping[str, Any]:
        """Return the object that the text is.

        Raises:
            CheckpointCorrupt: It is none.
        """
        return self.mapping(self._loaded(data), "it")

    def parse_list(self, data: bytes) -> Sequence[Any]:
        """Return the list that the text is.

        Raises:
            CheckpointCorrupt: It is none.
        """
        return self.sequence(self._loaded(data), "it")

    def _loaded(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise CheckpointCorrupt(f"{self.where}: damaged: it is not JSON: {exc}") from exc

    def mapping(self, value: Any, what: str) -> Mapping[str, Any]:
        """Return an object. Raises CheckpointCorrupt if ``value`` is none, as all that follow."""
        if not isinstance(value, dict):
            raise self.wrong(what, "an object", value)
        return value

    def sequence(self, value: Any, what: str, length: int | None = None) -> Sequence[Any]:
        """Return a list, of ``length`` entries if that is given."""
        if not isinstance(value, list) or (length is not None and len(value) != length):
            entries = "" if length is None else f" of {length} entries"
            raise self.wrong(what, f"a list{entries}", value)
        return value

    def number(self, value: Any, what: str) -> int:
        """Return a whole number from 0 that fits 64 bits."""
        if self.integer(value, what) < 0:
            raise self.wrong(what, "a whole number from 0", value)
        return int(value)

    def numbers(self, value: Any, what: str, length: int | None = None) -> list[int]:
        """Return a list of such numbers, of ``length`` entries if that is given."""
        listed = self.sequence(value, what, length)
        if not all(type(each) is int and 0 <= each < _MOST for each in listed):
            raise self.wrong(what, "whole numbers from 0", value)
        return list(listed)

    def integer(self, value: Any, what: str) -> int:
        """Return a whole number that fits 64 bits."""
        if isinstance(value, bool) or not isinstance(value, int) or not -_MOST <= value < _MOST:
            raise self.wrong(what, "a whole number", value)
        return value

    def text(self, value: Any, what: str) -> str:
        """Return a text that is not empty."""
        if not isinstance(value, str) or not value:
            raise self.wrong(what, "text", value)
        return value

    def hex(self, value: Any, what: str) -> bytes:
        """Return bytes that were written as ``bytes.hex`` does."""
        try:
            return bytes.fromhex(self.text(value, what))
        except ValueError:
            raise self.wrong(what, "bytes as hexadecimal digits", value) from None

    def wrong(self, what: str, expected: str, got: Any) -> CheckpointCorrupt:
        """Return the error for a value that is not what it must be."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointCorrupt(
            f"{self.where}: damaged: {what}: expected {expected}, got {shown}",
            hint="use an older checkpoint; this one was changed or damaged after it was saved",
        )


_MOST = 1 << 63
