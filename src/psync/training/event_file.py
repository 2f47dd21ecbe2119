"""Event files as TensorBoard reads them: scalars in a TFRecord file.

A file is a sequence of records: length (uint64), masked CRC-32C of it, bytes, masked CRC-32C of
them, all little-endian. The bytes are a protobuf message ``Event``, of which only what a scalar
needs is written here: the encoding takes less than a dependency would.

Source: tensorflow/core/lib/io/record_writer.cc; tensorflow/core/util/event.proto and summary.proto.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from pathlib import Path

import numpy as np

_VERSION = b"brain.Event:2"
_MASK = 0xA282EAD8
_CASTAGNOLI = 0x82F63B78  # reflected

_numbers = itertools.count()  # of the files of this process


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


class EventFile:
    """A new event file for scalars.

    Args:
        directory: Directory of the file, created if missing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}"
        self.path = folder / f"{name}.{os.getpid()}.{next(_numbers)}"
        self._file = open(self.path, "xb")
        self._write(_event(time.time()) + _bytes_field(3, _VERSION))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a value.

        Args:
            tag: Name of the value; the part before a slash groups charts.
            value: Any float, including NaN.
            step: Number of at least 0.
        """
        with np.errstate(over="ignore"):  # a value beyond the range of float32 is infinite
            number = struct.pack("<f", np.float32(value))
        point = _bytes_field(1, tag.encode()) + b"\x15" + number
        summary = _bytes_field(1, point)
        self._write(_event(time.time()) + b"\x10" + _varint(step) + _bytes_field(5, summary))

    def flush(self) -> None:
        """Make the added values visible to readers."""
        self._file.flush()

    def close(self) -> None:
        """Write the remaining values and close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(
            length + struct.pack("<I", masked_crc(length)) + data
            + struct.pack("<I", masked_crc(data))
        )  # fmt: skip


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of data, masked as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# Protobuf.


def _event(wall_time: float) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time)


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
