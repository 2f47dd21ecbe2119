"""A reader of event files, written after the format and not after the writer."""

from __future__ import annotations

import struct
from typing import Any

CASTAGNOLI = 0x1EDC6F41


def crc32c(data: bytes) -> int:
    """By definition: bit by bit, in the order of a reflected CRC."""
    register = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            top = register >> 31 ^ (byte >> bit & 1)
            register = (register << 1 & 0xFFFFFFFF) ^ (CASTAGNOLI if top else 0)
    return int(f"{register ^ 0xFFFFFFFF:032b}"[::-1], 2)


def unmasked(crc: int) -> int:
    rotated = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def records(data: bytes) -> list[bytes]:
    """The records of a TFRecord file, whose checksums hold."""
    found = []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        body = data[12 : 12 + length]
        for part, at in ((data[:8], 8), (body, 12 + length)):
            assert unmasked(*struct.unpack_from("<I", data, at)) == crc32c(part)
        found.append(body)
        data = data[16 + length :]
    return found


def fields(message: bytes) -> dict[int, Any]:
    """The fields of a protobuf message by number: the last one of each."""
    found: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        found[key >> 3] = message[at : at + size]
        at += size
    return found


def scalars(data: bytes) -> list[tuple[str, float, int]]:
    """Tag, value and step of each scalar, after the record that names the version."""
    first, *events = (fields(record) for record in records(data))
    assert first[3] == b"brain.Event:2"
    found = []
    for event in events:
        summary = fields(event[5])[1]
        value = fields(summary)
        found.append((value[1].decode(), *struct.unpack("<f", value[2]), event.get(2, 0)))
    return found
